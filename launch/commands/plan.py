"""Show how a shape would be spread: every candidate with its predicted time, why the first was taken, and its steps.

Needs no ranks and no GPU: `ringattn plan seq_len=131072 heads=32,8 head_dim=128 ring=4 ulysses=2 device=cuda`.
With sequence=N instead of ring and ulysses, the plan chooses both. `machine=h100` names the description by which times
and memory are predicted, or a file; without one it is that of H200s. The steps show which rank works when, and what
travels. With docs=LENGTHS the work is that of packed documents. With device=tpu, or where torch is not installed, the
plan is one for JAX. The mask is drawn. explain=call shows instead what one rank does in a call of attention:
groups of heads, every step with its ranges of keys, who reads what of this rank meanwhile, dtypes on the way, and
kernels. In JAX it shows the program of all ranks, whose arguments documents are (on GPUs they are part of it).
"""

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from ringattn import choosing
from ringattn.choosing import elsewhere, factored
from ringattn.launch.bench.masks import MIX, drawn
from ringattn.launch.words import option
from ringattn.masks.bands import bounds_at, families
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.machine import ITEMS, Machine, load, of_device
from ringattn.plans.mask import Mask, among_all, reads_of, table_of
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import Recipe
from ringattn.plans.sizes import Transport
from ringattn.plans.spmd import SharedRecipe

RANKS_LIMIT = 65536
RING_LIMIT = 1024  # of longer rings no documents are shown, since what each pair of ranks works on is counted
RANKS_SHOWN = 16  # of longer rings no steps are shown
CELLS, SAMPLES = 32, 8  # cells of a side of a mask, and queries of a cell that are looked at
WIDTH = 64  # columns of who holds what
SHADES = " .:#"  # of the tokens of a column: a rank has none, few, many, or all
Link = namedtuple("Link", "by")  # the axis of a plan whose ranks do not exist here


@dataclass(frozen=True)
class Common:
    """What is asked of a plan, here and in `ringattn simulate`."""

    heads: tuple[int, ...] = option((32, 8), "query heads, key heads")
    head_dim: int = option(128, "the size of a head")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: str = option("auto", "auto, contiguous, striped, zigzag or balanced")
    kernel: str = option("auto", "auto, or the name of a kernel")
    graphs: str = option("auto", "short calls that repeat run as CUDA graphs", among=("auto", "off"))
    route: str = option("auto", "how keys reach the ranks of a ring: auto, direct, relay or levels")
    groups: int | None = option(None, "in how many groups Ulysses and gather exchange the heads")
    causal: bool = option(True, "whether a query sees no later key")
    window: tuple[int, ...] | None = option(None, "keys that a query sees; LEFT,RIGHT with causal=false", least=0)
    chunk: int | None = option(None, "a query sees its own block of so many positions of its document")
    first: int = option(0, "beside the window or chunk, a query sees so many first keys of its document", least=0)
    docs: tuple[int, ...] | str | None = option(None, f"lengths of documents, before padding; or {MIX}", least=0)
    parents: tuple[int, ...] | None = option(None, "of each document, as segments of trees: a number, or -1", least=-1)
    dtype: str | None = option(None, "by default float32 on cpu and bfloat16 elsewhere", among=tuple(ITEMS))

    @property
    def spec(self) -> AttentionSpec:
        window: Any = self.window
        reach = window if window is None or len(window) > 1 else window[0]
        return AttentionSpec(self.causal, reach, self.chunk, self.first)

    def docs_of(self, seq_len: int) -> Docs | None:
        if self.docs is None:
            if self.parents is not None:
                raise ValueError("parents are those of documents: give docs=LENGTHS")
            return None
        lengths = drawn(self.docs, seq_len, 0) if isinstance(self.docs, str) else list(self.docs)
        if sum(lengths) > seq_len:
            raise ValueError(f"docs= holds {sum(lengths)} tokens, more than seq_len={seq_len}")
        if self.parents is not None:
            return Docs.tree(lengths, self.parents, pad_to=seq_len)
        return Docs.from_lengths(lengths, pad_to=seq_len)

    def dtype_on(self, device: str) -> str:
        return self.dtype or ("float32" if device == "cpu" else "bfloat16")

    def planned(
        self, seq_len: int, sizes: Sequence[tuple[int, int]], machine: Machine | None, device: str, gpus: int | None
    ) -> Plan:
        """The plan that ranks of one of these sizes would make, so many of them a host."""
        if len(self.heads) not in (1, 2):
            raise ValueError(f"heads={self.heads}: give query heads and key heads, as in heads=32,8")
        ranks = sizes[0][0] * sizes[0][1]
        one_host = ranks <= (gpus or (of_device(device) if machine is None else machine).gpus)
        in_jax = device == "tpu" or find_spec("torch") is None  # there the compiler moves the blocks
        over = "gloo" if device != "cuda" else "symmetric memory" if one_host else "nccl"
        return choosing.plan(
            elsewhere(device, sizes, None if in_jax else Link(over), "jax" if in_jax else "torch", gpus),
            seq_len=seq_len, heads=(self.heads[0], self.heads[-1]), head_dim=self.head_dim, spec=self.spec,
            docs=self.docs_of(seq_len), strategy=self.strategy, layout=self.layout, kernel=self.kernel,
            graphs=self.graphs, transport=Transport(self.route, groups=self.groups), dtype=self.dtype, machine=machine,
        )  # fmt: skip


