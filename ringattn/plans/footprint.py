"""The memory of a rank at the peak of a call, forward and backward, counted tensor by tensor.

It follows what `ringattn.torch.attention` allocates and frees, in that order, so a change there belongs here too. Held
are q, k, v, out, the lse and the gradient of out; backward adds keys that travel, gradients, and what a kernel needs
beside them. All ranks at once, as numpy arrays. tests/test_predict.py holds it against measured peaks.
"""

from typing import Any, NamedTuple

import numpy as np

from ringattn.plans.cost import Course, Shape, heads_of_group, kv_heads_of_a_rank
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import LONG, are_kept, backward_order

THIN, ROWS = 1024, 32  # FlashAttention-4 leaves steps of so few keys to our kernel, which takes queries as so many rows
CUT = 4096  # from so many queries on


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
    own: bool  # our kernel, which gives gradients in float32; those of libraries have the dtype of inputs
    mostly_own: bool  # as in `Recipe`

    def beside(self, queries: Any, keys: Any) -> Any:
        """What a library needs while it computes gradients of so many queries and keys.

        All sum dq in float32 and keep a number or two a row. FlashAttention-4 sums dk and dv of grouped heads in
        float32, too. cuDNN does not say what it takes; so much fits most shapes in benchmarks/plans-h100.jsonl.
        """
        if self.own:
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
    """A gradient in parts, as `ringattn.kernels.total.Total`; `whole` are the bytes of their sum."""

    def __init__(self, live: Live, whole: Any):
        self.live, self.whole = live, whole
        self.nbytes = self.summed = 0 * live.now

    def add(self, nbytes: Any, summed: bool = False) -> None:
        """Another part, which is held already; `summed`: if it is the first, later ones may be added to it."""
        self.summed = self.summed + summed * (self.nbytes == 0) * (nbytes > 0)
        self.nbytes = self.nbytes + nbytes

    def fold(self) -> None:
        """Parts of more than 1.5 times the sum are added up."""
        over = 2 * self.nbytes > 3 * self.whole
        self.live.take(over * (self.summed == 0) * self.whole)
        self.live.free(over * (self.nbytes - self.whole * (self.summed > 0)))
        self.nbytes, self.summed = np.where(over, self.whole, self.nbytes), np.maximum(self.summed, over)


