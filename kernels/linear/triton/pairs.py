"""Pairs of tokens of a chunk, in the words of `gated_products.py`: their decays, scores a_ij and gradients.

The decay between two tokens is split at a point between them, so that its two factors can be multiplied into q and k
before a matrix product. There are two cases, and a launch for each:

Gentle: no channel of the chunk decays below 2^-100. Then one point serves all pairs, where half of the chunk's decay is
reached, and one matrix product does too.

Strong: the chunk is cut in halves, those in halves and so on, down to parts of PART tokens. Exactly one cut separates
the tokens of two different parts. One matrix product serves all cuts of one size: its rows are of q behind their cut
and of k before it. Pairs within a part are multiplied out. All factors are products of gates, at most 1, so a strong
gate costs its neighbours no bits.

The pair of a token with itself is kept apart: it has no decay, and does not cancel in dg. In dg what a pair adds to
q dq and to k dk cancels for all t that are not between the two. It only does so if both are products of the same
numbers, so q and k are rounded, with their decay, before a product would truncate them.
"""

import triton
import triton.language as tl

from ringattn.kernels.linear.triton.gated_states import CHANNEL, HEAD, LOWEST, gates, load, product, rounded
from ringattn.kernels.triton import LOG2E

GENTLE = tl.constexpr(100.0)  # products of 2^50 with numbers of 16 bits, and their sums, are far from overflowing


@triton.jit
def passes_over(strongest_ptr, chunk, TILES: tl.constexpr, STRONG: tl.constexpr):
    """Whether the other launch computes this chunk: one takes the strong chunks, the other one the gentle ones."""
    strongest = tl.load(strongest_ptr + chunk * TILES)
    for i in tl.static_range(1, TILES):
        strongest = tl.minimum(strongest, tl.load(strongest_ptr + chunk * TILES + i))
    return (strongest < -GENTLE) != STRONG


@triton.jit
def from_middle(g_ptr, g_st, first, T, column, CHUNK: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):
    """The factors (of q, of k) whose product is the decay between two tokens of a gentle chunk, and its total decay."""
    g = gates(g_ptr, g_st, first, T, column, CHUNK, K, WIDTH, CHANNEL)
    total = tl.sum(g, 0)
    b = tl.cumsum(g, 0) - 0.5 * total[None, :]
    return tl.exp2(b), tl.exp2(-b), total


