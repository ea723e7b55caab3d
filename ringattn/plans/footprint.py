"""The memory of a rank at the peak of a call, forward and backward, counted tensor by tensor.

It goes through the steps of the table, and follows what `ringattn.torch.attention` allocates and frees in each, so a
change there belongs here too. Held are q, k, v, out, the lse and the gradient of out; backward adds keys that travel,
gradients, and what a kernel needs beside them. All ranks at once, as numpy arrays. tests/test_predict.py holds it
against measured peaks, and against what the ring's loop allocates.
"""

from typing import Any, NamedTuple

import numpy as np

from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank
from ringattn.plans.course import EXACT, Course
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import LONG, are_kept, backward_order

THIN_KEYS, PACKED_ROWS = (
    1024,
    32,
)  # FlashAttention-4 leaves steps of so few keys to our kernel, which takes queries as so many rows
CUT_QUERIES = 4096  # from so many queries on


class Sizes(NamedTuple):
    """Bytes a token of the heads that are computed together, and which kernel computes them."""

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
    mostly_own: bool  # as in `Recipe`

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


class Live:
    """The bytes that are held, and the most that were."""

    def __init__(self, now: Any):
        self.now = self.most = np.asarray(now, float)

    def take(self, nbytes: Any) -> Any:
        self.now = self.now + nbytes
        self.most = np.maximum(self.most, self.now)
        return nbytes

    def free(self, nbytes: Any) -> None:
        self.now = self.now - nbytes

    def pass_by(self, nbytes: Any) -> None:
        """Held for a moment."""
        self.take(nbytes)
        self.free(nbytes)


class Parts:
    """One or two gradients in parts, as `ringattn.kernels.total.Total`; `whole` are the bytes of their sum."""

    def __init__(self, live: Live, whole: Any, tensors: int = 2):
        self.live, self.whole, self.tensors = live, whole, tensors
        self.nbytes = self.summed = 0 * live.now

    def add(self, nbytes: Any, summed: bool = False) -> None:
        """Another part, which is held already; `summed`: if it is the first, later ones may be added to it."""
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


def peak(plan: Plan, shape: Shape, steps: Course, kernel: str, low_precision: bool, mostly_own: bool) -> float:
    """Bytes of the rank that holds most."""
    item, groups = shape.itemsize, plan.groups_for(shape) if plan.swaps else 1
    heads, kv_heads = heads_of_group(shape.heads, shape.kv_heads, plan.ulysses, groups)
    shared = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) < groups
    both, batch = shape.head_dim + shape.value_dim, shape.batch
    each = Sizes(
        batch * heads * shape.head_dim * item, batch * heads * shape.value_dim * item, batch * kv_heads * both * item,
        batch * heads * both * item, batch * heads * 4, max(1.0, 4 / item),
        1.0 if low_precision or item > 2 else 2.0, kv_heads >= 2, kernel, not low_precision,
        mostly_own,
    )  # fmt: skip
    n, keys, local = plan.tokens.shard_len, plan.keys.tokens.shard_len, plan.local_len
    given = float(local * batch * item * shape.heads * (shape.head_dim + 2 * shape.value_dim))  # q, out, its gradient
    given += shape.kv_bytes(plan.keys.local_len, shape.kv_heads)
    lse = local * batch * shape.heads * (4 if item == 2 else 8)
    if plan.ulysses > 1:  # what entered is kept
        given += groups * n * (each.q + each.out) + (1 if shared else groups) * keys * each.kv
    live = Live(np.full(len(steps.readers), given + lse))
    if plan.strategy == "gather" and plan.ring > 1:
        gathered(live, plan, each, groups)
    elif plan.ulysses > 1:
        exchanged(live, plan, each, groups, steps, shared)
    else:
        ringed(live, plan, each, steps)
    return float(live.most.max())


