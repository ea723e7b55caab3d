"""The products of the delta rule in Triton that need no state, all chunks at the same time.

With b the sum of the gates from the chunk's start through a token, e the sum behind it, S the state before the chunk
and dS the gradient for the state behind it, in the words of `gated_products.py`:

    m_i  = v_i - what k_i reads                           u_i = beta_i m_i is written
    r_ij = beta_j sum_k k_ik 2^(b_i - b_j) k_jk, j < i    a_ij = scale * beta_j sum_k q_ik 2^(b_i - b_j) k_jk, j <= i
    x    = (1 + r)^-1                                     m    = x (v - (k 2^b) S) = u - w S with u = x v

So m takes the place of v, and beta k that of the k that is written. Then all is gated linear attention, with k as a
second query whose output's gradient is -dv:

    out  = (scale * q 2^b) S + a m                        dv   = x^T dm with dm = (beta k 2^e) dS + a^T dout

beta multiplies scores, never keys before a product: nothing is rounded twice, and beta = 0 has its gradient. A gate a
head multiplies products too, as numbers of each token (`rates`: scale 2^b, and beta 2^e). Only with gates per channel
are (scale q 2^b) and (beta k 2^e) stored.
"""

import triton
import triton.language as tl

from ringattn.kernels.linear.triton.gated_states import (
    CHANNEL,
    HEAD,
    behind,
    gates,
    load,
    product,
    program_at,
    seen_from_end,
    seen_from_start,
    store,
    sums,
)
from ringattn.kernels.linear.triton.pairs import (
    decay_between,
    earlier,
    from_middle,
    passes_over,
    related,
    scores,
)


@triton.jit
def joined(x, c, PRECISION: tl.constexpr):
    """x - x c x: the inverses of two halves, with what lies below the diagonal between them."""
    zero = tl.zeros(x.shape, tl.float32)
    return x - product(product(x, c, zero, PRECISION), x, zero, PRECISION)


@triton.jit
def inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)^-1 of a matrix that is 0 on the diagonal and above.

    The inverses of blocks of 2, 4, 8, ... tokens in turn: of two halves with inverses x and z, and c below the diagonal
    between them, it is x, z and -z c x. One product serves all blocks of one size. Up to 16 tokens the blocks on the
    diagonal are multiplied by themselves, as a batch of matrices, and then put back in their place.
    """
    SMALL: tl.constexpr = 16
    BLOCKS: tl.constexpr = SIZE // SMALL
    n = tl.arange(0, BLOCKS)
    same = n[:, None, None, None] == n[None, None, :, None]
    small = tl.sum(tl.where(same, tl.reshape(lower, [BLOCKS, SMALL, BLOCKS, SMALL]), 0.0), 2)
    t = tl.arange(0, SMALL)
    apart = (t[:, None] ^ t[None, :])[None]  # its highest bit is the size of the halves that i and j lie in
    x = tl.where(apart == 0, 1.0, tl.where(apart == 1, -small, 0.0))
    for level in tl.static_range(1, 4):
        x = joined(x, tl.where((apart >> level) == 1, small, 0.0), PRECISION)
    x = tl.broadcast_to(x[:, :, None, :], [BLOCKS, SMALL, BLOCKS, SMALL])
    whole = tl.reshape(tl.where(same, x, 0.0), [SIZE, SIZE])
    i = tl.arange(0, SIZE)
    between = i[:, None] ^ i[None, :]
    for level in tl.range(4, SIZE.bit_length() - 1, num_stages=1):
        whole = joined(whole, tl.where((between >> level) == 1, lower, 0.0), PRECISION)
    return whole


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
def gentle_scores(
    q_ptr, k_ptr, g_ptr, begin_ptr, q_st, k_st, g_st, first, T,
    K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr, DOCS: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`gated_products.scores` of q with k and of k with k for j <= i, and the strongest decay of a channel.

    What both take of k and of the gates is loaded and computed once.
    """
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    r = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    strongest = tl.zeros([BLOCK_K], tl.float32)
    for column in tl.range(0, K, BLOCK_K):
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
        q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K)
        reader = k
        if GATE == CHANNEL:
            own += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
            of_q, of_k, total = from_middle(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K)
            strongest = tl.minimum(strongest, total)
            q, reader, k = q.to(tl.float32) * of_q, k.to(tl.float32) * of_q, k.to(tl.float32) * of_k
        a = product(q, tl.trans(k), a, PRECISION)
        r = product(reader, tl.trans(k), r, PRECISION)
    i = tl.arange(0, CHUNK)
    seen = earlier(CHUNK)
    if DOCS:
        seen = seen & related(begin_ptr, first, T, CHUNK)
    same = i[:, None] == i[None, :]
    own_a, own_r = tl.where(same, a, 0.0), tl.where(same, r, 0.0)
    if GATE == CHANNEL:
        own_a = tl.where(same, own[:, None], 0.0)
    elif GATE == HEAD:
        decay = decay_between(g_ptr, g_st, first, T, CHUNK, GATE, EXACT)
        a, r = a * decay, r * decay
    return tl.where(seen, a, own_a), tl.where(seen, r, own_r), tl.min(strongest, 0)


