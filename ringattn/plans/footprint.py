"""The memory of a rank at the peak of a call, forward and backward: a fold of the steps of all ranks.

Held are q, k, v, out, the lse and the gradient of out. Backward adds keys that travel, gradients, and what a kernel
needs beside them, as `ringattn.torch.attention` allocates them. tests/test_predict.py holds it against measured peaks,
and against what the ring's loop allocates.
"""

from typing import Any

import numpy as np

from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank
from ringattn.plans.course import EXACT, Steps
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import HALVES_FROM, SIDE_STREAM_UP_TO


class Sizes:
    """Bytes a token of the heads of a rank that are computed together, by which kernel."""

    def __init__(self, plan: Plan, shape: Shape, kernel: str, low_precision: bool):
        item, batch = shape.itemsize, shape.batch
        self.groups = plan.groups_for(shape) if plan.swaps else 1
        heads, kv_heads = heads_of_group(shape.heads, shape.kv_heads, plan.ulysses, self.groups)
        self.shared = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) < self.groups  # the groups' key head
        self.queries, self.keys = plan.tokens.shard_len, plan.keys.tokens.shard_len
        self.q, self.out = (batch * heads * dim * item for dim in (shape.head_dim, shape.value_dim))
        self.kv = shape.kv_bytes(1, kv_heads)
        self.full = shape.kv_bytes(1, heads)  # if there were as many key heads as of queries
        self.rows = 4 * batch * heads
        self.exact = max(1.0, 4 / item)  # sums over inputs
        self.travel = 1.0 if low_precision or item > 2 else 2.0  # gradients that travel over inputs
        self.halves = kv_heads >= 2 and self.queries >= HALVES_FROM  # of local heads, first and last
        self.kernel, self.ours = kernel, not low_precision  # ours gives gradients in float32, libraries as the inputs

    def beside(self, queries: Any, keys: Any) -> Any:
        """What a library needs while it computes gradients of so many queries and keys.

        All sum dq in float32 and keep a number or two a row. FlashAttention-4 sums dk and dv of grouped heads in
        float32, too. cuDNN does not say what it takes; so much fits most shapes in benchmarks/plans-h100.jsonl.
        """
        if self.ours:
            return 0.0 * queries
        grouped = self.full > self.kv
        if self.kernel == "fa4":
            return queries * (2 * self.q + 2 * self.rows) + keys * 2 * self.kv * grouped
        return queries * (2 * self.q + self.rows) + keys * self.full * (2 if grouped else 1)

    @property
    def prepared(self) -> float:
        """What our kernel makes of the rows; of those with a float64 lse also another gradient of out."""
        return self.queries * self.ours * (2 * self.rows + (self.out + self.rows) * (self.exact == 1))


def peak(plan: Plan, shape: Shape, steps: Steps, kernel: str, low_precision: bool, mostly_local: bool) -> float:
    """Bytes of the rank that holds most."""
    each, local, item = Sizes(plan, shape, kernel, low_precision), plan.local_len, shape.itemsize
    given = float(local * shape.batch * item * shape.heads * (shape.head_dim + 2 * shape.value_dim))  # q, out, dout
    given += shape.kv_bytes(plan.keys.local_len, shape.kv_heads)
    given += local * shape.batch * shape.heads * (4 if item == 2 else 8)  # the lse
    if plan.ulysses > 1:  # what entered is kept
        given += each.groups * each.queries * (each.q + each.out)
        given += (1 if each.shared else each.groups) * each.keys * each.kv
    if plan.strategy == "gather" and plan.ring > 1:
        return given + gather_peak(each, plan.ring, not plan.keys.tokens.in_order)
    two = steps.count == 2 and len(steps.first) == 1 and kernel == "fa4" and mostly_local
    # as in `Recipe.keeps`: keys that arrive are here since forward
    kept = two and (each.queries <= SIDE_STREAM_UP_TO or int(steps.received[:, 1].max()) < each.queries)
    most = ring_peak(each, steps, kept)
    return given + (most if plan.ulysses == 1 else ulysses_peak(each, plan.ulysses, most))