@dataclass(frozen=True)
class Options(Common):
    seq_len: int = option(131072, "tokens of the whole sequence")
    ring: int = option(1, "ranks along the ring axis")
    ulysses: int = option(1, "ranks along the ulysses axis")
    sequence: int | None = option(None, "ranks; the plan chooses ring and ulysses")
    machine: str | None = option(None, "a description of the machine: a name (h100, h200, ...) or a file")
    hosts: int | None = option(None, "hosts, each with as many consecutive ranks; without sizes, all their GPUs")
    device: str = option("cuda", "the kind of ranks, unless machine= says it", among=("cuda", "cpu", "tpu"))
    json: bool = option(False, "print everything as JSON")
    explain: str = option(
        "plan", "the candidates and the steps of all ranks, or a call on one rank", among=("plan", "call")
    )
    rank: int = option(0, "with explain=call: the rank on the ring", least=0)


def run(options: Options) -> int:
    """Print the plan and its steps."""
    spec, docs, plan = options.spec, options.docs_of(options.seq_len), of_options(options)
    if options.explain == "call":
        print(recipe(options, plan, spec, docs))
        return 0
    print(plan.explain(json=options.json))
    if options.json:
        return 0
    print("\nwho sees whom: queries downwards, keys to the right; # all, + some, . none")
    print("\n".join(cells(spec, docs, options.seq_len)))
    if 1 < plan.ring <= RANKS_SHOWN:
        print("\n".join(["", *steps(plan, spec, docs)]))
    if 1 < plan.ring <= RING_LIMIT and docs is not None:
        print("\n".join(["", *holdings(plan, spec, docs)]))
    return 0


