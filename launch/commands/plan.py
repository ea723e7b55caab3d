"""Show how a shape would be spread: every candidate with its predicted time, why the first was taken, and its steps.

Needs no ranks and no GPU: `ringattn plan seq_len=131072 heads=32,8 head_dim=128 ring=4 ulysses=2 device=cuda`.
With sequence=N instead of ring and ulysses, the plan chooses both. `machine=h100` names the description by which times
and memory are predicted, or a file; without one it is that of H200s. The steps show which rank works when, and what
travels. With docs=LENGTHS the work is that of packed documents. With device=tpu, or where torch is not installed, the
plan is one for JAX. The mask is drawn. explain=call shows instead what one rank does in a call of attention:
groups of heads, every step with its ranges of keys, who reads what of this rank meanwhile, dtypes on the way, and
kernels. In JAX it shows the program of all ranks, whose arguments documents are (on GPUs they are part of it).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from ringattn import choosing
from ringattn.choosing import elsewhere, factored
from ringattn.launch.bench.masks import DRAWN, lengths_of
from ringattn.launch.commands.drawings import cells, holdings
from ringattn.launch.words import option
from ringattn.masks.bands import families
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.machine import load, of_device
from ringattn.plans.mask import Mask, among_all, table_of
from ringattn.plans.plan import Plan
from ringattn.plans.predict import blocks_at_once
from ringattn.plans.recipe import Recipe
from ringattn.plans.spmd import SharedRecipe
from ringattn.plans.transport import Transport

MAX_RANKS = 65536
MAX_RING = 1024  # of longer rings no steps are shown, since what each pair of ranks works on is counted
RANKS_SHOWN, STEPS_SHOWN = 10, 8  # ranks that are shown one by one; of more, so many steps
SUMMARY = "least", "mean", "most"
EXPLAIN = "plan", "call"


@dataclass(frozen=True)
class Options:
    seq_len: int = option(131072, "tokens of the whole sequence")
    heads: tuple[int, ...] = option((32, 8), "query heads, key heads")
    head_dim: int = option(128, "the size of a head")
    ring: int = option(1, "ranks along the ring axis")
    ulysses: int = option(1, "ranks along the ulysses axis")
    sequence: int | None = option(None, "ranks; the plan chooses ring and ulysses")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: str = option("auto", "auto, contiguous, striped, zigzag or balanced")
    kernel: str = option("auto", "auto, or the name of a kernel")
    machine: str | None = option(None, "a description of the machine: a name (h100, h200, ...) or a file")
    hosts: int | None = option(
        None,
        "hosts, each with as many consecutive ranks; by default as the description says. Without sizes, all their GPUs",
    )
    route: str = option("auto", "how keys reach the ranks of a ring: auto, direct, relay or levels")
    together: int | None = option(None, "with route=direct: from how many ranks keys arrive in a step")
    groups: int | None = option(None, "in how many groups Ulysses and gather exchange the heads")
    causal: bool = option(True, "whether a query sees no later key")
    window: tuple[int, ...] | None = option(
        None, "how many keys a query sees at most; LEFT,RIGHT with causal=false", least=0
    )
    chunk: int | None = option(None, "a query sees its own block of so many positions of its document")
    first: int = option(0, "beside the window or chunk, a query sees so many first keys of its document", least=0)
    docs: tuple[int, ...] | str | None = option(
        None, f"lengths of packed documents, the rest is padding; or {DRAWN} to draw them", least=0
    )
    parents: tuple[int, ...] | None = option(
        None, "the documents are segments of trees: of each its parent, or -1", least=-1
    )
    device: str = option("cuda", "the kind of ranks, unless machine= says it", among=("cuda", "cpu", "tpu"))
    dtype: str | None = option(None, "by default float32 on cpu and bfloat16 elsewhere")
    json: bool = option(False, "print everything as JSON")
    explain: str = option("plan", "the candidates and the steps of all ranks, or a call on one rank", among=EXPLAIN)
    rank: int = option(0, "with explain=call: the rank on the ring", least=0)


class Link(NamedTuple):
    """The axis of a plan whose ranks do not exist here."""

    by: str


def run(options: Options) -> int:
    """Print the plan and its steps."""
    window: Any = options.window
    reach = window if window is None or len(window) > 1 else window[0]
    spec, docs = AttentionSpec(options.causal, reach, options.chunk, options.first), docs_of(options)
    plan = planned(options, spec, docs)
    if options.explain == "call":
        print(recipe(options, plan, spec, docs))
        return 0
    print(plan.explain(json=options.json))
    if options.json:
        return 0
    print("\nwho sees whom: queries downwards, keys to the right; # all, + some, . none")
    print("\n".join(cells(families(spec, options.seq_len, docs=docs), options.seq_len, options.seq_len)))
    if 1 < plan.ring <= MAX_RING:
        print("\n".join(["", *steps(plan, spec, docs)]))
        if docs is not None:
            print("\n".join(["", *holdings(plan, spec, docs)]))
    return 0


def docs_of(options: Options) -> Docs | None:
    if options.docs is None and options.parents is not None:
        raise ValueError("parents are those of documents: give docs=LENGTHS")
    if options.docs is None:
        return None
    lengths = lengths_of(options.docs, options.seq_len)
    if options.parents is not None:
        return Docs.tree(lengths, options.parents, pad_to=options.seq_len)
    return Docs.from_lengths(lengths, pad_to=options.seq_len)


def planned(options: Options, spec: AttentionSpec, docs: Docs | None) -> Plan:
    """The plan that the ranks of this mesh would make."""
    if options.sequence is not None and (options.ring, options.ulysses) != (1, 1):
        raise ValueError(f"sequence={options.sequence} leaves ring and ulysses to the plan; leave them out")
    if len(options.heads) not in (1, 2):
        raise ValueError(f"heads={options.heads}: give query heads and key heads, as in heads=32,8")
    ranks = options.sequence or options.ring * options.ulysses
    if ranks > MAX_RANKS:
        raise ValueError(f"{ranks} ranks; a plan is made for {MAX_RANKS} at most")
    machine = None if options.machine is None else load(options.machine)
    if options.hosts and options.sequence is None and ranks == 1:
        each = (of_device(options.device) if machine is None else machine).gpus
        return planned(replace(options, sequence=options.hosts * each), spec, docs)
    if options.hosts is not None and ranks % options.hosts:
        raise ValueError(f"hosts={options.hosts} do not divide {ranks} ranks; hosts have equally many of them")
    gpus = ranks // options.hosts if options.hosts else None
    device = options.device if machine is None else machine.device
    sizes = factored(options.sequence) if options.sequence else [(options.ring, options.ulysses)]
    one_host = ranks <= (gpus or (of_device(device) if machine is None else machine).gpus)
    how = Transport(options.route, together=options.together, groups=options.groups)
    in_jax = device == "tpu" or find_spec("torch") is None  # there the compiler moves the blocks
    over = "gloo" if device != "cuda" else "symmetric memory" if one_host else "nccl"
    return choosing.plan(
        elsewhere(device, sizes, None if in_jax else Link(over), "jax" if in_jax else "torch", gpus),
        seq_len=options.seq_len, heads=(options.heads[0], options.heads[-1]), head_dim=options.head_dim, spec=spec,
        docs=docs, strategy=options.strategy, layout=options.layout, kernel=options.kernel, transport=how,
        dtype=options.dtype, machine=machine,
    )  # fmt: skip


def recipe(options: Options, plan: Plan, spec: AttentionSpec, docs: Docs | None) -> Recipe:
    """What a rank of the plan decides about a call with batch 1."""
    if options.rank >= plan.ring:
        raise ValueError(f"rank={options.rank}: the ring has {plan.ring} ranks, counted from 0")
    dtype = options.dtype or ("float32" if plan.device == "cpu" else "bfloat16")
    shape = plan.shape({"float64": 8, "float32": 4}.get(dtype, 2))
    assert shape is not None, plan
    if plan.framework == "torch":
        return Recipe(Mask(plan, spec, docs), shape, plan.device, dtype, rank=options.rank)
    from ringattn.jax.attention import steps

    fixed = docs is None or docs.parents is not None or docs.slices is not None or steps.cut_of(plan) is not None
    mask = Mask(plan, spec, docs if fixed else None, among=None if fixed else among_all(spec, docs, None))
    rectangles = fixed and steps.tables_of(mask) is not None
    return SharedRecipe(mask, shape, plan.device, dtype, static=fixed, rectangles=rectangles)


def steps(plan: Plan, spec: AttentionSpec, docs: Docs | None) -> list[str]:
    """The steps of the plan's route as the lines of a table: the pairs each rank works on, and how many blocks come."""
    counts = seen_pairs(plan.tokens, plan.keys.tokens, spec, docs)
    share, few = max(counts.sum() / plan.ring, 1), plan.ring <= RANKS_SHOWN
    total = shares(counts.sum(1) / share, few)
    if plan.strategy == "gather":
        return [
            "gather: one step, after every rank's keys have arrived; the share of the mean work of each rank",
            total,
        ]
    shape = plan.shape(itemsize=4 if plan.device == "cpu" else 2)
    together = blocks_at_once(plan, shape, plan.machine) if shape else plan.transport.together or 1
    table = table_of(Mask(plan, spec, docs), plan.hosts, together)
    columns = [f"rank {r}" for r in range(plan.ring)] if few else SUMMARY
    lines = [
        f"steps of the {plan.transport.route} route: work per step in % of a rank's total, and blocks received",
        "  step  " + "".join(f"{name:>8}" for name in columns) + "   blocks",
    ]
    shown = [i for i in range(table.count) if few or i < STEPS_SHOWN or i == table.count - 1]
    for i in shown:
        now = table.when == i
        blocks = int(now.sum() - now.diagonal().sum())
        lines.append(f"  {i + 1:>4}  {shares((counts * now).sum(1) / share, few)}{blocks:>9}")
    if len(shown) < table.count:
        lines.insert(-1, f"   ...  {table.count - len(shown)} more")
    return [*lines, f"  all   {total}"]


def shares(work: Sequence[float], few: bool) -> str:
    """The work of each rank, or of many ranks the least, the mean and the most."""
    if few:
        return "".join(f"{w:>8.0%}" for w in work)
    return "".join(f"{w:>8.2%}" for w in (min(work), sum(work) / len(work), max(work)))