@triton.jit
def nth(
    i, ptr, st, first, T, column, PART: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The i-th token of each part, [PARTS, 1, WIDTH]; for i of shape [1, N, 1], N tokens of each, [PARTS, N, WIDTH]."""
    rows = i + PART * tl.arange(0, PARTS)[:, None, None]
    cols = column + tl.arange(0, WIDTH)[None, None, :]
    inside = first + rows < T
    if K % WIDTH != 0:
        inside = inside & (cols < K)
    at = ptr + tl.cast(first, tl.int64) * st[1] + rows * st[1] + cols * st[3]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def nth_decay(
    i, g_ptr, g_st, first, T, column, PART: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The decay at the i-th token of each part, as a factor."""
    g = nth(i, g_ptr, g_st, first, T, column, PART, PARTS, K, WIDTH)
    return tl.exp2(tl.maximum(g * LOG2E, LOWEST))


@triton.jit
def passed(i, decay, through, ahead, total):
    """Include token i of each part in the decays: from the part's start through each token, behind each token up to
    the part's end, and over the whole part.
    """
    t = tl.arange(0, through.shape[1])[None, :, None]
    return through * tl.where(t >= i, decay, 1.0), ahead * tl.where(t < i, decay, 1.0), total * decay


@triton.jit
def doubled(level, through, ahead, total):
    """The same decays within pieces of 2^(level + 1) parts, from those within their halves."""
    PARTS: tl.constexpr = total.shape[0]
    WIDTH: tl.constexpr = total.shape[2]
    half = 1 << level
    other = tl.broadcast_to(tl.arange(0, PARTS)[:, None] ^ half, [PARTS, WIDTH])
    beside = tl.gather(tl.reshape(total, [PARTS, WIDTH]), other, 0)[:, None, :]
    late = tl.arange(0, PARTS)[:, None, None] & half != 0
    return through * tl.where(late, beside, 1.0), ahead * tl.where(late, 1.0, beside), total * beside


@triton.jit
def cut_at(level, through, ahead):
    """[CHUNK, WIDTH]: `through` for tokens behind the cut between halves of 2^level parts, `ahead` for those before."""
    late = tl.arange(0, through.shape[0])[:, None, None] & (1 << level) != 0
    return tl.reshape(tl.where(late, through, ahead), [through.shape[0] * through.shape[1], through.shape[2]])


@triton.jit
def across(size, CHUNK: tl.constexpr, CUTS: tl.constexpr = 1):
    """Whether i and j lie in the two halves, of `size` tokens each, of one piece; with CUTS = 0, in the same half."""
    return (tl.arange(0, CHUNK)[:, None] // size ^ tl.arange(0, CHUNK)[None, :] // size) == CUTS


@triton.jit
def earlier(CHUNK: tl.constexpr):
    """j < i."""
    return tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :]


@triton.jit
def column_of(x, i):
    """x[:, :, i : i + 1]."""
    N: tl.constexpr = x.shape[2]
    return tl.sum(tl.where(tl.arange(0, N)[None, None, :] == i, x, 0.0), 2)[:, :, None]


@triton.jit
def decay_between(g_ptr, g_st, first, T, CHUNK: tl.constexpr, GATE: tl.constexpr, EXACT: tl.constexpr = True):
    """The decay from j to i for j < i, else 0; for gates that all channels share, or none.

    With EXACT the gates between each pair are summed by themselves. Otherwise it is a difference of two sums, whose
    rounding 16-bit inputs do not notice, and which takes far less time.
    """
    after = earlier(CHUNK)
    if GATE == HEAD:
        g = gates(g_ptr, g_st, first, T, 0, CHUNK, 1, 1, GATE)
        if not EXACT:
            b = tl.cumsum(tl.reshape(g, [CHUNK]), 0)
            return tl.where(after, tl.exp2(tl.minimum(b[:, None] - b[None, :], 0.0)), 0.0)
        return tl.where(after, tl.exp2(tl.cumsum(tl.where(after, g, 0.0), 0)), 0.0)
    else:
        return tl.where(after, 1.0, 0.0)


@triton.jit
def related(begin_ptr, first, T, CHUNK: tl.constexpr):
    """Whether j is of the document of i, or of a later one, which the caller masks as j > i."""
    tokens = first + tl.arange(0, CHUNK)
    return tl.load(begin_ptr + tl.minimum(tokens, T - 1))[:, None] <= tokens[None, :]


@triton.jit
def scores(
    q_ptr, k_ptr, g_ptr, begin_ptr, q_st, k_st, g_st, first, T,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, DOCS: tl.constexpr,
    PRECISION: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """(sum_k q_ik 2^(b_i - b_j) k_jk for the pairs j <= i of one chunk of one head, the strongest decay of a channel).

    The strongest decay is that over the whole chunk. It is found in the gentle case with gates per channel only.

    Loop: over tiles of BLOCK_K key channels, added up in `a`. In the gentle case q and k take their factors, and one
    product gives all pairs. In the strong one:
    - An inner loop over the PART tokens of a part multiplies decays into q and k. `near` [parts, j, i] gets column i
      when the decays up to token i are in k and no later one.
    - A loop over the levels takes the pairs across the cuts of each size, from one product x x^T. `a` is its initial
      value, and only pairs across a cut of this level keep the sum. Then the decays are extended to twice the size.

    Why at the odd places: the diagonal of a gentle chunk is summed in float32 (`own`), where the factors of q and k
    cancel. A gate that all channels share is multiplied into `a` at the end.
    """
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    strongest = tl.zeros([BLOCK_K], tl.float32)
    PARTS: tl.constexpr = CHUNK // PART
    near = tl.zeros([PARTS, PART, PART], tl.float32)  # j, i
    for column in tl.range(0, K, BLOCK_K, num_stages=1):
        if STRONG:
            t = tl.arange(0, PART)[None, :, None]
            q = nth(t, q_ptr, q_st, first, T, column, PART, PARTS, K, BLOCK_K)
            k = nth(t, k_ptr, k_st, first, T, column, PART, PARTS, K, BLOCK_K)
            total = tl.full([PARTS, 1, BLOCK_K], 1.0, tl.float32)
            for i in tl.static_range(PART):
                decay = nth_decay(i, g_ptr, g_st, first, T, column, PART, PARTS, K, BLOCK_K)
                q, k, total = passed(i, decay, q, k, total)
                q_i = nth(i, q_ptr, q_st, first, T, column, PART, PARTS, K, BLOCK_K)
                near += tl.where(tl.arange(0, PART)[None, None, :] == i, tl.sum(k * q_i, 2)[:, :, None], 0.0)
            for level in tl.range(0, PARTS.bit_length() - 1, num_stages=1):
                x = rounded(cut_at(level, q, k), PRECISION)
                s = tl.dot(x, tl.trans(x), a, input_precision=PRECISION)
                a = tl.where(across(PART << level, CHUNK), s, a)
                q, k, total = doubled(level, q, k, total)
        else:
            q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K)
            k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
            if GATE == CHANNEL:
                of_q, of_k, total = from_middle(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K)
                strongest = tl.minimum(strongest, total)
                q, k = q.to(tl.float32) * of_q, k.to(tl.float32) * of_k
            a = product(q, tl.trans(k), a, PRECISION)
            own += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    if STRONG:
        near = tl.broadcast_to(tl.permute(near, (0, 2, 1))[:, :, None, :], [PARTS, PART, PARTS, PART])
        a = tl.where(across(PART, CHUNK, 0), tl.reshape(near, [CHUNK, CHUNK]), a)
    if GATE != CHANNEL:
        a = a * decay_between(g_ptr, g_st, first, T, CHUNK, GATE)
    if DOCS:
        a = tl.where(related(begin_ptr, first, T, CHUNK), a, 0.0)
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    if not STRONG:
        a = tl.where(i == j, own[:, None], a)
    return tl.where(i >= j, a, 0.0), tl.min(strongest, 0)


@triton.jit
def pairs_within(
    da, q_ptr, k_ptr, g_ptr, beta_ptr, q_st, k_st, g_st, beta_st, first, T, column,
    K: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr,
    BETA: tl.constexpr,
):  # fmt: skip
    """What the pairs j < i of a strong chunk add to a tile of (dq, dk, q dq - k dk); da is 0 for j >= i.

    With BETA, k is beta k, and dk is the gradient for that. `da` is made symmetric, so that one product a level gives
    dq behind the cuts and dk before them. Pairs within a part are two recurrences over its tokens: near_k from the last
    to the first, near_q the other way.
    """
    PARTS: tl.constexpr = CHUNK // PART
    i = tl.arange(0, CHUNK)[:, None]
    t = tl.arange(0, PART)[None, :, None]
    da += tl.trans(da)
    near = tl.where(across(PART, CHUNK, 0), da, 0.0)
    near = tl.sum(tl.reshape(near, [PARTS, PART, PARTS, PART]), 2)
    near_k = tl.zeros([PARTS, PART, WIDTH], tl.float32)
    for n in tl.static_range(PART - 1, 0, -1):
        q_n = nth(n, q_ptr, q_st, first, T, column, PART, PARTS, K, WIDTH)
        near_k += tl.where(t < n, column_of(near, n) * q_n, 0.0)
        near_k *= tl.where(t < n, nth_decay(n, g_ptr, g_st, first, T, column, PART, PARTS, K, WIDTH), 1.0)
    near_q = tl.zeros([PARTS, PART, WIDTH], tl.float32)
    through = tl.full([PARTS, PART, WIDTH], 1.0, tl.float32)
    ahead, total = through, tl.full([PARTS, 1, WIDTH], 1.0, tl.float32)
    for n in tl.static_range(PART):
        decay = nth_decay(n, g_ptr, g_st, first, T, column, PART, PARTS, K, WIDTH)
        through, ahead, total = passed(n, decay, through, ahead, total)
        k_n = nth(n, k_ptr, k_st, first, T, column, PART, PARTS, K, WIDTH)
        if BETA:
            k_n *= nth(n, beta_ptr, (0, beta_st, 0, 0), first, T, 0, PART, PARTS, 1, 1)
        near_q *= tl.where(t >= n, decay, 1.0)
        near_q += tl.where(t > n, column_of(near, n) * k_n, 0.0)
    dq = tl.reshape(near_q, [CHUNK, WIDTH])
    dk = tl.reshape(near_k, [CHUNK, WIDTH])
    q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, WIDTH).to(tl.float32)
    k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, WIDTH).to(tl.float32)
    if BETA:
        k *= load(beta_ptr, first, T, 0, beta_st, 0, CHUNK, 1, 1).to(tl.float32)
    pairs = q * dq - k * dk
    for level in tl.range(0, PARTS.bit_length() - 1, num_stages=1):
        late = i & (PART << level) != 0
        decays = cut_at(level, through, ahead)
        q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, WIDTH).to(tl.float32)
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, WIDTH).to(tl.float32)
        if BETA:
            k *= load(beta_ptr, first, T, 0, beta_st, 0, CHUNK, 1, 1).to(tl.float32)
        x = rounded(tl.where(late, q, k) * decays, PRECISION)
        to = tl.dot(tl.where(across(PART << level, CHUNK), da, 0.0), x, input_precision=PRECISION)
        pairs += tl.where(late, x, -x) * to
        dq += tl.where(late, decays * to, 0.0)
        dk += tl.where(late, 0.0, decays * to)
        through, ahead, total = doubled(level, through, ahead, total)
    return dq, dk, pairs
