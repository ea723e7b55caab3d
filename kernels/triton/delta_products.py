"""The products of the delta rule in Triton: what needs no other chunk, all chunks at the same time.

With b the sum of the gates from the chunk's start through a token, e the sum behind it, S the state before the chunk
and dS the gradient for the state behind it, in the words of `linear_products.py`:

    m_i  = v_i - what k_i reads                           u_i = beta_i m_i is written
    r_ij = beta_j sum_k k_ik 2^(b_i - b_j) k_jk, j < i    a_ij = scale * beta_j sum_k q_ik 2^(b_i - b_j) k_jk, j <= i
    x    = (1 + r)^-1                                     m    = x (v - (k 2^b) S) = x v - w S

So m takes the place of v, and beta k that of the k that is written. Then all is gated linear attention, with k as a
second query whose output's gradient is -dv:

    out  = (scale * q 2^b) S + a m                        dv   = x^T ((beta k 2^e) dS + a^T dout)

A chunk's states are linear in the state before it, w = x (k 2^b), and likewise those of gradients in the gradient for
the state behind it: y = scale * q 2^b - a w is what dout adds to them.

beta multiplies scores, never keys before a product: nothing is rounded twice, and beta = 0 has its gradient.
"""

import triton
import triton.language as tl

from ringattn.kernels.triton.linear_products import (
    GENTLE,
    decay_between,
    earlier,
    from_middle,
    pairs_within,
    related,
    scores,
)
from ringattn.kernels.triton.linear_states import (
    CHANNEL,
    HEAD,
    behind,
    gates,
    load,
    place,
    product,
    rounded,
    seen_from_end,
    seen_from_start,
    store,
    sums,
)


@triton.jit
def careful(x, y, PRECISION: tl.constexpr):
    """x y in float32; with PRECISION "bf16x3" from products of bfloat16, to about 16 bits."""
    if PRECISION == "bf16x3":
        x_high, y_high = x.to(tl.bfloat16), y.to(tl.bfloat16)
        x_low, y_low = (x - x_high.to(tl.float32)).to(tl.bfloat16), (y - y_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    else:
        return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)^-1 of a matrix that is 0 on the diagonal and above.

    The inverses of blocks of 2, 4, 8, ... tokens in turn: of two halves with inverses x and z, and c below the diagonal
    between them, it is x, z and -z c x. One product serves all blocks of one size.
    """
    i = tl.arange(0, SIZE)
    apart = i[:, None] ^ i[None, :]  # its highest bit is the size of the halves that i and j lie in
    x = tl.where(apart == 0, 1.0, tl.where(apart == 1, -lower, 0.0))
    for level in tl.range(1, SIZE.bit_length() - 1, num_stages=1):
        c = tl.where((apart >> level) == 1, lower, 0.0)
        x -= careful(careful(x, c, PRECISION), x, PRECISION)
    return x


@triton.jit
def decays(
    g_ptr, g_st, first, T, column, CHUNK: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The sums of the gates (from the chunk's start through each token, behind each token, over the whole chunk)."""
    g = gates(g_ptr, g_st, first, T, column, CHUNK, K, WIDTH, GATE)
    if GATE == HEAD and not EXACT:
        total = tl.sum(g, 0)
        through = tl.cumsum(tl.reshape(g, [CHUNK]), 0)[:, None]
        return through, total[None, :] - through, total
    else:
        through, total = sums(g, GATE)
        return through, behind(g_ptr, g_st, through, total, first, T, column, CHUNK, K, WIDTH, GATE, EXACT), total


@triton.jit
def passes_over(strongest_ptr, chunk, STRONG: tl.constexpr, EVERY: tl.constexpr):
    """Whether the other launch computes this chunk: one takes the strong ones (or EVERY one), the other the gentle."""
    if EVERY:
        return False
    return (tl.load(strongest_ptr + chunk) < -GENTLE) != STRONG