@triton.jit(do_not_specialize=["T", "N"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, begin_ptr,
    beta_ptr, strongest_ptr, a_ptr, x_ptr, w_ptr, u_ptr, reader_ptr, kept_ptr, rates_ptr, across_ptr, bound_ptr,
    q_st, k_st, v_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr, CAREFUL: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """What one chunk of one head is, apart from its state: a, with INVERSE x, w, u = x v, and its decays.

    Programs: one for each head, chunk and batch row. With gates per channel there are two launches. The gentle one
    stores the strongest decay of each chunk; the strong one repeats those chunks, and leaves the others.

    1. The scores of q with k, a, and of k with k, whose inverse is x.
    2. Decays: `across`, that of the chunk as a factor, and with a gate a head the `rates` of the tokens. `bound` limits
       the norm of the chunk's factor, as a log in base 2: the gates shrink a state, and 1 - beta k k^T stretches it by
       beta |k|^2 - 1 at most, if that is above 1.
    3. A loop over tiles of BLOCK_K key channels: w = x (k 2^b). With gates per channel, also `reader` = scale q 2^b and
       `kept` = beta k 2^e. A gate a head multiplies the columns of x instead.
    4. A loop over tiles of BLOCK_V value channels: u.
    """
    _, h, n, b = program_at(tl.program_id(0), 1, H, N)
    chunk = (b * N + n) * H + h
    if STRONG:  # noqa: SIM102
        if passes_over(strongest_ptr, chunk, 1, STRONG):
            return
    first = n * CHUNK
    q_ptr += b * q_st[0] + h // GROUP * q_st[2]
    k_ptr += b * k_st[0] + h // GROUP * k_st[2]
    v_ptr += b * v_st[0] + h * v_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    row = b * T * H + h
    i = tl.arange(0, CHUNK)
    beta = tl.load(beta_ptr + row + (first + i) * H, mask=first + i < T, other=0.0).to(tl.float32)
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
    norm = tl.sum(tl.where(i[:, None] == i[None, :], r, 0.0), 1)
    x = inverse(tl.where(earlier(CHUNK), r * beta[None, :], 0.0), CHUNK, CAREFUL)
    if INVERSE:
        store(x_ptr + chunk * (CHUNK * CHUNK), x, 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)

    seen_start = tl.full([CHUNK, 1], True, tl.int1)
    seen_end = seen_start
    passes = True
    if DOCS:
        seen_start = seen_from_start(begin_ptr, first, T, CHUNK)
        seen_end = seen_from_end(begin_ptr, first, T, CHUNK)
        passes = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1) < first
    of_k = x.to(DTYPE)
    decay = tl.full([CHUNK], float("-inf"), tl.float32)
    if GATE != CHANNEL:
        decay = tl.reshape(gates(g_ptr, g_st, first, T, 0, CHUNK, K, 1, GATE), [CHUNK])
        through, e, total = decays(g_ptr, g_st, first, T, 0, CHUNK, K, 1, GATE, EXACT)
        from_start = tl.reshape(tl.where(seen_start, tl.exp2(through), 0.0), [CHUNK])
        to_end = tl.reshape(tl.where(seen_end, tl.exp2(e), 0.0), [CHUNK])
        tl.store(rates_ptr + chunk * (2 * CHUNK) + i, from_start * scale)
        tl.store(rates_ptr + chunk * (2 * CHUNK) + CHUNK + i, to_end * beta)
        tl.store(across_ptr + chunk + tl.arange(0, 1), tl.where(passes, tl.exp2(total), 0.0))
        of_k = (x * from_start[None, :]).to(DTYPE)
    for column in tl.range(0, K, BLOCK_K):
        k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
        if GATE == CHANNEL:
            through, e, total = decays(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT)
            channels = column + tl.arange(0, BLOCK_K)
            tl.store(across_ptr + chunk * K + channels, tl.where(passes, tl.exp2(total), 0.0), mask=channels < K)
            decay = tl.maximum(decay, tl.max(gates(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE), 1))
            k = k.to(tl.float32)
            kept = k * tl.where(seen_end, tl.exp2(e) * beta[:, None], 0.0)
            store(kept_ptr + row * K, kept, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
            from_start = tl.where(seen_start, tl.exp2(through), 0.0)
            q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
            store(reader_ptr + row * K, q * (from_start * scale), first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
            k = k * from_start
        w = product(of_k, k.to(DTYPE), tl.zeros([CHUNK, BLOCK_K], tl.float32), PRECISION)
        store(w_ptr + row * K, w, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    bound = tl.sum(decay + tl.log2(tl.maximum(beta * norm - 1.0, 1.0)), 0)
    tl.store(bound_ptr + chunk, tl.where(passes, bound, float("-inf")))
    of_v = x.to(DTYPE)
    for column_v in tl.range(0, V, BLOCK_V):
        v = load(v_ptr, first, T, column_v, v_st[1], v_st[3], CHUNK, V, BLOCK_V)
        u = product(of_v, v.to(DTYPE), tl.zeros([CHUNK, BLOCK_V], tl.float32), PRECISION)
        store(u_ptr + row * V, u, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
