"""Show how a shape would be spread: every candidate with its predicted time, why the first was taken, and its steps.

Needs no ranks and no GPU: `ringattn plan seq_len=131072 heads=32,8 head_dim=128 ring=4 ulysses=2 device=cuda`.
With sequence=N instead of ring and ulysses, the plan factors N by itself. The steps show who works when, and what
travels; docs=LENGTHS counts packed documents.
"""

import sys
from dataclasses import dataclass

import numpy as np

from ringattn import api
from ringattn.comms.local import Board, LocalMesh
from ringattn.cost import SAMPLED_ROWS, pairs
from ringattn.launch.words import option
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch.steps import Mask, schedule_of


@dataclass(frozen=True)
class Options:
    seq_len: int = option(131072, "tokens of the whole sequence")
    heads: tuple[int, ...] = option((32, 8), "query heads, key heads")
    head_dim: int = option(128, "the size of a head")
    value_dim: int | None = option(None, "the size of a value, if it is another")
    key_len: int | None = option(None, "tokens of the keys' sequence, if it is another (needs causal=false)")
    ring: int = option(1, "ranks along the ring axis")
    ulysses: int = option(1, "ranks along the ulysses axis")
    sequence: int | None = option(None, "ranks in all; the plan chooses ring and ulysses")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: str = option("auto", "auto, contiguous, striped or zigzag")
    kernel: str = option("auto", "auto, or the name of a kernel")
    causal: bool = option(True, "whether a query sees no later key")
    window: int | None = option(None, "how many keys a query sees at most")
    docs: tuple[int, ...] | None = option(None, "lengths of packed documents; the rest is padding")
    device: str = option("cuda", "cuda or cpu: whose speeds and kernels to assume")
    dtype: str | None = option(None, "bfloat16 on cuda and float32 on cpu, if not said")


def run(options: Options) -> int:
    """Print the plan and its steps; a plan that cannot be is one sentence and exit status 2."""
    try:
        plan, spec = planned(options), AttentionSpec(causal=options.causal, window=options.window)
        docs = None if options.docs is None else Docs.from_lengths(options.docs, pad_to=options.seq_len)
    except (ValueError, NotImplementedError) as error:
        print(f"ringattn plan: {error}", file=sys.stderr)
        return 2
    print(plan.explain())
    if plan.ring > 1:
        print("\n".join(["", *steps(plan, spec, docs)]))
    return 0


def planned(options: Options) -> Plan:
    """The plan that rank 0 of such a mesh would make."""
    if options.sequence is not None and (options.ring, options.ulysses) != (1, 1):
        raise ValueError(f"sequence={options.sequence} leaves ring and ulysses to the plan; leave them out")
    if len(options.heads) not in (1, 2):
        raise ValueError(f"heads={options.heads}: say query heads and key heads, as in heads=32,8")
    if options.device not in ("cuda", "cpu"):
        raise ValueError(f"device={options.device!r}: choose cuda or cpu")
    sizes = {"ring": options.ring, "ulysses": options.ulysses}
    mesh = LocalMesh(Board(), {"sequence": options.sequence} if options.sequence else sizes, rank=0)
    mesh.device_type = options.device
    return api.plan(
        mesh,
        seq_len=options.seq_len,
        key_len=options.key_len,
        heads=(options.heads[0], options.heads[-1]),
        head_dim=options.head_dim,
        value_dim=options.value_dim,
        spec=AttentionSpec(causal=options.causal, window=options.window),
        strategy=options.strategy,
        layout=options.layout,
        kernel=options.kernel,
        dtype=options.dtype,
    )


def steps(plan: Plan, spec: AttentionSpec, docs: Docs | None) -> list[str]:
    """The ring's steps as the lines of a table: the pairs each rank works on, and the blocks that move on."""
    counts = pairs(plan.tokens, plan.keys.tokens, spec, docs)
    schedule = schedule_of(Mask(plan, spec, docs))
    ranks = range(plan.ring)
    runs = [schedule.steps(r) for r in ranks]
    share = counts.sum() / plan.ring
    lines = [
        "steps of the ring: the share of a rank's mean work that each rank does, and how many blocks then move on"
        + (" (sampled)" if plan.tokens.padded_length > SAMPLED_ROWS else ""),
        "  step  " + "".join(f"{f'rank {r}':>8}" for r in ranks) + "   moves",
    ]
    for i, distance in enumerate(schedule.distances):
        work = [counts[r, (r - distance) % plan.ring] / max(share, 1) for r in ranks]
        hops = [run[i].hop for run in runs]
        moves = sum(h is not None and h.send for h in hops)
        lines.append(f"  {distance:>4}  " + "".join(f"{w:>8.0%}" for w in work) + f"{moves:>8}")
    skipped = plan.ring - len(schedule.distances)
    total = counts.sum(1) / max(share, 1)
    lines.append("  all   " + "".join(f"{w:>8.0%}" for w in total) + (f"   {skipped} steps skipped" if skipped else ""))
    return lines if plan.strategy != "gather" else gathered(total)


def gathered(total: np.ndarray) -> list[str]:
    work = "".join(f"{w:>8.0%}" for w in total)
    return [
        "gather: one step, after every rank's keys have arrived; the share of the mean work that each rank does",
        work,
    ]
