"""The states of the delta rule in Triton: the state before every chunk, found segment by segment.

    B batch   T tokens   H value heads   K key dim   V value dim   C tokens a chunk   N chunks   S segments of chunks

From chunk to chunk, in the words of `delta_products.py` and with what its kernel finds of each chunk without a state:

    m  = u - w S                            what the values differ from what their keys read
    S' = across S + (beta k 2^e)^T m        out = (scale q 2^b) S + a m

In reverse, for the gradient dS for the state behind each chunk:

    dm  = (beta k 2^e) dS + a^T dout
    dS' = across dS + (scale q 2^b)^T dout - w^T dm        dv = x^T dm

This recurrence is the only sequential part. B H V / 64 programs would leave most of a GPU idle, so the chunks are cut
into segments, in three passes:

    walk_kernel                all segments at the same time, each from a state of zero; and beside the columns of V
                               those of the unit matrix, which become the segment's factor
    join_kernel                the state before each segment, from these maps; quick, since segments are few
    walk_kernel with STORE     all segments again, from these states, storing out (in reverse: dv), which needs the
                               state, and if asked for the state before every chunk

If there is only one segment and nobody asks for its map, only the last pass runs.
"""

import triton
import triton.language as tl

from ringattn.kernels.linear.triton.gated_states import CHANNEL, load, product, program_at, store

VANISHED = tl.constexpr(-160.0)  # in base 2: numbers below 2^-149 are 0 in float32
BOUNDS_AT_ONCE = tl.constexpr(64)  # bounds that are loaded at once