def of_options(options: Options) -> Plan:
    """The plan that the ranks of this mesh would make."""
    if options.sequence is not None and (options.ring, options.ulysses) != (1, 1):
        raise ValueError(f"sequence={options.sequence} leaves ring and ulysses to the plan; leave them out")
    machine = None if options.machine is None else load(options.machine)
    device, ranks = machine.device if machine else options.device, options.sequence or options.ring * options.ulysses
    if whole := options.hosts if options.sequence is None and ranks == 1 else None:
        ranks = whole * (machine or of_device(device)).gpus
    if ranks > RANKS_LIMIT:
        raise ValueError(f"{ranks} ranks; a plan is made for {RANKS_LIMIT} at most")
    if options.hosts is not None and ranks % options.hosts:
        raise ValueError(f"hosts={options.hosts} do not divide {ranks} ranks; hosts have equally many of them")
    sizes = factored(ranks) if options.sequence or whole else [(options.ring, options.ulysses)]
    return options.planned(options.seq_len, sizes, machine, device, ranks // options.hosts if options.hosts else None)


def recipe(options: Options, plan: Plan, spec: AttentionSpec, docs: Docs | None) -> Recipe:
    """What a rank of the plan decides about a call with batch 1."""
    if options.rank >= plan.ring:
        raise ValueError(f"rank={options.rank}: the ranks of the ring are 0 to {plan.ring - 1}")
    dtype = options.dtype_on(plan.device)
    shape = plan.shape(ITEMS[dtype])
    assert shape is not None, plan
    if plan.framework == "torch":
        return Recipe(Mask(plan, spec, docs), shape, plan.device, dtype, rank=options.rank)
    from ringattn.jax.attention import steps

    fixed = docs is None or not docs.plain or steps.cut_of(plan) is not None
    mask = Mask(plan, spec, docs if fixed else None, among=None if fixed else among_all(spec, docs, None))
    rectangles = fixed and steps.tables_of(mask) is not None
    return SharedRecipe(mask, shape, plan.device, dtype, static=fixed, rectangles=rectangles)


def cells(spec: AttentionSpec, docs: Docs | None, length: int) -> list[str]:
    """The first row's mask in up to CELLS x CELLS cells: # all pairs are seen, + some, . none."""
    edges, lines = np.linspace(0, length, min(length, CELLS) + 1).astype(int), []
    for first, stop in pairwise(edges.tolist()):
        at = np.unique(np.linspace(first, stop - 1, SAMPLES).astype(int))
        seen = np.zeros((len(at), len(edges) - 1), int)
        for family in families(spec, length, docs=docs):
            begin, end = (side[0][:, None] for side in bounds_at(family[:1], at))
            seen += (np.minimum(end, edges[1:]) - np.maximum(begin, edges[:-1])).clip(0)
        level = (seen > 0).max(0) + (seen == np.diff(edges)).min(0).astype(int)
        lines.append("  " + "".join(".+#"[i] for i in level.tolist()))
    return lines


def steps(plan: Plan, spec: AttentionSpec, docs: Docs | None) -> Iterator[str]:
    """The steps of the plan's route as the lines of a table: the pairs each rank works on, and how many blocks come."""
    counts = seen_pairs(plan.tokens, plan.keys.tokens, spec, docs)
    if plan.strategy == "gather":
        yield "gather: one step, after every rank's keys have arrived; the share of the mean work of each rank"
    else:
        shape = plan.shape(4 if plan.device == "cpu" else 2)
        assert shape is not None
        table = table_of(Mask(plan, spec, docs), plan.hosts, plan.together(shape, back=False))
        yield f"steps of the {plan.transport.route} route: work per step in % of a rank's total, and blocks received"
        yield "  step  " + "".join(f"{f'rank {r}':>8}" for r in range(plan.ring)) + "   blocks"
        for i in range(table.count):
            now = table.when == i
            yield f"  {i + 1:>4}  {shares(counts * now, counts)}{now.sum() - now.diagonal().sum():>9}"
    yield f"   all  {shares(counts, counts)}"


def shares(work: np.ndarray, whole: np.ndarray) -> str:
    """The work of each rank, over the mean of the whole."""
    return "".join(f"{w / max(1, whole.sum(1).mean()):>8.0%}" for w in work.sum(1))


def holdings(plan: Plan, spec: AttentionSpec, docs: Docs) -> Iterator[str]:
    """Which tokens each rank has, its work over the mean, and the keys that it receives, in shards."""
    layout, columns = plan.tokens, min(WIDTH, plan.tokens.padded_length)
    edges = np.arange(columns + 1) * layout.padded_length // columns
    work = seen_pairs(layout, layout, spec, docs).sum(1)
    read = reads_of(Mask(plan.replace(strategy="ring"), spec, docs)).tokens
    received = (read.sum(1) - read.diagonal()) / layout.shard_len
    longest = int(np.diff(docs.starts).max())
    begins = np.isin(np.arange(columns), np.searchsorted(edges, docs.starts, "right") - 1)
    yield f"who holds what ({longest} tokens in the longest document; | where documents begin):"
    yield "           work  receives  " + "".join("|" if begun else " " for begun in begins)
    for r in range(plan.ring):
        shares = np.histogram(layout.positions(r), edges)[0] / np.diff(edges)
        bar = "".join(SHADES[int(np.ceil(x * (len(SHADES) - 1)))] for x in shares)
        yield f"  rank {r:>4} {work[r] / max(1, work.mean()):>4.2f} {received[r]:>9.2f}  {bar}"
