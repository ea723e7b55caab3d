"""The memory of a rank at the peak of a call, forward and backward, counted tensor by tensor.

It goes through the steps of the table, and follows what `ringattn.torch.attention` allocates and frees in each, so a
change there belongs here too. Held are q, k, v, out, the lse and the gradient of out; backward adds keys that travel,
gradients, and what a kernel needs beside them. All ranks at once, as numpy arrays. tests/test_predict.py holds it
against measured peaks, and against what the ring's loop allocates.
"""

from typing import Any, NamedTuple

import numpy as np

from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank
from ringattn.plans.course import EXACT, Steps
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import HALVES_FROM, may_keep


class Sizes(NamedTuple):
    """Bytes a token of the heads that are computed together, and which kernel computes them."""

    queries: int  # of a rank
    keys: int
    q: float
    out: float
    kv: float
    full: float  # of keys and values, if there were as many heads as of queries
    rows: float  # 4 bytes a query head
    exact: float  # sums over inputs: 2 if those have 16 bits
    travel: float  # gradients that travel over inputs
    halves: bool  # key heads can be cut into halves
    kernel: str
    ours: bool  # our kernel, which gives gradients in float32; those of libraries have the dtype of inputs
    mostly_local: bool  # as in `Recipe`

    def beside(self, queries: Any, keys: Any) -> Any:
        """What a library needs while it computes gradients of so many queries and keys.

        All sum dq in float32 and keep a number or two a row. FlashAttention-4 sums dk and dv of grouped heads in
        float32, too. cuDNN does not say what it takes; so much fits most shapes in benchmarks/plans-h100.jsonl.
        """
        if self.ours:
            return 0.0
        grouped = self.full > self.kv
        if self.kernel == "fa4":
            return queries * (2 * self.q + 2 * self.rows) + keys * 2 * self.kv * grouped
        return queries * (2 * self.q + self.rows) + keys * self.full * (2 if grouped else 1)

    @property
    def prepared(self) -> float:
        """What our kernel makes of the rows; of those with a float64 lse also another gradient of out."""
        return self.queries * self.ours * (2 * self.rows + (self.out + self.rows) * (self.exact == 1))


class Live:
    """The bytes that are allocated, and the most that were."""

    def __init__(self, now: Any):
        self.now = self.most = np.asarray(now, float)

    def take(self, nbytes: Any) -> Any:
        self.now = self.now + nbytes
        self.most = np.maximum(self.most, self.now)
        return nbytes

    def free(self, nbytes: Any) -> None:
        self.now = self.now - nbytes


class Parts:
    """One or two gradients in parts, as `ringattn.kernels.total.Total`; `whole` are the bytes of their sum."""

    def __init__(self, live: Live, whole: Any, tensors: int = 2):
        self.live, self.whole, self.tensors = live, whole, tensors
        self.nbytes = self.summed = 0 * live.now

    def add(self, nbytes: Any, summed: bool = False) -> None:
        """Another part, which is allocated already; `summed`: if it is the first, later ones may be added to it."""
        self.summed = self.summed + summed * (self.nbytes == 0) * (nbytes > 0)
        self.nbytes = self.nbytes + nbytes

    def fold(self, of: Any = True) -> None:
        """Parts of more than 1.5 times the sum are added up."""
        self.total(of & (2 * self.nbytes > 3 * self.whole))

    def total(self, of: Any = True) -> None:
        """All parts are added up, `of` these ranks: into the first one, if it is a sum."""
        for _ in range(self.tensors):
            self.live.take(of * (self.summed == 0) * self.whole / self.tensors)
            self.live.free(of * (self.nbytes - self.whole * (self.summed > 0)) / self.tensors)
        self.nbytes, self.summed = np.where(of, self.whole, self.nbytes), np.maximum(self.summed, of)