def bound(plan: Plan, shape: Shape, steps: Course) -> float:
    """More than `peak` for any kernel: no tensor of queries, own keys or the keys of a step is held as often.

    A library may hold keys, and their gradients, for every query head.
    """
    keys, kv_heads = plan.keys.tokens.shard_len, kv_heads_of_a_rank(shape.kv_heads, plan.ulysses)
    keys = keys * plan.ring if plan.strategy == "gather" else keys + int(steps.received.max())
    repeated = shape.kv_bytes(keys, shape.heads // plan.ulysses)
    return 8.0 * (2 * shape.q_bytes(plan.local_len) + shape.kv_bytes(keys, kv_heads)) + 3.0 * repeated


def prepared(each: Sizes, n: int) -> float:
    """What our kernel makes of the rows; of those with a float64 lse also another gradient of out."""
    return n * each.ours * (2 * each.rows + (each.out + each.rows) * (each.exact == 1))


def ringed(live: Live, plan: Plan, each: Sizes, steps: Course) -> None:
    """Backward of one group of heads over a ring, phase by phase, as `ringattn.torch.attention.ring` carries it out."""
    n, keys = plan.tokens.shard_len, plan.keys.tokens.shard_len
    live.take(prepared(each, n))
    if steps.steps.count == 1:  # nothing travels, and nothing is added to the gradients
        live.take(n * each.q + keys * each.kv + each.beside(n, keys))
        return
    if keeps(plan, each, steps):
        live.take(steps.received[:, 1] * each.kv)
    dq, own = Parts(live, n * each.q * each.exact, 1), Parts(live, keys * each.kv * each.exact)
    ends = [*steps.first[1:].tolist(), steps.steps.count]
    held = np.full(len(steps.readers), keys)
    sums, room, nothing = own, 0 * live.now, 0 * live.now  # of the block that is held: gradients; keys of another rank
    sent = passed_on = gone_home = nothing  # sums that are sent; room for those that come with a block, and come home
    for p in largest(held_tokens := steps.received[:, steps.first]):
        last = p + 1 == len(ends)
        onward = nothing if last else live.take(held_tokens[:, p + 1] * each.kv)
        of_phase(live, plan, each, steps, range(steps.first[p], ends[p]), dq, sums, held)
        if p:
            sums.add(passed_on)
            sums.total()
            passed_on = nothing if last else live.take(held_tokens[:, p + 1] * each.kv * each.exact)
            own.add(gone_home)
            gone_home = live.take(steps.returned[:, p] * each.kv * each.exact)
            live.free(sent)
            sent = sums.nbytes
        live.free(room)
        room, held = onward, nothing if last else held_tokens[:, p + 1]
        sums = Parts(live, held * each.kv * each.exact)
    live.free(sent)
    own.add(gone_home)
    for nbytes, parts, share in ((n * each.q, dq, 1.0), (keys * each.kv / 2, own, 0.5), (keys * each.kv / 2, own, 0.5)):
        live.take(nbytes)  # in the dtype of the inputs, one after the other
        live.free(parts.nbytes * share)


def keeps(plan: Plan, each: Sizes, steps: Course) -> bool:
    """Whether the keys that arrive are here since forward: `Recipe.keeps`."""
    two = len(steps.hops) == 2 and not steps.hops.any()
    if not (two and each.mostly_own and each.kernel == "fa4"):
        return False
    return are_kept(plan.tokens.shard_len, int(steps.received[:, 1].max()))


def largest(sizes: np.ndarray) -> list[int]:
    """Of very many steps or phases [rank, number] of these sizes: the first, the last, and those about the largest."""
    count = sizes.shape[1]
    if count <= EXACT:
        return list(range(count))
    most = int(sizes.max(0).argmax())
    return sorted({0, 1, count - 2, count - 1} | ({most - 1, most, most + 1} & set(range(count))))


def of_phase(
    live: Live, plan: Plan, each: Sizes, steps: Course, which: range, dq: Parts, sums: Parts, held: np.ndarray
) -> None:
    """The steps while a block of `held` tokens is here, whose first is of that block; in the order of backward."""
    n, received = plan.tokens.shard_len, steps.received
    kept = keeps(plan, each, steps)
    others = [which[1 + i] for i in largest(received[:, which[1:]])]
    order = backward_order(which[0], others, each.ours, each.halves and n >= LONG and not kept)
    halved = len(order) > len(others) + 1
    nothing, copied = 0 * live.now, each.travel != (each.exact if each.ours else 1.0)  # to travel in another dtype
    leaving: Any = nothing  # gradients on their way from here
    arriving: Any = nothing  # and to here

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
        remote = keys_of(following)
        if each.ours:
            settle(steps.steps.taken[:, s])
        local = s == which[0]
        work = (steps.pairs[:, s] > 0) * (0.5 if halved and local else 1.0)
        tokens = work * (held if local else received[:, s])
        made = computed(live, each, steps, s, work * steps.queries[:, s], tokens, n, dq, kept)
        if local:
            sums.add(made, summed=each.ours)
        else:
            settle(received[:, s] + steps.sent[:, s] > 0)
            arriving = arriving + live.take(steps.sent[:, s] * each.kv * each.travel)
            leaving = leaving + (live.take(tokens * each.kv * each.travel) if copied else made)
        if each.ours:
            dq.add(live.take((dq.summed == 0) * work * n * each.q * each.exact), summed=True)
        dq.fold()
        live.free(made * (copied and not local))
        live.free(current)
        current = remote
    live.free(leaving)
    sums.add(arriving)


def computed(
    live: Live, each: Sizes, steps: Course, s: int, queries: np.ndarray, tokens: np.ndarray, n: int, dq: Parts,
    once: bool,
) -> np.ndarray:  # fmt: skip
    """A kernel's gradients of a step: the bytes of dk and dv. That of queries is a part of `dq`, but for our kernel.

    `once`: FlashAttention-4 computes a step of few keys itself, since none of its queries is visited again.
    """
    wide = tokens * each.kv * each.exact
    if each.ours:
        live.take(wide)
        return wide
    few = 2 * steps.pairs[:, s] <= THIN_KEYS * np.maximum(queries, 1)
    leaves = each.kernel == "fa4" and n >= CUT_QUERIES and not once
    thin = few & (steps.received > 0)[:, s] & (queries > 0) & leaves
    of_queries = np.where(thin, n * each.q * each.exact, queries * each.q)
    made = np.where(thin, wide, tokens * each.kv)
    live.take(of_queries + made)
    rows = 2 * n * each.rows + (PACKED_ROWS - 1) * np.minimum(tokens, THIN_KEYS) * each.kv * each.exact
    live.pass_by(np.where(thin, rows, each.beside(queries, tokens)))
    dq.add(of_queries)
    return made


def exchanged(live: Live, plan: Plan, each: Sizes, groups: int, steps: Course, shared: bool) -> None:
    """Heads enter, are computed and leave; while one group is computed, the next enters and the one before leaves."""
    n, keys, away = plan.tokens.shard_len, plan.keys.tokens.shard_len, (plan.ulysses - 1) / plan.ulysses
    of_keys, dout = keys * each.kv, n * each.out
    grads = n * each.q + of_keys * (not shared)
    whole_ring, left = Live(0 * live.now), 0.0
    ringed(whole_ring, plan, each, steps)
    live.take(dout * (1 + away))  # with the packed part of other ranks
    live.take(of_keys * each.exact * shared)  # sums over the groups
    for g in range(groups):
        if g + 1 < groups:
            live.take(dout * (1 + away))
        live.free(dout * away)
        live.pass_by(whole_ring.most)
        live.take(grads + prepared(each, n))
        live.take(grads * (1 + away))  # what leaves, and room for what comes before it is in its place
        live.free(left)
        left = grads * (1 + away)
        live.free(prepared(each, n) + dout)
    live.take(of_keys * (2 + away) * shared)  # in the dtype of the inputs, what leaves, and room


def gathered(live: Live, plan: Plan, each: Sizes, groups: int) -> None:
    """All keys are here at once; their gradients are summed in float32 and go home, one group of heads behind."""
    n, keys, ring = plan.tokens.shard_len, plan.keys.tokens.shard_len, plan.ring
    every, reorders = keys * ring * each.kv, not plan.keys.tokens.in_order
    own, sums, wide = keys * each.kv * each.exact, every * each.exact, (n * each.q + every) * each.exact

    def returned() -> None:
        for _ in range(2):  # dk, dv
            live.take(own / 2 * (ring + 1))
            live.free(own / 2 * ring)
        live.free(sums + own * (ring - 1) + own)
        live.take(own / each.exact)

    live.take(every)
    for g in range(groups):
        last = g + 1 == groups
        live.take(every * (not last) + every * reorders)
        live.free(every * (reorders and not last))  # those that are not in order are held until the last are used
        live.take(prepared(each, n))
        made = live.take(wide if each.ours else wide / each.exact)
        live.pass_by(each.beside(n, keys * ring))
        live.take(wide * (not each.ours))
        live.free(made * (not each.ours))
        live.free(prepared(each, n) + every * (reorders or not last))
        for _ in range(2):
            live.take(reorders * sums / 2 + own / 2 * (ring - 1))
        live.free(reorders * sums)
        if g:
            returned()
    live.free(every)
    returned()
