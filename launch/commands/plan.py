"""Show how a shape would be spread: every candidate with its predicted time, why the first was taken, and its steps.

Needs no ranks and no GPU: `ringattn plan seq_len=131072 heads=32,8 head_dim=128 ring=4 ulysses=2 device=cuda`.
With sequence=N instead of ring and ulysses, the plan chooses both. The steps show which rank works when, and what
travels. With docs=LENGTHS the work is that of packed documents. With device=tpu, or where torch is not installed, the
plan is one for JAX.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from ringattn import choosing
from ringattn.choosing import elsewhere, factored
from ringattn.cost import SAMPLED_ROWS, kv_heads_of_a_rank, seen_pairs
from ringattn.launch.words import option
from ringattn.mask import Mask, schedule_of
from ringattn.planning import Plan, Transport
from ringattn.spec import AttentionSpec, Docs

MOST = 1024  # ranks: what each pair of them works on is counted


@dataclass(frozen=True)
class Options:
    seq_len: int = option(131072, "tokens of the whole sequence")
    heads: tuple[int, ...] = option((32, 8), "query heads, key heads")
    head_dim: int = option(128, "the size of a head")
    value_dim: int | None = option(None, "the size of a value; by default head_dim")
    key_len: int | None = option(None, "tokens of the keys; by default seq_len (another length needs causal=false)")
    ring: int = option(1, "ranks along the ring axis")
    ulysses: int = option(1, "ranks along the ulysses axis")
    sequence: int | None = option(None, "ranks; the plan chooses ring and ulysses")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: str = option("auto", "auto, contiguous, striped, zigzag or balanced")
    kernel: str = option("auto", "auto, or the name of a kernel")
    hosts: int = option(1, "hosts of the ring, each with as many consecutive ranks")
    route: str = option("auto", "how keys reach the ranks of a ring: auto, direct, relay or levels")
    together: int | None = option(None, "with route=direct: from how many ranks keys arrive in a step")
    transport: str = option("auto", "auto, symmetric (GPUs of one host share memory) or group (NCCL, gloo)")
    groups: int | None = option(None, "in how many groups Ulysses and gather exchange the heads")
    causal: bool = option(True, "whether a query sees no later key")
    window: int | None = option(None, "how many keys a query sees at most")
    docs: tuple[int, ...] | None = option(None, "lengths of packed documents; the rest is padding", least=0)
    device: str = option("cuda", "the speeds and kernels to assume", among=("cuda", "cpu", "tpu"))
    dtype: str | None = option(None, "by default float32 on cpu and bfloat16 elsewhere")


class Link(NamedTuple):
    """The axis of a plan whose ranks do not exist here."""

    by: str
    hosts: int


def run(options: Options) -> int:
    """Print the plan and its steps."""
    spec = AttentionSpec(causal=options.causal, window=options.window)
    if options.docs is not None and sum(options.docs) > options.seq_len:
        raise ValueError(f"docs= holds {sum(options.docs)} tokens, more than seq_len={options.seq_len}")
    if options.causal and options.key_len not in (None, options.seq_len):
        raise ValueError(
            f"key_len={options.key_len} beside seq_len={options.seq_len} needs causal=false: a causal mask does "
            "not say which query is at which key"
        )
    docs = None if options.docs is None else Docs.from_lengths(options.docs, pad_to=options.seq_len)
    plan = planned(options, spec, docs)
    print(plan.explain())
    if plan.ring > 1:
        print("\n".join(["", *steps(plan, spec, docs)]))
    return 0


def planned(options: Options, spec: AttentionSpec, docs: Docs | None) -> Plan:
    """The plan that the ranks of this mesh would make."""
    if options.sequence is not None and (options.ring, options.ulysses) != (1, 1):
        raise ValueError(f"sequence={options.sequence} leaves ring and ulysses to the plan; leave them out")
    if (ranks := options.sequence or options.ring * options.ulysses) > MOST:
        raise ValueError(f"{ranks} ranks; a plan is shown for {MOST} at most")
    if len(options.heads) not in (1, 2):
        raise ValueError(f"heads={options.heads}: give query heads and key heads, as in heads=32,8")
    sizes = factored(options.sequence) if options.sequence else [(options.ring, options.ulysses)]
    transport = Transport(options.route, options.hosts, options.together, options.groups, options.transport)
    target = elsewhere(options.device, sizes, Link(moves(options), options.hosts))
    if options.device == "tpu" or find_spec("torch") is None:  # a plan of JAX, where the compiler moves the blocks
        target = elsewhere(options.device, sizes, framework="jax")
        transport = transport.replace(hosts=None if options.hosts == 1 else options.hosts)
    return choosing.plan(
        target,
        seq_len=options.seq_len,
        key_len=options.key_len,
        heads=(options.heads[0], options.heads[-1]),
        head_dim=options.head_dim,
        value_dim=options.value_dim,
        spec=spec,
        docs=docs,
        strategy=options.strategy,
        layout=options.layout,
        kernel=options.kernel,
        transport=transport,
        dtype=options.dtype,
    )


def moves(options: Options) -> str:
    """What moves the blocks of a ring there, where GPUs of one host see each other's memory."""
    shared = options.device == "cuda" and options.hosts == 1
    if options.transport == "symmetric" and not shared:
        raise ValueError("transport=symmetric needs GPUs of one host; use device=cuda hosts=1, or transport=group")
    if options.device == "cpu":
        return "gloo"
    return "symmetric memory" if shared and options.transport != "group" else "nccl"


def steps(plan: Plan, spec: AttentionSpec, docs: Docs | None) -> list[str]:
    """The steps of the plan's route as the lines of a table: the pairs each rank works on, and how many blocks come."""
    counts = seen_pairs(plan.tokens, plan.keys.tokens, spec, docs)
    share = max(counts.sum() / plan.ring, 1)
    whole = "".join(f"{w:>8.0%}" for w in counts.sum(1) / share)
    if plan.strategy == "gather":
        title = "gather: one step, after every rank's keys have arrived; the share of the mean work that each rank does"
        return [title, whole]
    schedule, ranks = schedule_of(Mask(plan, spec, docs)), range(plan.ring)
    rounds = [schedule.rounds(r, plan.hosts, blocks_at_once(plan)) for r in ranks]
    runs = [[visit.sources for one in each for visit in one.visits] for each in rounds]  # whose keys, at each step
    lines = [
        f"steps of the {plan.transport.route} route: each rank's work, of the mean rank's whole, and blocks that come"
        + (" (sampled)" if plan.tokens.padded_length > SAMPLED_ROWS else ""),
        "  step  " + "".join(f"{f'rank {r}':>8}" for r in ranks) + "   blocks",
    ]
    for i in range(max(map(len, runs))):
        here = [run[i] if i < len(run) else () for run in runs]
        work = [sum(counts[r, block] for block in blocks) / share for r, blocks in enumerate(here)]
        come = sum(block != r for r, blocks in enumerate(here) for block in blocks)
        lines.append(f"  {i + 1:>4}  " + "".join(f"{w:>8.0%}" for w in work) + f"{come:>9}")
    skipped = plan.ring - len(schedule.distances)
    return [*lines, f"  all   {whole}" + (f"   {skipped} steps skipped" if skipped else "")]


def blocks_at_once(plan: Plan) -> int:
    """How many blocks a step of the direct route brings forward."""
    shape = plan.shape(itemsize=4 if plan.device == "cpu" else 2)
    if shape is None:
        return plan.transport.together or 1
    kv_heads = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) // plan.groups_for(shape)
    return plan.blocks_at_once(shape.kv_bytes(plan.keys.tokens.shard_len, kv_heads))