def peak(
    plan: Plan, shape: Shape, steps: Steps, kernel: str, low_precision: bool, mostly_local: bool, replays: bool = False
) -> float:
    """Bytes of the rank that holds most. CUDA graphs that it `replays` have inputs and results of their own."""
    item, batch, groups = shape.itemsize, shape.batch, plan.groups_for(shape) if plan.swaps else 1
    heads, kv_heads = heads_of_group(shape.heads, shape.kv_heads, plan.ulysses, groups)
    shared = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) < groups
    n, keys, local = plan.tokens.shard_len, plan.keys.tokens.shard_len, plan.local_len
    both = shape.head_dim + shape.value_dim
    each = Sizes(
        n, keys, batch * heads * shape.head_dim * item, batch * heads * shape.value_dim * item,
        batch * kv_heads * both * item, batch * heads * both * item, batch * heads * 4, max(1.0, 4 / item),
        1.0 if low_precision or item > 2 else 2.0, kv_heads >= 2, kernel, not low_precision, mostly_local,
    )  # fmt: skip
    given = float(local * batch * item * shape.heads * (shape.head_dim + 2 * shape.value_dim))  # q, out, its gradient
    given += shape.bytes_of(plan.keys.local_len, shape.kv_heads)
    given += local * batch * shape.heads * (4 if item == 2 else 8)  # the lse
    if plan.ulysses > 1:  # what entered is kept
        given += groups * n * (each.q + each.out) + (1 if shared else groups) * keys * each.kv
    given += replays * (2 * given + shape.bytes_of(plan.keys.local_len, shape.kv_heads))
    if plan.strategy == "gather" and plan.ring > 1:
        return given + gather_peak(each, plan.ring, groups, not plan.keys.tokens.in_order)
    if replays and keeps(each, steps):  # into the graph of backward, and out of that of forward
        given += 2 * each.kv * int(steps.received.max())
    live = Live(np.zeros(len(steps.readers)))
    replay_ring(live, each, steps)
    most = float(live.most.max())
    return given + (most if plan.ulysses == 1 else ulysses_peak(each, plan.ulysses, groups, most, shared))