@triton.jit
def gentle_scores(
    q_ptr, k_ptr, g_ptr, begin_ptr, q_st, k_st, g_st, first, T,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, DOCS: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`linear_products.scores` of q with k for j <= i and of k with k for j < i, and the strongest decay of a channel.

    What both take of k and of the gates is loaded and computed once.
    """
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    r = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    strongest = tl.zeros([BLOCK_K], tl.float32)
    for column in tl.range(0, K, BLOCK_K):
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
        q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K)
        own += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        reader = k
        if GATE == CHANNEL:
            of_q, of_k, total = from_middle(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K)
            strongest = tl.minimum(strongest, total)
            q, reader, k = q.to(tl.float32) * of_q, k.to(tl.float32) * of_q, k.to(tl.float32) * of_k
        a = product(q, tl.trans(k), a, PRECISION)
        r = product(reader, tl.trans(k), r, PRECISION)
    seen = earlier(CHUNK)
    if DOCS:
        seen = seen & related(begin_ptr, first, T, CHUNK)
    if GATE == HEAD:
        decay = decay_between(g_ptr, g_st, first, T, CHUNK, GATE, EXACT)
        a, r = a * decay, r * decay
    i = tl.arange(0, CHUNK)
    a = tl.where(seen, a, tl.where(i[:, None] == i[None, :], own[:, None], 0.0))
    return a, tl.where(seen, r, 0.0), tl.min(strongest, 0)


@triton.jit(do_not_specialize=["T", "N"])
def solve_kernel(
    q_ptr, k_ptr, g_ptr, begin_ptr, beta_ptr, strongest_ptr, a_ptr, x_ptr,
    q_st, k_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """a and x of one chunk of one head: the scores of q with k, and the inverse of those of k with k.

    Programs: one for each head, chunk and batch row. With gates per channel there are two launches. The gentle one
    stores the strongest decay of each chunk; the strong one repeats those chunks, and leaves the others.
    """
    _, h, n, b = place(tl.program_id(0), 1, H, N)
    chunk = (b * N + n) * H + h
    if STRONG:  # noqa: SIM102
        if passes_over(strongest_ptr, chunk, STRONG, False):
            return
    first = n * CHUNK
    q_ptr += b * q_st[0] + h // GROUP * q_st[2]
    k_ptr += b * k_st[0] + h // GROUP * k_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    i = tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + (b * T + first + i) * H + h, mask=first + i < T, other=0.0).to(tl.float32)
    if STRONG:
        a, _ = scores(
            q_ptr, k_ptr, g_ptr, begin_ptr, q_st, k_st, g_st, first, T,
            K, CHUNK, BLOCK_K, GATE, DOCS, PRECISION, PART, STRONG,
        )  # fmt: skip
        r, _ = scores(
            k_ptr, k_ptr, g_ptr, begin_ptr, k_st, k_st, g_st, first, T,
            K, CHUNK, BLOCK_K, GATE, DOCS, PRECISION, PART, STRONG,
        )  # fmt: skip
    else:
        a, r, strongest = gentle_scores(
            q_ptr, k_ptr, g_ptr, begin_ptr, q_st, k_st, g_st, first, T, K, CHUNK, BLOCK_K, GATE, DOCS, EXACT, PRECISION
        )  # fmt: skip
        if GATE == CHANNEL:
            tl.store(strongest_ptr + chunk, strongest)
    a *= (beta * scale)[None, :]
    store(a_ptr + chunk * (CHUNK * CHUNK), a, 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    x = inverse(tl.where(earlier(CHUNK), r * beta[None, :], 0.0), CHUNK, CAREFUL)
    store(x_ptr + chunk * (CHUNK * CHUNK), x, 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)


@triton.jit(do_not_specialize=["T", "N"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, begin_ptr, beta_ptr, a_ptr, x_ptr, w_ptr, u_ptr, y_ptr, kept_ptr, across_ptr,
    q_st, k_st, v_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """What one chunk of one head is, apart from its state: w, kept, across, u = x v, and with GRADIENTS y.

    Programs: one for each head, chunk and batch row. The first loop is over tiles of BLOCK_K key channels: w, kept, y,
    and across, the decay of each channel as a factor; the second one over tiles of BLOCK_V value channels: u.
    """
    _, h, n, b = place(tl.program_id(0), 1, H, N)
    chunk = (b * N + n) * H + h
    first = n * CHUNK
    q_ptr += b * q_st[0] + h // GROUP * q_st[2]
    k_ptr += b * k_st[0] + h // GROUP * k_st[2]
    v_ptr += b * v_st[0] + h * v_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    row = b * T * H + h
    i = tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + row + (first + i) * H, mask=first + i < T, other=0.0).to(tl.float32)
    x = load(x_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    for column in tl.range(0, K, BLOCK_K):
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
        through, e, total = decays(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT)
        from_start = tl.exp2(through)
        kept = k * (tl.exp2(e) * beta[:, None])
        if DOCS:
            from_start = tl.where(seen_from_start(begin_ptr, first, T, CHUNK), from_start, 0.0)
            kept = tl.where(seen_from_end(begin_ptr, first, T, CHUNK), kept, 0.0)
            last = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1)
            total = tl.where(last < first, total, float("-inf"))
        store(kept_ptr + row * K, kept, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
        if GATE == CHANNEL:
            channels = column + tl.arange(0, BLOCK_K)
            tl.store(across_ptr + chunk * K + channels, tl.exp2(total), mask=channels < K)
        elif column == 0:
            tl.store(across_ptr + chunk + tl.arange(0, 1), tl.exp2(total))
        w = product(x, (k * from_start).to(DTYPE), tl.zeros([CHUNK, BLOCK_K], tl.float32), PRECISION).to(DTYPE)
        store(w_ptr + row * K, w, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
        if GRADIENTS:
            a = load(a_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
            q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
            y = q * (from_start * scale) - product(a, w, tl.zeros([CHUNK, BLOCK_K], tl.float32), PRECISION)
            store(y_ptr + row * K, y, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    for column_v in tl.range(0, V, BLOCK_V):
        v = load(v_ptr, first, T, column_v, v_st[1], v_st[3], CHUNK, V, BLOCK_V)
        u = product(x, v.to(DTYPE), tl.zeros([CHUNK, BLOCK_V], tl.float32), PRECISION)
        store(u_ptr + row * V, u, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)


@triton.jit(do_not_specialize=["T", "N"])
def values_kernel(
    dout_ptr, a_ptr, x_ptr, w_ptr, u_ptr, kept_ptr, states_ptr, dstates_ptr, dv_ptr, dout_st, T, N, H,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk's m = u - w S, in the place of u, and of its dv = x^T (kept dS + a^T dout).

    Programs: one for each tile of BLOCK_V value channels, head, chunk and batch row. The loop over tiles of BLOCK_K key
    channels adds up w S and kept dS.
    """
    tile, h, n, b = place(tl.program_id(0), (V + BLOCK_V - 1) // BLOCK_V, H, N)
    column_v = tile * BLOCK_V
    first = n * CHUNK
    chunk = (b * N + n) * H + h
    row = b * T * H + h
    read = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    dm = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for column in tl.range(0, K, BLOCK_K):
        w = load(w_ptr + row * K, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
        state = load(states_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        read = product(w, state.to(DTYPE), read, PRECISION)
        kept = load(kept_ptr + row * K, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
        dstate = load(dstates_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        dm = product(kept, dstate, dm, PRECISION)
    m = load(u_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V).to(tl.float32) - read
    store(u_ptr + row * V, m, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
    dout_ptr += b * dout_st[0] + h * dout_st[2]
    dout = load(dout_ptr, first, T, column_v, dout_st[1], dout_st[3], CHUNK, V, BLOCK_V)
    a = load(a_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    dm = product(tl.trans(a), dout.to(DTYPE), dm, PRECISION)
    x = load(x_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    dv = product(tl.trans(x), dm.to(DTYPE), tl.zeros([CHUNK, BLOCK_V], tl.float32), PRECISION)
    store(dv_ptr + row * V, dv, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)


@triton.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q_ptr, k_ptr, dout_ptr, g_ptr, begin_ptr,
    beta_ptr, strongest_ptr, m_ptr, dv_ptr, states_ptr, dstates_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    q_st, k_st, dout_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr, EVERY: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_K channels of a chunk's dq, dk, dg and dbeta.

    Programs: one for each tile of key channels, head, chunk and batch row. With gates per channel there are two
    launches, or for float32 only the strong one, for EVERY chunk. dbeta is [B, T, H, PARTS], to be summed, and so is dg
    unless it is [B, T, H, K].

    1. A loop over tiles of BLOCK_V value channels adds up, for q as the reader, da = dout m^T (`own` is its diagonal,
       in float32) and old = dout S^T; for k, dr = -dv m^T and old_k = -dv S^T; for what is written, new = m dS^T; and
       passing = rowsum(S dS), what goes through the chunk from state to state.
    2. Document borders are masked, and decays multiplied into old, old_k, new and passing.
    3. The pairs within the chunk add `to_q`, `to_k` and `to_w`: to the gradients of q, of k as a reader, and of beta k,
       which is written. For gates as in linear_products.py: of channels by their factors from the chunk's middle, or
       in strong chunks by `pairs_within`.
    4. dg, for gates per channel: the suffix sums of q dq + k dk_reader - (beta k) dw, plus what passes the chunk.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, h, n, b = place(tl.program_id(0), TILES, H, N)
    chunk = (b * N + n) * H + h
    if GATE == CHANNEL:  # noqa: SIM102
        if passes_over(strongest_ptr, chunk, STRONG, EVERY):
            return
    column = tile * BLOCK_K
    first = n * CHUNK
    q_ptr += b * q_st[0] + h // GROUP * q_st[2]
    k_ptr += b * k_st[0] + h // GROUP * k_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    row = b * T * H + h
    dout_ptr += b * dout_st[0] + h * dout_st[2]
    i = tl.arange(0, CHUNK)
    beta_ptr += row
    beta = tl.load(beta_ptr + (first + i) * H, mask=first + i < T, other=0.0).to(tl.float32)
    da = tl.zeros([CHUNK, CHUNK], tl.float32)
    dr = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    old = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    old_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    new = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    passing = tl.zeros([BLOCK_K], tl.float32)
    for column_v in tl.range(0, V, BLOCK_V):
        m = load(m_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
        dv = load(dv_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
        dout = load(dout_ptr, first, T, column_v, dout_st[1], dout_st[3], CHUNK, V, BLOCK_V).to(DTYPE)
        state = load(states_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V).to(DTYPE)
        dstate = load(dstates_ptr + chunk * (K * V), column, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        da = product(dout, tl.trans(m), da, PRECISION)
        dr = product(dv, tl.trans(m), dr, PRECISION)
        own += tl.sum(dout.to(tl.float32) * m.to(tl.float32), 1)
        old = product(dout, tl.trans(state), old, PRECISION)
        old_k = product(dv, tl.trans(state), old_k, PRECISION)
        new = product(m, tl.trans(dstate), new, PRECISION)
        passing += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    own *= scale
    seen = earlier(CHUNK)
    if DOCS:
        seen = seen & related(begin_ptr, first, T, CHUNK)
    da = tl.where(seen, da * scale, 0.0)
    dr = tl.where(seen, -dr, 0.0)

    through, e, total = decays(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT)
    if DOCS:
        from_start = seen_from_start(begin_ptr, first, T, CHUNK)
        old = tl.where(from_start, old, 0.0)
        old_k = tl.where(from_start, old_k, 0.0)
        new = tl.where(seen_from_end(begin_ptr, first, T, CHUNK), new, 0.0)
        last = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1)
        passing = tl.where(last < first, passing, 0.0)
    passing *= tl.exp2(total)
    old *= tl.exp2(through) * scale
    old_k *= -tl.exp2(through)
    new *= tl.exp2(e)
    q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K)
    k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
    if GATE == CHANNEL:
        passing += tl.sum(k.to(tl.float32) * beta[:, None] * new, 0)
        pairs = q.to(tl.float32) * old + k.to(tl.float32) * (old_k - beta[:, None] * new)
        if STRONG:
            to_q, to_w, more = pairs_within(
                da, q_ptr, k_ptr, g_ptr, beta_ptr, q_st, k_st, g_st, H, first, T, column,
                K, CHUNK, BLOCK_K, PRECISION, PART, True,
            )  # fmt: skip
            pairs += more
            to_k, to_w_of_k, more = pairs_within(
                dr, k_ptr, k_ptr, g_ptr, beta_ptr, k_st, k_st, g_st, H, first, T, column,
                K, CHUNK, BLOCK_K, PRECISION, PART, True,
            )  # fmt: skip
            pairs += more
            to_w += to_w_of_k
        else:
            of_q, of_k = tl.exp2(through - 0.5 * total[None, :]), tl.exp2(0.5 * total[None, :] - through)
            da, dr = rounded(da, PRECISION), rounded(dr, PRECISION)
            written = rounded(k.to(tl.float32) * of_k * beta[:, None], PRECISION)
            to_q = tl.dot(da, written, input_precision=PRECISION)
            to_k = tl.dot(dr, written, input_precision=PRECISION)
            reader = rounded(q.to(tl.float32) * of_q, PRECISION)
            pairs += reader * to_q
            to_w = tl.dot(tl.trans(da), reader, input_precision=PRECISION)
            reader = rounded(k.to(tl.float32) * of_q, PRECISION)
            pairs += reader * to_k
            to_w = tl.dot(tl.trans(dr), reader, to_w, input_precision=PRECISION)
            pairs -= written * to_w
            to_q *= of_q
            to_k *= of_q
            to_w *= of_k
        dg = tl.cumsum(pairs, 0, reverse=True) + passing[None, :]
        store(dg_ptr + row * K, dg, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    else:
        decay = decay_between(g_ptr, g_st, first, T, CHUNK, GATE, EXACT)
        da *= decay
        dr *= decay
        if GATE == HEAD:
            of_q = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            of_k = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            pairs = (da * of_q + dr * of_k) * beta[None, :]
            written = tl.sum(k.to(tl.float32) * new, 1) * beta
            read = tl.sum(q.to(tl.float32) * old + k.to(tl.float32) * old_k, 1)
            if EXACT:
                pairs = tl.cumsum(pairs, 0, reverse=True)
                dg = tl.sum(tl.where(earlier(CHUNK), pairs + written[None, :], read[None, :]), 1)
            else:  # a pair j < t <= i is in the suffix sums of its row, but not of its column
                dg = tl.cumsum(tl.sum(pairs, 1) - tl.sum(pairs, 0) + read - written, 0, reverse=True) + tl.sum(
                    written, 0
                )
            dg += tl.sum(passing, 0)
            store(dg_ptr + row * PARTS, dg[:, None], first, T, tile, H * PARTS, 1, CHUNK, 1, 1)
        weights_q = (da * beta[None, :]).to(DTYPE)
        weights_k = (dr * beta[None, :]).to(DTYPE)
        zero = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        to_q = product(weights_q, k.to(DTYPE), zero, PRECISION)
        to_k = product(weights_k, k.to(DTYPE), zero, PRECISION)
        to_w = product(tl.trans(da.to(DTYPE)), q.to(DTYPE), zero, PRECISION)
        to_w = product(tl.trans(dr.to(DTYPE)), k.to(DTYPE), to_w, PRECISION)
    q, k = q.to(tl.float32), k.to(tl.float32)
    dw = new + to_w + own[:, None] * q
    dq = old + to_q + (own * beta)[:, None] * k
    dk = old_k + to_k + beta[:, None] * dw
    store(dq_ptr + row * K, dq, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    store(dk_ptr + row * K, dk, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    dbeta = tl.sum(k * dw, 1)
    store(dbeta_ptr + row * PARTS, dbeta[:, None], first, T, tile, H * PARTS, 1, CHUNK, 1, 1)