@triton.jit
def column_of_tile(tile, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """(whether a tile is of the unit matrix, its first column there or in V): the tiles of V come first."""
    TILES_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    unit = tile >= TILES_V
    return unit, tl.where(unit, tile - TILES_V, tile) * BLOCK_V


@triton.jit(do_not_specialize=["T", "N", "length", "S"])
def walk_kernel(
    u_ptr, w_ptr, k_ptr, q_ptr, a_ptr, x_ptr, rates_ptr, across_ptr, bound_ptr, before_ptr, states_ptr, ends_ptr,
    out_ptr,
    u_st, k_st, q_st, T, N, H, length, S,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, GROUP: tl.constexpr, REVERSE: tl.constexpr, STORE: tl.constexpr, KEEP: tl.constexpr,
    OUT: tl.constexpr, SKIP: tl.constexpr, ZERO: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the state, over the chunks of one segment; in reverse of its gradient, with dout as u.

    Programs: one for each tile of columns, head, segment and batch row. Without STORE there are tiles of the unit
    matrix's K columns behind those of the V columns; u is 0 there. SKIP = 1 leaves out the last segment (in reverse:
    the first), whose end nobody needs, and ZERO the factor of the one that starts from a state of zero.

    Loop: chunk by chunk, from the segment's start, or in reverse from its end. With STORE the state starts at `before`.
    The factor of a segment whose decays leave nothing of its start, by the chunks' `bound`, is 0 without a walk. With
    KEEP the state before (in reverse: behind) each chunk is stored, as [V, K]; with OUT the chunk's out (in reverse:
    dv). Stored in the end is each segment's state, with STORE the last's.

    Why transposed: the state is held as [columns, K], so that it and m are the first operands of products, which tensor
    cores take from registers. The other operands go from memory to shared memory as they are. So a gate a head, a
    number of each token (`rates`), multiplies m in the place of k.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V + (0 if STORE else (K + BLOCK_V - 1) // BLOCK_V)
    tile, h, s, b = program_at(tl.program_id(0), TILES, H, S - SKIP)
    if REVERSE:
        s += SKIP
    unit, column = column_of_tile(tile, V, BLOCK_V)
    if ZERO and not STORE:  # noqa: SIM102
        if unit & (s == (S - 1 if REVERSE else 0)):
            return
    stop = tl.where(unit, 0, T)  # of u
    segment = (b * S + s) * H + h
    u_ptr += b * u_st[0] + h * u_st[2]
    w_ptr += (b * T * H + h) * K
    k_ptr += b * k_st[0] + h // GROUP * k_st[2]
    q_ptr += b * q_st[0] + h // GROUP * q_st[2]
    channels = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, CHUNK)
    if STORE:
        state = load(before_ptr + segment * (K * V), column, V, 0, 1, V, BLOCK_V, K, BLOCK_K).to(tl.float32)
    else:
        own = (column + tl.arange(0, BLOCK_V))[:, None] == channels[None, :]
        state = tl.where(unit & own, 1.0, 0.0)
    lo = s * length
    hi = tl.minimum(lo + length, N)
    if not STORE:
        bound = 0.0
        for n in tl.range(lo, tl.where(unit, hi, lo), BOUNDS_AT_ONCE):
            chunks = n + tl.arange(0, BOUNDS_AT_ONCE)
            bound += tl.sum(tl.load(bound_ptr + (b * N + chunks) * H + h, mask=chunks < hi, other=0.0), 0)
        hi = tl.where(bound < VANISHED, lo, hi)
        state = tl.where(bound < VANISHED, 0.0, state)
    for i in tl.range(lo, hi):
        n = lo + hi - 1 - i if REVERSE else i
        first = n * CHUNK
        chunk = (b * N + n) * H + h
        if KEEP:
            store(states_ptr + chunk * (K * V), state, column, V, 0, K, 1, BLOCK_V, K, BLOCK_K)
        w = load(w_ptr, first, T, 0, H * K, 1, CHUNK, K, BLOCK_K)
        k = load(k_ptr, first, T, 0, k_st[1], k_st[3], CHUNK, K, BLOCK_K).to(DTYPE)
        u = tl.trans(load(u_ptr, first, stop, column, u_st[1], u_st[3], CHUNK, V, BLOCK_V))
        if REVERSE or OUT:
            q = load(q_ptr, first, T, 0, q_st[1], q_st[3], CHUNK, K, BLOCK_K).to(DTYPE)
            a = load(a_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
        if GATE == CHANNEL:
            across = tl.load(across_ptr + chunk * K + channels, mask=channels < K, other=0.0)[None, :]
            reads, writes = 1.0, 1.0
        else:
            across = tl.load(across_ptr + chunk)
            reads = tl.load(rates_ptr + chunk * (2 * CHUNK) + tokens)[None, :]
            writes = tl.load(rates_ptr + chunk * (2 * CHUNK) + CHUNK + tokens)[None, :]
        before = state.to(DTYPE)
        zero = tl.zeros([BLOCK_V, CHUNK], tl.float32)
        if REVERSE:
            dm = product(u.to(DTYPE), a, product(before, tl.trans(k), zero, PRECISION) * writes, PRECISION)
            state = product((u.to(tl.float32) * reads).to(DTYPE), q, state * across, PRECISION)
            state = product((-dm).to(DTYPE), w, state, PRECISION)
            if OUT:
                x = load(x_ptr + chunk * (CHUNK * CHUNK), 0, CHUNK, 0, CHUNK, 1, CHUNK, CHUNK, CHUNK)
                out = product(dm.to(DTYPE), x, zero, PRECISION)
        else:
            m = u.to(tl.float32) - product(before, tl.trans(w), zero, PRECISION)
            state = product((m * writes).to(DTYPE), k, state * across, PRECISION)
            if OUT:
                out = product(before, tl.trans(q), zero, PRECISION) * reads
                out = product(m.to(DTYPE), tl.trans(a), out, PRECISION)
        if OUT:
            store(out_ptr + (b * T * H + h) * V, tl.trans(out), first, T, column, H * V, 1, CHUNK, V, BLOCK_V)
    if STORE:
        if s == (0 if REVERSE else S - 1):
            store(ends_ptr + (b * H + h) * (K * V), state, column, V, 0, 1, V, BLOCK_V, K, BLOCK_K)
    else:
        ends_ptr += segment * (K * (V + K)) + tl.where(unit, V, 0)
        store(ends_ptr, state, column, tl.where(unit, K, V), 0, 1, V + K, BLOCK_V, K, BLOCK_K)


@triton.jit(do_not_specialize=["S"])
def join_kernel(
    ends_ptr, first_ptr, found_ptr, S, H,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr, MAP: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the state before (in reverse: behind) each segment; with MAP, of the map of all segments.

    Programs: one for each tile of columns, and head of each batch row. Loop: over the segments, state = factor * state
    + end, from `first` or zero. ROWS rows of the factor are multiplied at a time, so that it fits shared memory. With
    MAP the columns of the unit matrix are behind those of V as in `walk_kernel`; only the last state is stored, behind
    the factor as maps travel.
    Otherwise nothing is needed of the last segment, nor the factor of the first if it starts from zero: both may be
    missing (SKIP and ZERO of `walk_kernel`).
    """
    row = tl.program_id(0).to(tl.int64)
    unit, column = column_of_tile(tl.program_id(1), V, BLOCK_V)
    WIDE: tl.constexpr = V + K
    b, h = row // H, row % H
    rows = tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_V)
    inside = (rows < K)[:, None] & (column + cols < tl.where(unit, K, V))[None, :]
    of_v = (column + cols < tl.where(unit, 0, V))[None, :]
    if MAP:
        state = tl.where(unit & (rows[:, None] == column + cols[None, :]), 1.0, 0.0)
    elif FIRST:
        state = load(first_ptr + row * (K * V), 0, K, column, V, 1, BLOCK_K, V, BLOCK_V).to(tl.float32)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for i in tl.range(0, S):
        segment = (b * S + (S - 1 - i if REVERSE else i)) * H + h
        if not MAP:
            store(found_ptr + segment * (K * V), state, 0, K, column, V, 1, BLOCK_K, V, BLOCK_V)
        at = ends_ptr + segment * (K * WIDE)
        own = tl.load(at + rows[:, None] * WIDE + column + cols[None, :], mask=inside & of_v, other=0.0)
        later = tl.zeros([BLOCK_K // ROWS, ROWS, BLOCK_V], tl.float32)
        block = tl.arange(0, BLOCK_K // ROWS)[:, None, None]
        count = BLOCK_K // ROWS
        if not MAP:
            count = tl.where((i == S - 1) | (i == (S if FIRST else 0)), 0, count)
        for r in tl.range(0, count, num_stages=1):
            factor = load(at + V, r * ROWS, K, 0, WIDE, 1, ROWS, K, BLOCK_K)
            some = tl.dot(factor, state, input_precision=PRECISION)
            later = tl.where(block == r, some[None], later)
        state = tl.reshape(later, [BLOCK_K, BLOCK_V]) + own
    if MAP:
        found_ptr += row * (K * WIDE) + tl.where(unit, 0, K) + column
        tl.store(found_ptr + rows[:, None] * WIDE + cols[None, :], state, mask=inside)
