"""The recipe of a call: all that one rank decides before anything moves or computes. Plain Python; print it.

It depends on the plan, the spec, the documents and the shapes, never on the numbers in tensors. A framework carries it
out, step by step. `spmd.py` has that of JAX, where all ranks run one program.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ringattn.kernels import TABLE, Kernel, Problem, select
from ringattn.kernels.intervals import Intervals, rectangles_of, some, stack
from ringattn.kernels.rates import MIN_KEYS_OF_LONG_MASKS, mask_of
from ringattn.kernels.sequences import sequences_of
from ringattn.layouts.dealing import joined
from ringattn.layouts.layout import Shard, to_local
from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank
from ringattn.plans.mask import Mask, reads_of, table_of
from ringattn.plans.plan import Plan
from ringattn.steps.rank import Phase, Queries, Step, places, steps_of

HALVES_FROM = 8192  # queries of a rank: from here on half of its heads take longer than the host takes to launch them
KEPT_UP_TO = 8192  # queries of a rank: of more, keys that arrive take more memory than the time they spare is worth
SIDE_STREAM_UP_TO = 32768  # queries of a rank: steps of more run in turn, as a second stream has its own memory


class Visible:
    """The keys that the queries of one ring rank see, on the host."""

    def __init__(self, mask: Mask, rank: int):
        self.mask, self.rank = mask, rank
        self.made: dict[tuple[Shard, Queries | None], Any] = {}
        self.seeing: dict[Shard, np.ndarray] = {}

    def at(self, keys: Shard, queries: Queries | None = None) -> Any:
        """The intervals of these queries among these keys, made once; None if they see none."""
        if (keys, queries) not in self.made:
            where = self.among(keys, queries)
            self.made[keys, queries] = where if queries is None or np.less(*where.host).any() else None
        return self.made[keys, queries]

    def of(self, queries: Queries | None) -> Any:
        """`seen`, with empty intervals for all queries but these."""
        if queries is None:
            return self.seen
        see = self.see(queries.keys) == queries.see
        return [(begin, np.where(see, end, begin)) for begin, end in self.seen]

    def see(self, keys: Shard) -> np.ndarray:
        """[1, T]: which queries see any of these keys, if `is_plain`."""
        if keys not in self.seeing:
            self.seeing[keys] = np.less(*to_local(keys, *self.seen[0]))
        return self.seeing[keys]

    @property
    def is_plain(self) -> bool:
        """Whether the intervals are one family, on the host, and the same in all batch rows."""
        return len(self.seen) == 1 and isinstance(self.seen[0][0], np.ndarray) and len(self.seen[0][0]) == 1

    @cached_property
    def seen(self) -> Any:
        """Of each family, the keys [begin, end) that each query sees."""
        return self.mask.bounds(self.mask.plan.tokens.shard(self.rank))

    def among(self, keys: Shard, queries: Queries | None) -> Any:
        made = []
        for sides in some([to_local(keys, *sides) for sides in self.of(queries)]):
            begin, end = (side.astype(np.int32) for side in sides)
            made.append(Intervals(begin, end, rectangles_of(begin, end) if len(begin) == 1 else None, (begin, end)))
        return stack(made)


class Pass(NamedTuple):
    """The forward or the backward pass of one rank, and the kernel that serves all of its steps."""

    steps: tuple[Step, ...]
    kernel: Kernel

    @property
    def single(self) -> Step | None:
        """The only step, if there is only one and nothing travels."""
        return self.steps[0] if len(self.steps) == 1 else None


@dataclass(frozen=True)
class Recipe:
    """One kind of call on one rank. Equal recipes are carried out alike."""

    table: ClassVar[tuple[Kernel, ...]] = TABLE  # of the framework's kernels

    mask: Mask
    shape: Shape  # of the whole sequence and all heads
    device: str
    dtype: str
    arch: tuple[int, int] | None = None  # a GPU's compute capability
    rank: int = 0  # of the ring
    deterministic: bool = False
    gradients: bool = True
    keep: bool = True  # whether forward may keep keys that arrive: a compiled graph cannot, since their number varies
    visible: Visible | None = field(default=None, compare=False, repr=False)  # the framework's; None: on the host

    @property
    def plan(self) -> Plan:
        return self.mask.plan

    @property
    def gathers(self) -> bool:
        """Whether all keys arrive at once, before the only step."""
        return self.plan.strategy == "gather" and self.plan.ring > 1

    @cached_property
    def groups(self) -> int:
        """The number of groups of heads, of which one travels while another is computed."""
        return self.plan.groups_for(self.shape) if self.plan.swaps else 1

    @property
    def heads(self) -> tuple[int, int]:
        """The query and the key heads of one group on one rank."""
        return heads_of_group(self.shape.heads, self.shape.kv_heads, self.plan.ulysses, self.groups)

    @property
    def shares(self) -> bool:
        """Whether the groups share a rank's only key head, which travels once."""
        return kv_heads_of_a_rank(self.shape.kv_heads, self.plan.ulysses) < self.groups

    @property
    def low_precision(self) -> bool:
        """Whether gradients travel in the dtype of the inputs."""
        return self.plan.transport.grads == "input"

    @cached_property
    def forward(self) -> Pass:
        steps = self.steps()
        kernel = self.kernel(steps)
        return Pass(self.disjoint(steps, kernel, work=1, sent=1, visits=4), kernel)

    @cached_property
    def backward(self) -> Pass:
        steps = self.steps(back=True)
        kernel = self.kernel(steps, backward=True)
        separable = self.gathers or kernel.load().separable
        if self.keeps:
            steps = self.forward.steps
        elif not separable and self.plan.tokens.shard_len <= SIDE_STREAM_UP_TO:
            steps = self.disjoint(steps, kernel, work=2.5, sent=2 if self.low_precision else 3, visits=8)
        phases = (list(of_phase) for _, of_phase in groupby(steps, key=lambda step: id(step.phase)))
        return Pass(tuple(step for of_phase in phases for step in self.in_backward(of_phase, separable)), kernel)

    @cached_property
    def keeps(self) -> bool:
        """Whether forward keeps the keys that arrive for backward: on all ranks, or on none.

        Of packed documents and windows few arrive, and of short shards of two ranks, all in one step. Backward then
        waits for nothing, and gradients return while local keys are computed.
        """
        if not (self.keep and self.gradients) or self.gathers:
            return False
        tokens = reads_of(self.mask).tokens
        arriving = int((tokens.sum(1) - tokens.diagonal()).max())
        if not may_keep(self.plan.tokens.shard_len, arriving, self.mostly_local):
            return False
        steps = self.steps(back=True)
        kernels = self.forward.kernel.load(), self.kernel(steps, backward=True).load()
        if not all(kernel.disjoint and not kernel.separable for kernel in kernels):
            return False
        return in_two(self.forward.steps) and in_two(steps)

    def steps(self, back: bool = False) -> tuple[Step, ...]:
        """The steps of a pass: backward's bring fewer blocks if float32 gradients travel."""
        plan, layout = self.plan, self.plan.keys.tokens
        visible = self.visible or Visible(self.mask, self.rank)
        if self.gathers:
            everything = range(layout.padded_length)
            phase = Phase(0, (everything,), None, None)
            return (Step(phase, tuple(range(plan.ring)), ((self.rank, (everything,)),), visible=visible),)
        table = table_of(self.mask, plan.hosts, plan.together(self.shape, back))
        return steps_of(table, reads_of(self.mask).shards, self.rank, visible)

    def disjoint(
        self, steps: tuple[Step, ...], kernel: Kernel, work: float, sent: float, visits: float
    ) -> tuple[Step, ...]:
        """The same, or two steps of which no query has keys in both, if the kernel prefers that.

        Queries that see keys which arrive get local keys beside these, and the first step leaves them out. Then no
        partials merge, and a piece of a document sees its keys in one range. But what is left for the first step may
        take less time than what travels: `work` forward passes of it, and `sent` times the keys that arrive. To visit
        queries again takes as long as to read their partials `visits` times, as measured.
        """
        visible: Visible = steps[0].visible
        if not (self.mostly_local and in_two(steps) and kernel.load().disjoint and visible.is_plain):
            return steps
        local, remote = steps
        if not all(step.blocks for step in steps) or local.keys[0].step > 1:
            return steps
        see, (begin, end) = visible.see(remote.keys)[0], visible.seen[0]
        if not see.any():
            return steps
        local_keys = covered(*to_local(local.keys, begin[0, see], end[0, see]), local.keys)
        first = replace(local, queries=Queries(remote.keys, False))
        last = remote.beside(local_keys, self.rank, local.keys)
        if not (are_sequences(first.where) and are_sequences(last.where)):
            return steps
        arriving = float(self.plan.link.seconds(remote.length * self.shape.bytes_of(1, self.heads[1])))
        waiting = sent * arriving - work * self.seconds_of_work(first)
        partials = 4 * (self.rows or 0) * self.shape.value_dim / self.plan.machine.bandwidth  # seconds to read them
        return (first, last) if waiting <= visits * partials else steps

    def seconds_of_work(self, step: Step) -> float:
        """How long a step computes forward."""
        if step.where is None:
            return 0.0
        begin, end = step.where.host
        flops = 2 * self.heads[0] * (self.shape.head_dim + self.shape.value_dim)
        return flops * int(np.maximum(end - begin, 0).sum()) / self.plan.machine.flops(self.shape.itemsize, 1)

    @property
    def mostly_local(self) -> bool:
        """Whether few queries see keys that arrive: they may get local keys beside these."""
        shard = self.plan.tokens.shard_len
        return not self.gathers and see_mostly_local(self.mask.spec, self.mask.docs, self.shape.batch, shard)

    def in_backward(self, steps: Sequence[Step], separable: bool) -> tuple[Step, ...]:
        """A phase's steps, with the local one, which needs no transfer, where it hides most.

        It is first and hides the first hop if the kernel computes some gradients without the others. With other kernels
        it is last and hides the last gradients; if that is worth another launch, half of its heads are first and the
        other half last.
        """
        local, *others = steps
        if local.queries and self.keeps and self.plan.tokens.shard_len > SIDE_STREAM_UP_TO:
            return replace(others[0], side=False), local
        if local.queries or separable or not others:  # the other step runs beside it, or after it
            return tuple(steps)
        heads, kv_heads = self.heads
        half = kv_heads // 2
        if self.plan.tokens.shard_len < HALVES_FROM or not (half and local.where) or self.keeps:
            return (*others, local)
        middle = half * (heads // kv_heads)
        first = replace(local, heads=(slice(middle), slice(half)))
        return (first, *others, replace(local, heads=(slice(middle, None), slice(half, None))))

    def kernel(self, steps: Sequence[Step], backward: bool = False) -> Kernel:
        """The kernel for all steps. Some need steps that are few rectangles.

        On GPUs "auto" does not rely on that with documents: other kernels are faster there.
        """
        packed = self.mask.docs is not None or self.mask.key_docs is not None
        slower = packed and self.plan.kernel == "auto" and self.device == "cuda"
        return self.selected(not slower and are_rectangles(steps), backward)

    def selected(self, rectangles: bool, backward: bool = False) -> Kernel:
        """The kernel for steps that all are few `rectangles`, or are not."""
        return select(self.problem(rectangles), self.plan.kernel, self.table, backward)

    @property
    def rows(self) -> int | None:
        """Queries x heads of a group on this rank, over the batch."""
        return self.shape.batch * self.plan.tokens.shard_len * self.heads[0]

    def problem(self, rectangles: bool) -> Problem:
        """What a kernel must serve."""
        (heads, kv_heads), shape = self.heads, self.shape
        queries, keys, docs, key_docs = self.mask.arguments
        alone = self.plan.ring == 1 and key_docs is None and (docs is None or len(docs.starts) == 1)
        spec = self.mask.spec
        return Problem(
            self.device, self.dtype, shape.head_dim, shape.value_dim, heads, kv_heads, spec.softcap is not None,
            rectangles, arch=self.arch, deterministic=self.deterministic,
            rows=self.rows, mask=kind_of(spec, (queries, keys), docs, key_docs, alone),
        )  # fmt: skip

    def refused(self) -> NotImplementedError | None:
        """Why no kernel serves every step of every rank: the same error on all ranks, before anything is sent.

        Some kernels run rectangles only, and whether a rank's steps are few rectangles depends on the rank. Every rank
        can make the steps of all ranks, and does so only if the choice of the kernel depends on them.
        """
        try:
            self.selected(rectangles=False)
        except NotImplementedError:
            ranks = (replace(self, rank=rank, visible=None) for rank in range(self.plan.ring))
            passes = (False, True)[: 1 + self.gradients]
            try:
                self.selected(all(are_rectangles(each.steps(back)) for each in ranks for back in passes))
            except NotImplementedError as error:
                return error
        return None

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def wide(self) -> str:
        """The dtype of sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def head(self, who: str) -> Iterator[str]:
        """The call, in whole."""
        shape, mask = self.shape, self.mask
        groups = f" in {self.groups} groups, one of which travels while another is computed" * (self.groups > 1)
        heads = f"{shape.heads} query and {shape.kv_heads} key heads of {shape.head_dim}, values of {shape.value_dim}"
        docs = "no documents" if mask.among is None else "any documents, which are arguments of the program"
        yield f"{self.plan}"
        yield f"  {mask.spec}; {docs if mask.docs is None else mask.docs}"
        yield f"  {who}: batch {shape.batch}, {heads}, {self.dtype} on {self.device}{groups}"

    def lines(self) -> Iterator[str]:
        yield from self.head(f"ring rank {self.rank}")
        grads = self.dtype if self.low_precision else self.wide
        passes = [("forward", self.forward, f"keys and values travel in {self.dtype}")]
        if self.gradients:
            what = "the same" if not self.keeps else "those of forward are kept"
            passes.append(("backward", self.backward, f"{what}, and their gradients in {grads}"))
        for name, pass_, what in passes:
            travels = f"; {what}" * (pass_.single is None or self.gathers)
            yield f"{name}: kernel {pass_.kernel.name}{travels}"
            for i, step in enumerate(pass_.steps, start=1):
                yield f"  step {i}: {line_of(step)}"
                onward = step.phase.onward
                if (i == len(pass_.steps) or pass_.steps[i].phase is not step.phase) and onward and onward.send:
                    yield f"  then: {sum(map(len, onward.send))} tokens go {onward.shift} ranks on"


def see_mostly_local(spec: AttentionSpec, docs: Docs | None, batch: int, shard: int) -> bool:
    """Whether most queries see their own rank's keys alone, in most layouts: in one row of documents, or with a window
    of at most half a shard of tokens.
    """
    short = isinstance(spec.window, int) and 2 * spec.window <= shard and not spec.first
    return batch == 1 and (docs is not None or short)


def may_keep(length: int, arriving: int, mostly_local: bool) -> bool:
    """Whether so many keys that arrive may be kept by a rank of this length, beside its own."""
    if mostly_local:
        return length <= SIDE_STREAM_UP_TO or arriving < length
    return length <= KEPT_UP_TO and arriving <= length


def in_two(steps: Sequence[Step]) -> bool:
    """Whether there is a step with local keys and one with all others."""
    return len(steps) == 2 and steps[0].phase is steps[1].phase


def are_sequences(where: Any) -> bool:
    """Whether intervals are few sequences, or none."""
    return where is None or sequences_of(*(side[0] for side in where.host)) is not None


def covered(begin: np.ndarray, end: np.ndarray, shard: Shard) -> tuple[range, ...]:
    """What intervals of a shard's local indices cover of each of its ranges; they begin and end ever later."""
    gaps = np.flatnonzero(begin[1:] > end[:-1]) + 1
    runs = zip(begin[[0, *gaps]].tolist(), end[[*(gaps - 1), -1]].tolist(), strict=True)
    ranges = places([(r,) for r in shard])
    shared = (range(max(a, r.start), min(b, r.stop)) for a, b in runs for r in ranges)
    return tuple(r for r in shared if r)


def are_rectangles(steps: Sequence[Step]) -> bool:
    """Whether every step is few rectangles."""
    return all(step.where.are_rectangles for step in steps if step.where is not None)


def kind_of(
    spec: AttentionSpec, lengths: tuple[int, int], docs: Docs | None, key_docs: Docs | None, alone: bool
) -> str:
    """The kind of mask, by which the fastest kernel is chosen where steps are not few rectangles.

    `lengths` are those of the queries and of the keys; `alone`: on one device, and all batch rows have the same.
    """
    if (docs is None or docs.plain) and not spec.first and not isinstance(spec.window, tuple):
        rows = np.array([[lengths[1]]]) if docs is None else np.diff(docs.starts)
        if spec.chunk is not None:  # each chunk is a document
            size = spec.chunk
            rows = np.array([[n for row in rows.tolist() for m in row for n in [size] * (m // size) + [m % size]]])
        return mask_of(rows, spec.causal, spec.window, alone)
    pairs = int(work_of(spec, *lengths, docs, key_docs).below(lengths[0]))
    count = 1 if docs is None else len(docs.starts)
    return "long" if pairs >= MIN_KEYS_OF_LONG_MASKS * lengths[0] * count else "short"


def line_of(step: Step) -> str:
    """What is here in a step, and what others read meanwhile."""
    texts = [f"keys {in_words(step.keys)}" if step.blocks else "no work"]
    if step.heads:
        texts[0] = f"query heads {step.heads[0].start or 0} to {step.heads[0].stop or 'the last'}, " + texts[0]
    if step.queries:
        texts[0] += f", of queries that see {'some' if step.queries.see else 'none'} of those that arrive"
    if step.receive:
        texts.append(f"from {', '.join(f'rank {rank}' for rank in step.receive)}")
    texts += [f"rank {to} reads {in_words(ranges)} of block {step.phase.block}" for to, ranges in step.send.items()]
    return "; ".join(texts)


def in_words(shard: Sequence[range], most: int = 4) -> str:
    """Ranges as people read them."""
    ranges = joined(shard)
    each = [f"[{r.start}, {r.stop}){f' by {r.step}' * (r.step > 1)}" for r in ranges[:most]]
    return " ".join(each) + f" and {len(ranges) - most} more" * (len(ranges) > most)