def bound(plan: Plan, shape: Shape, steps: Steps) -> float:
    """More than `peak` for any kernel: no tensor of queries, own keys or the keys of a step is allocated as often.

    A library may hold keys, and their gradients, for every query head.
    """
    keys, kv_heads = plan.keys.tokens.shard_len, kv_heads_of_a_rank(shape.kv_heads, plan.ulysses)
    keys = keys * plan.ring if plan.strategy == "gather" else keys + int(steps.received.max())
    repeated = shape.bytes_of(keys, shape.heads // plan.ulysses)
    times = 8.0 if plan.graphs == "off" else 14.0
    return times * (2 * shape.bytes_of(plan.local_len, shape.heads) + shape.bytes_of(keys, kv_heads)) + 3.0 * repeated


def replay_ring(live: Live, each: Sizes, steps: Steps) -> None:
    """Backward of one group of heads over a ring, phase by phase, as `ringattn.torch.attention.ring` carries it out."""
    of_queries, of_keys = each.queries * each.q, each.keys * each.kv
    live.take(each.prepared)
    if steps.count == 1:  # nothing travels, and nothing is added to the gradients
        live.take(of_queries + of_keys + each.beside(each.queries, each.keys))
        return
    kept = keeps(each, steps)
    live.take(kept * steps.received[:, 1] * each.kv)
    dq, own = Parts(live, of_queries * each.exact, 1), Parts(live, of_keys * each.exact)
    ends, arriving = [*steps.first[1:].tolist(), steps.count], steps.received[:, steps.first]
    block, sums, nothing = np.full(len(steps.readers), each.keys), own, 0 * live.now
    # keys of another rank; sums that are sent; room for those that come with a block, and come home
    room, sent, with_block, returning = nothing, nothing, nothing, nothing
    for p in largest(arriving):
        following = nothing if p + 1 == len(ends) else arriving[:, p + 1]
        onward = live.take(following * each.kv)
        replay_phase(live, each, steps, range(steps.first[p], ends[p]), dq, sums, block, kept)
        if p:
            sums.add(with_block)
            sums.total()
            with_block = live.take(following * each.kv * each.exact)
            own.add(returning)
            returning = live.take(steps.returned[:, ends[p] - 1] * each.kv * each.exact)
            live.free(sent)
            sent = sums.nbytes
        live.free(room)
        room, block = onward, following
        sums = Parts(live, block * each.kv * each.exact)
    live.free(sent)
    own.add(returning)
    for nbytes, parts, share in ((of_queries, dq, 1.0), (of_keys / 2, own, 0.5), (of_keys / 2, own, 0.5)):
        live.take(nbytes)  # in the dtype of the inputs, one after the other
        live.free(parts.nbytes * share)


def keeps(each: Sizes, steps: Steps) -> bool:
    """Whether the keys that arrive are here since forward: `Recipe.keeps`."""
    two = steps.count == 2 and len(steps.first) == 1
    if not two or each.kernel != "fa4":
        return False
    return may_keep(each.queries, int(steps.received[:, 1].max()), each.mostly_local)


def largest(sizes: np.ndarray) -> list[int]:
    """Of very many steps or phases [rank, number] of these sizes: the first, the last, and those about the largest."""
    count, most = sizes.shape[1], int(sizes.max(0).argmax()) if sizes.size else 0
    some = {0, 1, most - 1, most, most + 1, count - 2, count - 1}
    return [i for i in range(count) if count <= EXACT or i in some]


def replay_phase(
    live: Live, each: Sizes, steps: Steps, which: range, dq: Parts, sums: Parts, block: np.ndarray, kept: bool
) -> None:
    """The steps while a block of so many tokens is here, whose first is of that block; in the order of backward."""
    received, sent = steps.received, steps.sent
    others = [which[1 + i] for i in largest(received[:, which[1:]])]
    halved = bool(others) and not each.ours and each.halves and each.queries >= HALVES_FROM and not kept
    order = [which[0]] * (each.ours or halved) + others + [which[0]] * (not each.ours)
    copied = each.travel != (each.exact if each.ours else 1.0)  # to travel in another dtype
    leaving = arriving = 0 * live.now  # gradients on their way from here, and to here

    def keys_of(s: int) -> Any:
        return live.take(received[:, s] * each.kv * (s != which[0] and not kept))

    def settle(some: Any) -> None:
        """Gradients of these ranks that travelled are here: those of the readers are parts of the sums."""
        nonlocal leaving, arriving
        sums.add(arriving * some)
        sums.fold(some)
        live.free(leaving * some)
        leaving, arriving = leaving * ~some, arriving * ~some

    current = keys_of(order[0])
    for s, following in zip(order, [*order[1:], which[0]], strict=True):
        upcoming, local = keys_of(following), s == which[0]
        if each.ours:
            settle(steps.taken[:, s])
        work = (steps.pairs[:, s] > 0) * (0.5 if halved and local else 1.0)
        queries, tokens = work * steps.queries[:, s], work * (block if local else received[:, s])
        new = (dq.summed == 0) * work * each.queries * each.q * each.exact if each.ours else queries * each.q
        made = tokens * each.kv * (each.exact if each.ours else 1.0)
        live.free(live.take(made + new + each.beside(queries, tokens)) - made - new)
        dq.add(new, summed=each.ours)
        if local:
            sums.add(made, summed=each.ours)
        else:
            settle(received[:, s] + sent[:, s] > 0)
            arriving = arriving + live.take(sent[:, s] * each.kv * each.travel)
            leaving = leaving + (live.take(tokens * each.kv * each.travel) if copied else made)
        dq.fold()
        live.free(made * (copied and not local) + current)
        current = upcoming
    live.free(leaving)
    sums.add(arriving)


def ulysses_peak(each: Sizes, ulysses: int, groups: int, ring: float, shared: bool) -> float:
    """The peak while heads enter, are computed, which takes `ring`, and leave.

    While one group is computed, the next one enters, and gradients of the one before leave.
    """
    away, dout, of_keys = (ulysses - 1) / ulysses, each.queries * each.out, each.keys * each.kv
    grads = each.queries * each.q + of_keys * (not shared)
    leaving = grads * (1 + away)  # with room for what comes
    stages = [groups * grads + leaving + of_keys * (2 + away) * shared]
    for g in range(groups):
        entering = dout + dout * (1 + away) * (g + 1 < groups)
        now = max(ring, grads + leaving + each.prepared, dout * away)
        stages.append(entering + now + g * grads + leaving * (g > 0))
    return max(stages) + of_keys * each.exact * shared  # sums over the groups


def gather_peak(each: Sizes, ring: int, groups: int, reorders: bool) -> float:
    """The peak where all keys are here at once; their gradients are summed in float32 and go home a group behind."""
    every, own = each.keys * ring * each.kv, each.keys * each.kv * each.exact
    of_queries, sums, leaving = each.queries * each.q * each.exact, own * ring, own * (ring - 1)
    wide, stages = of_queries + sums, []
    made = wide if each.ours else wide / each.exact + max(wide, each.beside(each.queries, each.keys * ring))
    for g in range(groups):
        more = g + 1 < groups  # groups: their keys arrive
        before = g * of_queries + (sums + leaving) * (g > 0) + max(0, g - 1) * own / each.exact
        stages.append(before + every * (1 + (more or reorders)) + each.prepared + made)
        stages.append(before + every + wide + leaving + max(sums * reorders, (leaving + 3 * own) / 2 * (g > 0)))
    last = groups * of_queries + sums + leaving + (groups - 1) * own / each.exact + (leaving + 3 * own) / 2
    return max(*stages, last)
