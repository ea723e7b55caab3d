"""The gradients of the delta rule in Triton, all chunks at the same time, in the words of `delta_products.py`.

Given are the states S before the chunks and the gradients dS for the states behind them, both as [V, K], and dv. In two
kernels, because the gradients of the scores are the same for all key channels:

    pairs_kernel        m = u - w S, and what it makes of the scores: da = scale dout m^T, dr = -dv m^T
    gradients_kernel    dq, dk, dg and dbeta: by way of the states, and of da and dr
"""

import triton
import triton.language as tl

from ringattn.kernels.linear.triton.delta_products import decays
from ringattn.kernels.linear.triton.gated_states import (
    CHANNEL,
    HEAD,
    NO_GATE,
    load,
    product,
    program_at,
    rounded,
    seen_from_end,
    seen_from_start,
    store,
)
from ringattn.kernels.linear.triton.pairs import decay_between, earlier, pairs_within, passes_over, related


@triton.jit(do_not_specialize=["T", "N"])
def pairs_kernel(
    q_ptr, k_ptr, dout_ptr, g_ptr, begin_ptr,
    beta_ptr, w_ptr, m_ptr, dv_ptr, states_ptr, da_ptr, dr_ptr, own_ptr, dg_ptr,
    q_st, k_st, dout_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """m of a chunk, in the place of u, and the gradients of its scores, da and dr; `own` is da's diagonal.

    Programs: one for each head, chunk and batch row. The loop over tiles of BLOCK_V value channels holds one over tiles
    of BLOCK_K key channels, which adds up w S. Without gates per channel da and dr are multiplied by the decay between
    the tokens, and a gate's gradient by the pairs within the chunk is the last of the PARTS of dg.
    """
    _, h, n, b = program_at(tl.program_id(0), 1, H, N)
    chunk = (b * N + n) * H + h
    first = n * CHUNK
    row = b * T * H + h
    dout_ptr += b * dout_st[0] + h * dout_st[2]
    da = tl.zeros([CHUNK, CHUNK], tl.float32)
    dr = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = tl.zeros([CHUNK], tl.float32)
    for column_v in tl.range(0, V, BLOCK_V):
        read = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for column in tl.range(0, K, BLOCK_K):
            w = load(w_ptr + row * K, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
            state = load(states_ptr + chunk * (K * V), column_v, V, column, K, 1, BLOCK_V, K, BLOCK_K)
            read = product(w, tl.trans(state.to(DTYPE)), read, PRECISION)
        m = load(m_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V).to(tl.float32) - read
        m = m.to(DTYPE)
        store(m_ptr + row * V, m, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
        dout = load(dout_ptr, first, T, column_v, dout_st[1], dout_st[3], CHUNK, V, BLOCK_V).to(DTYPE)
        dv = load(dv_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
        da = product(dout, tl.trans(m), da, PRECISION)
        dr = product(dv, tl.trans(m), dr, PRECISION)
        own += tl.sum(dout.to(tl.float32) * m.to(tl.float32), 1)
    i = tl.arange(0, CHUNK)
    tl.store(own_ptr + chunk * CHUNK + i, own * scale)
    seen = earlier(CHUNK)
    if DOCS:
        seen = seen & related(begin_ptr + b * begin_st, first, T, CHUNK)
    da = tl.where(seen, da * scale, 0.0)
    dr = tl.where(seen, -dr, 0.0)
    if GATE != CHANNEL:
        g_ptr += b * g_st[0] + h * g_st[2]
        decay = decay_between(g_ptr, g_st, first, T, CHUNK, GATE, EXACT)
        da *= decay
        dr *= decay
    at = chunk * (CHUNK * CHUNK)
    store(da_ptr + at, rounded(da, PRECISION), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    store(dr_ptr + at, rounded(dr, PRECISION), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    if GATE == HEAD:
        q_ptr += b * q_st[0] + h // GROUP * q_st[2]
        k_ptr += b * k_st[0] + h // GROUP * k_st[2]
        of_q = tl.zeros([CHUNK, CHUNK], tl.float32)
        of_k = tl.zeros([CHUNK, CHUNK], tl.float32)
        for column in tl.range(0, K, BLOCK_K):
            q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K)
            k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
            of_q = product(q, tl.trans(k), of_q, PRECISION)
            of_k = product(k, tl.trans(k), of_k, PRECISION)
        beta = tl.load(beta_ptr + row + (first + i) * H, mask=first + i < T, other=0.0).to(tl.float32)
        pairs = (da * of_q + dr * of_k) * beta[None, :]
        if EXACT:
            dg = tl.sum(tl.where(earlier(CHUNK), tl.cumsum(pairs, 0, reverse=True), 0.0), 1)
        else:  # a pair j < t <= i is in the suffix sums of its row, but not of its column
            dg = tl.cumsum(tl.sum(pairs, 1) - tl.sum(pairs, 0), 0, reverse=True)
        store(dg_ptr + row * PARTS, dg[:, None], first, T, PARTS - 1, H * PARTS, 1, CHUNK, 1, 1)


@triton.jit(do_not_specialize=["T", "N"])
def gradients_kernel(
    q_ptr, k_ptr, dout_ptr, g_ptr, begin_ptr,
    beta_ptr, strongest_ptr, m_ptr, dv_ptr, states_ptr, dstates_ptr, da_ptr, dr_ptr, own_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    q_st, k_st, dout_st, g_st, begin_st, T, N, H, scale,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, STRONG: tl.constexpr, EVERY: tl.constexpr, PARTS: tl.constexpr,
    PARTS_G: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_K channels of a chunk's dq, dk, dg and dbeta.

    Programs: one for each tile of key channels, head, chunk and batch row. With gates per channel there are two
    launches, or for float32 only the strong one, for EVERY chunk. dbeta is [B, T, H, PARTS], to be summed, and so is dg
    with PARTS_G, unless it is [B, T, H, K].

    1. A loop over tiles of BLOCK_V value channels adds up, for q as the reader, old = dout S^T; for k, old_k = -dv S^T;
       for what is written, new = m dS^T; and passing = rowsum(S dS), what goes through the chunk from state to state.
    2. Decays are multiplied into them, and document borders masked.
    3. The pairs within the chunk add to the gradients of q, of k as a reader, and of beta k, which is written. With
       gates per channel as in gated_products.py, by their factors from the chunk's middle, or in strong chunks by
       `pairs_within`; otherwise da and dr have their decays already.
    4. dg, for gates per channel: the suffix sums of q dq + k dk_reader - (beta k) dw, plus what passes the chunk.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, h, n, b = program_at(tl.program_id(0), TILES, H, N)
    chunk = (b * N + n) * H + h
    if GATE == CHANNEL and not EVERY:  # noqa: SIM102
        if passes_over(strongest_ptr, chunk, 1, STRONG):
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
    own = tl.load(own_ptr + chunk * CHUNK + i)
    old = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    old_k = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    new = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    passing = tl.zeros([BLOCK_K], tl.float32)
    for column_v in tl.range(0, V, BLOCK_V):
        m = load(m_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
        dv = load(dv_ptr + row * V, first, T, column_v, H * V, 1, CHUNK, V, BLOCK_V)
        dout = load(dout_ptr, first, T, column_v, dout_st[1], dout_st[3], CHUNK, V, BLOCK_V).to(DTYPE)
        state = load(states_ptr + chunk * (K * V), column_v, V, column, K, 1, BLOCK_V, K, BLOCK_K).to(DTYPE)
        dstate = load(dstates_ptr + chunk * (K * V), column_v, V, column, K, 1, BLOCK_V, K, BLOCK_K)
        old = product(dout, state, old, PRECISION)
        old_k = product(dv, state, old_k, PRECISION)
        new = product(m, dstate, new, PRECISION)
        if GATE != NO_GATE:
            passing += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)

    through, e, total = decays(g_ptr, g_st, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT)
    from_start, to_end = tl.exp2(through), tl.exp2(e)
    if DOCS:
        from_start = tl.where(seen_from_start(begin_ptr, first, T, CHUNK), from_start, 0.0)
        to_end = tl.where(seen_from_end(begin_ptr, first, T, CHUNK), to_end, 0.0)
        last = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1)
        passing = tl.where(last < first, passing, 0.0)
    passing *= tl.exp2(total)
    old *= from_start * scale
    old_k *= -from_start
    new *= to_end
    q = load(q_ptr, first, T, column, q_st[1], q_st[3], CHUNK, K, BLOCK_K)
    k = load(k_ptr, first, T, column, k_st[1], k_st[3], CHUNK, K, BLOCK_K)
    da = load(da_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
    dr = load(dr_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
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
        old, old_k, new = old + to_q, old_k + to_k, new + to_w
    else:
        if GATE == HEAD:
            written = tl.sum(k.to(tl.float32) * new, 1) * beta
            read = tl.sum(q.to(tl.float32) * old + k.to(tl.float32) * old_k, 1)
            if EXACT:
                dg = tl.sum(tl.where(earlier(CHUNK), written[None, :], read[None, :]), 1)
            else:
                dg = tl.cumsum(read - written, 0, reverse=True) + tl.sum(written, 0)
            dg += tl.sum(passing, 0)
            store(dg_ptr + row * PARTS_G, dg[:, None], first, T, tile, H * PARTS_G, 1, CHUNK, 1, 1)
        new = product(tl.trans(da), q.to(DTYPE), new, PRECISION)
        new = product(tl.trans(dr), k.to(DTYPE), new, PRECISION)
        old = product((da.to(tl.float32) * beta[None, :]).to(DTYPE), k.to(DTYPE), old, PRECISION)
        old_k = product((dr.to(tl.float32) * beta[None, :]).to(DTYPE), k.to(DTYPE), old_k, PRECISION)
    q, k = q.to(tl.float32), k.to(tl.float32)
    dw = new + own[:, None] * q
    dq = old + (own * beta)[:, None] * k
    dk = old_k + beta[:, None] * dw
    store(dq_ptr + row * K, dq, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    store(dk_ptr + row * K, dk, first, T, column, H * K, 1, CHUNK, K, BLOCK_K)
    dbeta = tl.sum(k * dw, 1)
    store(dbeta_ptr + row * PARTS, dbeta[:, None], first, T, tile, H * PARTS, 1, CHUNK, 1, 1)