def peak(plan: Plan, shape: Shape, steps: Course, grads: float, kernel: str, narrow: bool, mostly_own: bool) -> float:
    """Bytes of the rank that holds most. `grads` is the size of gradients that travel over that of keys."""
    item, groups = shape.itemsize, plan.groups_for(shape) if plan.swaps else 1
    heads, kv_heads = heads_of_group(shape.heads, shape.kv_heads, plan.ulysses, groups)
    shared = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) < groups
    both, batch = shape.head_dim + shape.value_dim, shape.batch
    each = Sizes(
        batch * heads * shape.head_dim * item, batch * heads * shape.value_dim * item, batch * kv_heads * both * item,
        batch * heads * both * item, batch * heads * 4, max(1.0, 4 / item), grads, kv_heads >= 2, kernel, not narrow,
        mostly_own,
    )  # fmt: skip
    n, keys, local = plan.tokens.shard_len, plan.keys.tokens.shard_len, plan.local_len
    given: float = (
        local * batch * item * shape.heads * (shape.head_dim + 2 * shape.value_dim)
    )  # q, out and its gradient
    given += shape.kv_bytes(plan.keys.local_len, shape.kv_heads)
    lse = local * batch * shape.heads * (4 if item == 2 else 8)
    if plan.ulysses > 1:  # what entered is kept
        given += groups * n * (each.q + each.out) + (1 if shared else groups) * keys * each.kv
    live = Live(np.full(len(steps.ranks), float(given + lse)))
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
    keys = keys * plan.ring if plan.strategy == "gather" else keys + int((steps.near + steps.far).max())
    repeated = shape.kv_bytes(keys, shape.heads // plan.ulysses)
    return 8.0 * (2 * shape.q_bytes(plan.local_len) + shape.kv_bytes(keys, kv_heads)) + 3.0 * repeated


def prepared(each: Sizes, n: int) -> float:
    """What our kernel makes of the rows; of those with a float64 lse also another gradient of out."""
    return n * each.own * (2 * each.rows + (each.out + each.rows) * (each.exact == 1))


def ringed(live: Live, plan: Plan, each: Sizes, steps: Course) -> None:
    """Backward of one group of heads over a ring, round by round."""
    n, keys = plan.tokens.shard_len, plan.keys.tokens.shard_len
    live.take(prepared(each, n))
    if len(steps.passed) == 1:  # nothing travels, and nothing is added to the gradients
        live.take(n * each.q + keys * each.kv + each.beside(n, keys))
        return
    arriving = steps.near + steps.far
    if keeps(plan, each, steps):
        live.take(arriving[:, 1] * each.kv)
    dq, own = Parts(live, n * each.q * each.exact), Parts(live, keys * each.kv * each.exact)
    first = [*np.flatnonzero(steps.passed).tolist(), len(steps.passed)]
    of_round(live, plan, each, steps, range(first[0]), dq, own, np.full(len(steps.ranks), keys))
    held: Any = 0.0  # of another rank
    coming: Any = 0.0  # sums of its gradients
    for begin, end in [(first[i], first[i + 1]) for i in telling(arriving[:, first[:-1]].max(0, initial=0))]:
        room = live.take(arriving[:, begin] * each.kv)
        live.free(held)
        held, totals = room, Parts(live, room * each.exact)
        of_round(live, plan, each, steps, range(begin, end), dq, totals, arriving[:, begin])
        totals.add(coming)
        live.take((totals.summed == 0) * totals.whole)  # their sum goes on
        live.free(totals.nbytes - totals.whole * (totals.summed > 0))
        coming = live.take(totals.whole) if end < first[-1] else 0.0
        live.free(totals.whole)
    for nbytes, parts, share in ((n * each.q, dq, 1.0), (keys * each.kv / 2, own, 0.5), (keys * each.kv / 2, own, 0.5)):
        live.take(nbytes)  # in the dtype of the inputs, one after the other
        live.free(parts.nbytes * share)


def keeps(plan: Plan, each: Sizes, steps: Course) -> bool:
    """Whether the keys that arrive are here since forward: `Recipe.keeps`."""
    two = len(steps.passed) == 2 and not steps.passed.any()
    if not (two and each.mostly_own and each.kernel == "fa4"):
        return False
    return are_kept(plan.tokens.shard_len, int((steps.near + steps.far)[:, 1].max()))


def telling(sizes: np.ndarray) -> list[int]:
    """Of steps or rounds that bring so much: the first, the last, and those about the largest; the rest is as they."""
    count = len(sizes)
    if count <= 7:
        return list(range(count))
    largest = int(sizes.argmax())
    return sorted({0, 1, count - 2, count - 1} | ({largest - 1, largest, largest + 1} & set(range(count))))


def of_round(
    live: Live, plan: Plan, each: Sizes, steps: Course, which: range, dq: Parts, own: Parts, held: np.ndarray
) -> None:  # fmt: skip
    """The steps while a block of `held` tokens is here, whose first is of that block; in the order of backward."""
    n, brought = plan.tokens.shard_len, steps.near + steps.far
    home, others = which[0], [*which[1:]]
    others = [others[i] for i in telling(brought[:, others].max(0, initial=0))]
    here_before = keeps(plan, each, steps)
    order = backward_order(home, others, each.own, each.halves and n >= LONG and not here_before)
    halved = len(order) > len(others) + 1

    def room(s: int) -> Any:
        return live.take(brought[:, s] * each.kv * (s != home and not here_before))

    flying: Any = 0.0  # gradients on their way from here
    arriving: Any = 0.0  # and to here
    here = room(order[0])
    for s, following in zip(order, [*order[1:], home], strict=True):
        if each.own:
            live.free(flying)
            own.add(arriving)
            own.fold()
            flying = arriving = 0.0
        coming = room(following)
        work = (steps.pairs[:, s] > 0) * (0.5 if halved and s == home else 1.0)
        tokens = work * (held if s == home else brought[:, s])
        made = computed(live, each, steps, s, work * steps.held[0][:, s], tokens, n, dq, here_before)
        shown = steps.held[1][:, s]
        travels = (s != home) * (brought[:, s] + shown > 0)
        if np.any(travels):
            live.free(flying)
            own.add(arriving)
            own.fold()
            arriving = live.take(shown * each.kv * each.travel)
            if each.own and each.exact != each.travel:  # copies in the dtype in which they travel
                live.take(tokens * each.kv * each.travel)
                live.free(made)
                made = tokens * each.kv * each.travel
            flying = made * travels
        own.add(made * ~np.asarray(travels, bool), summed=each.own)
        if each.own:
            dq.add(live.take((dq.summed == 0) * work * n * each.q * each.exact), summed=True)
        dq.fold()
        live.free(here)
        here = coming
    live.free(flying)
    own.add(arriving)


def computed(
    live: Live, each: Sizes, steps: Course, s: int, queries: np.ndarray, tokens: np.ndarray, n: int, dq: Parts,
    once: bool,
) -> np.ndarray:  # fmt: skip
    """A kernel's gradients of a step: the bytes of dk and dv. That of queries is a part of `dq`, but for our kernel.

    `once`: FlashAttention-4 computes a step of few keys itself, since none of its queries is visited again.
    """
    wide = tokens * each.kv * each.exact
    if each.own:
        live.take(wide)
        return wide
    few = 2 * steps.pairs[:, s] <= THIN * np.maximum(queries, 1)
    ours = each.kernel == "fa4" and n >= CUT and not once
    thin = few & (steps.near + steps.far > 0)[:, s] & (queries > 0) & ours
    of_queries = np.where(thin, n * each.q * each.exact, queries * each.q)
    made = np.where(thin, wide, tokens * each.kv)
    live.take(of_queries + made)
    rows = 2 * n * each.rows + (ROWS - 1) * np.minimum(tokens, THIN) * each.kv * each.exact
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

    def came_home() -> None:
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
        made = live.take(wide if each.own else wide / each.exact)
        live.pass_by(each.beside(n, keys * ring))
        live.take(wide * (not each.own))
        live.free(made * (not each.own))
        live.free(prepared(each, n) + every * (reorders or not last))
        for _ in range(2):
            live.take(reorders * sums / 2 + own / 2 * (ring - 1))
        live.free(reorders * sums)
        if g:
            came_home()
    live.free(every)
    came_home()