def ring_peak(each: Sizes, steps: Steps, kept: bool) -> float:
    """Backward of one group of heads over a ring, step by step, in the order in which they run.

    In every step there are the keys of it and of the next one, gradients so far and its own, and what the kernel needs.
    Gradients of remote keys leave while the next step runs, and those of local keys arrive. A phase begins with the
    block that is here, or ends with it if the kernel is a library's. `kept`: keys that arrive are here since forward.
    """
    of_queries, of_keys = each.queries * each.q, each.keys * each.kv
    if steps.count == 1:  # nothing travels, and nothing is added to the gradients
        return float(each.prepared + of_queries + of_keys + each.beside(each.queries, each.keys))
    local = np.isin(np.arange(steps.count), steps.first)
    phase = np.cumsum(local) - 1
    order = np.arange(steps.count) if each.ours else np.lexsort((local, phase))
    blocks = np.column_stack([0 * steps.received[:, 0] + each.keys, steps.received[:, steps.first[1:]]])
    received, sent, pairs = (x[:, order] for x in (steps.received, steps.sent, steps.pairs))
    local, block = local[order], blocks[:, phase]
    same = np.append(False, phase[1:] == phase[:-1])  # as the step before

    def before(x: np.ndarray) -> np.ndarray:
        return np.roll(x, 1, 1) * same

    moved, some = np.where(local, 0, received), pairs > 0
    halved = 0.5 * (each.halves and not kept and not each.ours) * (np.bincount(phase) > 1)[phase]
    share = some * np.where(local, 1 - halved, 1.0)  # the other half of local gradients is computed first
    # queries from the first to the last that sees any: in stripes and at home all, under a window or documents twice
    # as many as would see all of these keys
    tokens, ring = np.where(local, block, moved), steps.ring
    many = 1 if ring.docs is None and ring.spec.window is None else 2
    rows = np.minimum(many * pairs / np.maximum(tokens, 1), each.queries)
    rows = np.where((phase == 0) & local | (ring.queries.shard(0)[0].step > 1), each.queries, rows) * share
    tokens, made = tokens * share, each.exact if each.ours else 1.0
    keys = moved * each.kv * (not kept)
    keys = keys + np.roll(keys, -1, 1) * np.roll(same, -1)
    grads, arriving = tokens * each.kv * made, sent * each.kv * each.travel
    copied = tokens * ~local * each.kv * each.travel * (each.travel != made)
    early = halved * ~same  # of local gradients, at the first step of a phase
    if each.ours:
        dq, added = np.full(grads.shape, of_queries * each.exact), before(arriving + grads * local)
    else:
        dq = in_parts(rows * each.q + early * of_queries, 0 * rows + of_queries * each.exact, same | True)
        added = before(arriving) + early * block * each.kv
    sums = in_parts(added, block * each.kv * each.exact, same)
    computing = sums
    if not each.ours:  # what was sent and received for the step before is still there
        computing = before(sums + arriving + (copied if copied.any() else grads * ~local)) + early * block * each.kv
        computing = computing + each.beside(rows, tokens)
    own = (sums + arriving + (grads if not each.ours or not same.any() else 0))[:, [phase.searchsorted(1) - 1]]
    # over hosts: two blocks, and in float32 sums of this rank's own block, of this one, of the next and the one before
    following = np.column_stack([blocks[:, 1:], 0 * blocks[:, :1]])[:, phase] * (phase < phase[-1])
    previous = (phase > 1) * blocks[:, phase - 1]
    base = each.prepared + following * each.kv + (phase > 0) * (own + block * each.kv)
    base = base + kept * steps.received[:, 1:2] * each.kv + dq
    moving = (previous + (phase > 1) * block) * each.kv * each.exact
    most = base + keys + grads + moving + np.maximum(computing, sums + arriving + copied)
    ending = base + (phase > 0) * (2 * block + following + previous) * each.kv * each.exact
    last = each.prepared + dq[:, -1:] + own + of_queries  # in the dtype of the inputs
    return float(max(most.max(), ending.max(), last.max()))


def in_parts(added: np.ndarray, whole: np.ndarray, same: np.ndarray) -> np.ndarray:
    """[rank, step]: the bytes of a sum whose parts are added up if they are more than 1.5 times the `whole`."""
    if added.shape[1] > EXACT:  # about so much, without a loop over very many steps
        return np.minimum(np.cumsum(added, 1), 1.5 * whole)
    total, totals = 0 * added[:, 0], 0 * added
    for s in range(added.shape[1]):
        total = total * same[s] + added[:, s]
        total = np.where(2 * total > 3 * whole[:, s], whole[:, s], total)
        totals[:, s] = total
    return totals


def ulysses_peak(each: Sizes, ulysses: int, ring: float) -> float:
    """The peak while heads enter, are computed, which takes `ring`, and leave.

    While one group is computed, the next one enters, and gradients of the one before leave.
    """
    groups, shared, away = each.groups, each.shared, (ulysses - 1) / ulysses
    dout, of_keys = each.queries * each.out, each.keys * each.kv
    grads = each.queries * each.q + of_keys * (not shared)
    leaving = grads * (1 + away)  # with room for what comes
    stages = [groups * grads + leaving + of_keys * (2 + away) * shared]
    for g in range(groups):
        entering = dout + dout * (1 + away) * (g + 1 < groups)
        now = max(ring, grads + leaving + each.prepared, dout * away)
        stages.append(entering + now + g * grads + leaving * (g > 0))
    return max(stages) + of_keys * each.exact * shared  # sums over the groups


def gather_peak(each: Sizes, ring: int, reorders: bool) -> float:
    """The peak where all keys are here at once; their gradients are summed in float32 and go home a group behind."""
    groups, every, own = each.groups, each.keys * ring * each.kv, each.keys * each.kv * each.exact
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
