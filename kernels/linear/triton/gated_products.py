"""The products of gated linear attention in Triton: outputs and gradients, all chunks at the same time.

Given are the state before each chunk, h, and the gradient for the state behind it, dh. With b the sum of the gates from
the chunk's start through a token, and e the sum of the gates behind it in the chunk:

    a_ij = scale * sum_k q_ik 2^(b_i - b_j) k_jk  for j <= i        da = scale * dout v^T, likewise
    out  = (scale * q 2^b) h + a v                                  dv = (k 2^e) dh + a^T dout
    dq   = scale * 2^b (dout h^T) + sum_j da_ij 2^(b_i - b_j) k_j   dk = 2^e (v dh^T) + sum_i da_ij 2^(b_i - b_j) q_i
    dg_t = what the pairs j < t <= i add to q dq, summed = sum over i >= t of (q dq - k dk) + sum_v (h dh)(behind)

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

from ringattn.kernels.linear.triton.gated_states import (
    CHANNEL,
    HEAD,
    LOWEST,
    behind,
    gates,
    load,
    product,
    program_at,
    rounded,
    seen_from_end,
    seen_from_start,
    store,
    sums,
)
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


@triton.jit(do_not_specialize=["T", "N"])
def scores_kernel(
    q_ptr, k_ptr, g_ptr, begin_ptr, strongest_ptr, a_ptr, q_st, k_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, DOCS: tl.constexpr,
    PRECISION: tl.constexpr, TILES: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """a_ij = scale * sum_k q_ik 2^(b_i - b_j) k_jk of one chunk of one head, [B, N, H, CHUNK, CHUNK]; 0 for j > i.

    Programs: one for each head, chunk and batch row. With gates per channel there are two launches, and a program stops
    at once if its chunk is for the other one (`passes_over`).
    """
    _, h, n, b = program_at(tl.program_id(0), 1, H, N)
    chunk = (b * N + n) * H + h
    if GATE == CHANNEL:  # noqa: SIM102
        if passes_over(strongest_ptr, chunk, TILES, STRONG):
            return
    first = n * CHUNK
    q_ptr += b * q_st[0] + h * q_st[2]
    k_ptr += b * k_st[0] + h * k_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    a, _ = scores(
        q_ptr, k_ptr, g_ptr, begin_ptr, q_st, k_st, g_st, first, T,
        K, CHUNK, BLOCK_K, GATE, DOCS, PRECISION, PART, STRONG,
    )  # fmt: skip
    store(a_ptr + chunk * (CHUNK * CHUNK), a * scale, 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)


@triton.jit(do_not_specialize=["T", "N"])
def apply_kernel(
    x_ptr, y_ptr, g_ptr, begin_ptr, a_ptr, states_ptr, out_ptr,
    x_st, y_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk's out, from q and v as x and y; in reverse of its dv, from k, dout, dh and a^T.

    Programs: one for each tile of BLOCK_V value channels, head, chunk and batch row. The loop over tiles of BLOCK_K key
    channels adds up x against the state, x with its decay from the chunk's start (in reverse: to its end); the products
    within the chunk, a y, come last. Tokens that do not see the state, because a document began, have x = 0.
    """
    tile, h, n, b = program_at(tl.program_id(0), (V + BLOCK_V - 1) // BLOCK_V, H, N)
    column_v = tile * BLOCK_V
    first = n * CHUNK
    x_ptr += b * x_st[0] + h // GROUP * x_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    chunk = (b * N + n) * H + h
    out = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for column in tl.range(0, K, BLOCK_K):
        x = load(x_ptr, first, T, column, x_st[1], x_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
        through, total = sums(gates(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE), GATE)
        if REVERSE:
            e = behind(g_ptr, g_st, through, total, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT)
            x = x * tl.exp2(e)
            if DOCS:
                x = tl.where(seen_from_end(begin_ptr, first, T, CHUNK), x, 0.0)
        else:
            x = x * tl.exp2(through) * scale
            if DOCS:
                x = tl.where(seen_from_start(begin_ptr, first, T, CHUNK), x, 0.0)
        state = load(states_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        out = product(x.to(DTYPE), state.to(DTYPE), out, PRECISION)
    y = load(y_ptr + b * y_st[0] + h * y_st[2], first, T, column_v, y_st[1], y_st[3], CHUNK, V, BLOCK_V)
    a = load(a_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    out = product(tl.trans(a) if REVERSE else a, y.to(DTYPE), out, PRECISION)
    store(out_ptr + (b * T * H + h) * V, out, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)


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


@triton.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, g_ptr, begin_ptr, strongest_ptr, states_ptr, dstates_ptr, dq_ptr, dk_ptr, dg_ptr,
    q_st, k_st, v_st, dout_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    TILES: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_K channels of a chunk's dq, dk and dg.

    Programs: one for each tile of key channels, head, chunk and batch row. With gates per channel there are two
    launches, as for `scores_kernel`. dg is [B, T, H, K]; with one gate a head it is [B, T, H, tiles], to be summed.

    1. A loop over tiles of BLOCK_V value channels adds up da = dout v^T (`own` is its diagonal, in float32), old = dout
       h^T for dq, new = v dh^T for dk, and passing = rowsum(h dh), what goes through the chunk from state to state.
    2. Document borders are masked, and decays multiplied into old, new and passing.
    3. The pairs within the chunk, by kind of gate:
       - No gate, or one a head: da takes the decay between the tokens, and one product each gives dq and dk. dg is
         summed for each kind of pair alone, so that nothing has to cancel.
       - Gentle (ONCE, for 16 bits): old and new take only half of the chunk's decay here. The other half is in the
         factors of q and k, so that the pairs can be added to them in the same accumulator.
       - Gentle, float32: the same products in an accumulator of their own.
       - Strong: `pairs_within`.
    4. dg, for gates per channel: the suffix sums of q dq - k dk, plus what passes the chunk. `passing` also takes
       sum(k new) there, which turns minus the sum over tokens from t on into the sum over tokens before t.
    5. The pair of each token with itself is added. q and k are loaded again, since step 3 has changed them.
    """
    tile, h, n, b = program_at(tl.program_id(0), (K + BLOCK_K - 1) // BLOCK_K, H, N)
    chunk = (b * N + n) * H + h
    if GATE == CHANNEL:  # noqa: SIM102
        if passes_over(strongest_ptr, chunk, TILES, STRONG):
            return
    column = tile * BLOCK_K
    first = n * CHUNK
    q_ptr += b * q_st[0] + h * q_st[2]
    k_ptr += b * k_st[0] + h * k_st[2]
    v_ptr += b * v_st[0] + h * v_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    row = b * T * H + h
    dout_ptr += b * dout_st[0] + h * dout_st[2]
    da = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    old = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    new = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    passing = tl.zeros([BLOCK_K], tl.float32)
    for column_v in tl.range(0, V, BLOCK_V):
        v = load(v_ptr, first, T, column_v, v_st[1], v_st[3], CHUNK, V, BLOCK_V)
        dout = load(dout_ptr, first, T, column_v, dout_st[1], dout_st[3], CHUNK, V, BLOCK_V)
        da = product(dout, tl.trans(v), da, PRECISION)
        own += tl.sum(dout.to(tl.float32) * v.to(tl.float32), 1)
        state = load(states_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        dstate = load(dstates_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        old = product(dout.to(DTYPE), tl.trans(state), old, PRECISION)
        new = product(v.to(DTYPE), tl.trans(dstate), new, PRECISION)
        passing += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    da *= scale
    own *= scale
    if DOCS:
        da = tl.where(related(begin_ptr, first, T, CHUNK), da, 0.0)

    through, total = sums(gates(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE), GATE)
    if DOCS:
        old = tl.where(seen_from_start(begin_ptr, first, T, CHUNK), old, 0.0)
        new = tl.where(seen_from_end(begin_ptr, first, T, CHUNK), new, 0.0)
        last = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1)
        passing = tl.where(last < first, passing, 0.0)
    passing *= tl.exp2(total)
    ONCE: tl.constexpr = GATE == CHANNEL and not STRONG and not EXACT
    if ONCE:
        half = tl.exp2(0.5 * total)[None, :]
        new *= half
        old *= half * scale
    else:
        old *= tl.exp2(through) * scale
        new *= tl.exp2(behind(g_ptr, g_st, through, total, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT))
    if GATE == CHANNEL:
        da = rounded(da, PRECISION)
        if ONCE:
            of_q, of_k, _ = from_middle(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K)
            ds = tl.where(earlier(CHUNK), da, 0.0)
            k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
            k = rounded(k * of_k, PRECISION)
            passing += tl.sum(k * new, 0)
            to_q = tl.dot(ds, k, old, input_precision=PRECISION)
            q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
            q = rounded(q * of_q, PRECISION)
            to_k = tl.dot(tl.trans(ds), q, new, input_precision=PRECISION)
            pairs = q * to_q - k * to_k
            dq, dk = of_q * to_q, of_k * to_k
        else:
            q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
            k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
            passing += tl.sum(k * new, 0)
            dq, dk = old, new
            da = tl.where(earlier(CHUNK), da, 0.0)
            if STRONG:
                to_q, to_k, pairs = pairs_within(
                    da, q_ptr, k_ptr, g_ptr, q_ptr, q_st, k_st, g_st, 0, first, T, column,
                    K, CHUNK, BLOCK_K, PRECISION, PART, False,
                )  # fmt: skip
                pairs += q * old - k * new
                dq += to_q
                dk += to_k
            else:
                pairs = q * old - k * new
                of_q, of_k, _ = from_middle(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K)
                q, k = rounded(q * of_q, PRECISION), rounded(k * of_k, PRECISION)
                to_q = tl.dot(da, k, input_precision=PRECISION)
                to_k = tl.dot(tl.trans(da), q, input_precision=PRECISION)
                pairs += q * to_q - k * to_k
                dq += of_q * to_q
                dk += of_k * to_k
        dg = tl.cumsum(pairs, 0, reverse=True) + passing[None, :]
        store(dg_ptr + row * K, dg, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
        q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
    else:
        q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
        ds = da * decay_between(g_ptr, g_st, first, T, CHUNK, GATE)
        dq = product(ds, k, old, PRECISION)
        dk = product(tl.trans(ds), q, new, PRECISION)
        if GATE == HEAD:
            after = tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :]
            pairs = tl.cumsum(ds * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0, reverse=True)
            dg = tl.sum(tl.where(after, pairs + tl.sum(k * new, 1)[None, :], 0.0), 1)
            dg += tl.sum(tl.where(after, 0.0, tl.sum(q * old, 1)[None, :]), 1) + tl.sum(passing, 0)
            COUNT: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
            store(dg_ptr + row * COUNT, dg[:, None], first, T, tile, H * COUNT, 1, CHUNK, 1, 1)
    store(dq_ptr + row * K, dq + own[:, None] * k, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    store(dk_ptr + row * K, dk + own[:, None] * q, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
