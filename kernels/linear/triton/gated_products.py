"""The products of gated linear attention in Triton: outputs and gradients, all chunks at the same time.

Given are the state before each chunk, h, and the gradient for the state behind it, dh. With b the sum of the gates from
the chunk's start through a token, and e the sum of the gates behind it in the chunk:

    a_ij = scale * sum_k q_ik 2^(b_i - b_j) k_jk  for j <= i        da = scale * dout v^T, likewise
    out  = (scale * q 2^b) h + a v                                  dv = (k 2^e) dh + a^T dout
    dq   = scale * 2^b (dout h^T) + sum_j da_ij 2^(b_i - b_j) k_j   dk = 2^e (v dh^T) + sum_i da_ij 2^(b_i - b_j) q_i
    dg_t = what the pairs j < t <= i add to q dq, summed = sum over i >= t of (q dq - k dk) + sum_v (h dh)(behind)

`pairs.py` has what concerns two tokens of a chunk: the decay between them, a_ij, and their gradients. There are two
launches of a kernel: for gentle chunks, and for those with strong decays.
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
    rounded,
    seen_from_end,
    seen_from_start,
    store,
    sums,
)
from ringattn.kernels.linear.triton.pairs import (
    decay_between,
    earlier,
    from_middle,
    pairs_within,
    passes_over,
    related,
    scores,
)


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
       - Gentle (SHARED, for 16 bits): old and new take only half of the chunk's decay here. The other half is in the
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
    SHARED: tl.constexpr = GATE == CHANNEL and not STRONG and not EXACT
    if SHARED:
        half = tl.exp2(0.5 * total)[None, :]
        new *= half
        old *= half * scale
    else:
        old *= tl.exp2(through) * scale
        new *= tl.exp2(behind(g_ptr, g_st, through, total, first, T, column, CHUNK, K, BLOCK_K, GATE, EXACT))
    if GATE == CHANNEL:
        da = rounded(da, PRECISION)
        if SHARED:
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
