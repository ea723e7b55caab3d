"""The states of gated linear attention in Triton: the state before every chunk, found segment by segment.

    B batch   T tokens   H heads   K key dim   V value dim   G gates a head, K or 1
    C tokens a chunk   N chunks   S segments of chunks

The recurrence from state to state is the only sequential part. It runs in three passes:

    states_kernel              all segments at the same time, each from a state of zero
    join_kernel                joins their ends into the state before each segment; quick, since segments are few
    states_kernel with STORE   all segments again, from these states, storing the state before every chunk

The state before the first token adds to a segment's state what the gates leave of it. Only the third pass needs it, so
it may arrive late. In reverse, with q and dout for k and v, the same kernels give the gradient for the state behind
every chunk.

Gates are in base 2 here, and clamped at -256: 2^-256 is 0 in float32, and larger numbers would cost sums their bits.
"""

import triton
import triton.language as tl

from ringattn.kernels.triton import LN2, LOG2E, cells

LOWEST = tl.constexpr(-256.0)
NO_GATE, HEAD, CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # GATE: none, one a head, or a key channel


@triton.jit
def program_at(pid, tiles, H, N):
    """(tile, head, chunk or segment, batch row) of a program: tiles vary fastest, then heads."""
    return pid % tiles, (pid // tiles % H).to(tl.int64), pid // tiles // H % N, (pid // tiles // H // N).to(tl.int64)


@triton.jit
def load(
    ptr, first, stop, column, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A tile, 0 outside the matrix."""
    at, inside = cells(ptr, first, stop, column, stride_row, stride_col, ROWS, COLS, WIDTH)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store(
    ptr, x, first, stop, column, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    at, inside = cells(ptr, first, stop, column, stride_row, stride_col, ROWS, COLS, WIDTH)
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_decays(ptr, segment, column, K: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr):
    """The decays of a segment's channels, [WIDTH], or [1] if the channels share one."""
    if GATE == CHANNEL:
        channels = column + tl.arange(0, WIDTH)
        return tl.load(ptr + segment * K + channels, mask=channels < K, other=0.0)
    else:
        return tl.load(ptr + segment + tl.arange(0, 1))


@triton.jit
def store_decays(ptr, x, segment, column, K: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr):
    if GATE == CHANNEL:
        channels = column + tl.arange(0, WIDTH)
        tl.store(ptr + segment * K + channels, x, mask=channels < K)
    elif column == 0:
        tl.store(ptr + segment + tl.arange(0, 1), x)


@triton.jit
def gates(
    ptr, st, first, stop, column, ROWS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """The gates of ROWS tokens in base 2, [ROWS, WIDTH], or [ROWS, 1] if the channels share one."""
    if GATE == CHANNEL:
        g = load(ptr, first, stop, column, st[1], st[3], ROWS, K, WIDTH)
    elif GATE == HEAD:
        g = load(ptr, first, stop, 0, st[1], 0, ROWS, 1, 1)
    else:
        g = tl.zeros([ROWS, 1], tl.float32)
    return tl.maximum(g.to(tl.float32) * LOG2E, LOWEST)


@triton.jit
def sums(g, GATE: tl.constexpr):
    """The sums of the gates (from the chunk's start through each token, over the whole chunk)."""
    if GATE == CHANNEL:
        return tl.cumsum(g, 0), tl.sum(g, 0)
    elif GATE == NO_GATE:
        return g, tl.sum(g, 0)
    else:
        ROWS: tl.constexpr = g.shape[0]
        i = tl.arange(0, ROWS)
        return tl.sum(tl.where(i[:, None] >= i[None, :], tl.trans(g), 0.0), 1)[:, None], tl.sum(g, 0)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x rounded to tf32, to the nearest: tensor cores themselves truncate after 10 bits."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def product(x, y, sum, PRECISION: tl.constexpr):
    """x y + sum."""
    return tl.dot(rounded(x, PRECISION), rounded(y, PRECISION), sum, input_precision=PRECISION)


@triton.jit
def behind(
    ptr, st, through, total, first, stop, column, ROWS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    GATE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The sum of the gates behind each token, up to the chunk's end.

    With EXACT it is summed by itself. Otherwise it is total - through, whose rounding 16-bit inputs do not notice.
    """
    if EXACT and GATE == CHANNEL:
        later = gates(ptr, st, first + 1, tl.minimum(first + ROWS, stop), column, ROWS, K, WIDTH, GATE)
        return tl.cumsum(later, 0, reverse=True)
    elif EXACT and GATE == HEAD:
        g = gates(ptr, st, first, stop, column, ROWS, K, WIDTH, GATE)
        i = tl.arange(0, ROWS)
        return tl.sum(tl.where(i[:, None] < i[None, :], tl.trans(g), 0.0), 1)[:, None]
    else:
        return total[None, :] - through


@triton.jit
def seen_from_start(begin_ptr, first, T, CHUNK: tl.constexpr):
    """Whether a token sees the state before the chunk: its document began before the chunk."""
    tokens = first + tl.arange(0, CHUNK)
    return (tl.load(begin_ptr + tl.minimum(tokens, T - 1)) < first)[:, None]


@triton.jit
def seen_from_end(begin_ptr, first, T, CHUNK: tl.constexpr):
    """Whether a token is in the state behind the chunk: it is of the document that the chunk ends in."""
    last = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1)
    return (first + tl.arange(0, CHUNK) >= last)[:, None]


@triton.jit(do_not_specialize=["T", "N", "length", "S"])
def states_kernel(
    x_ptr, y_ptr, g_ptr, begin_ptr, first_ptr, before_ptr, passed_ptr, states_ptr, ends_ptr, decays_ptr, strongest_ptr,
    x_st, y_st, g_st, begin_st, T, N, H, scale, length, S,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, DOCS: tl.constexpr, REVERSE: tl.constexpr, STORE: tl.constexpr, FIRST: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_K, BLOCK_V] of the state, over the chunks of one segment; x, y are k, v, or in reverse q, dout.

    Programs: one for each tile of the state, head, segment and batch row.

    Loop: chunk by chunk, from the segment's start, or in reverse from its end: state = 2^total * state + x^T y, where x
    carries the decay from its token to the chunk's end (in reverse: from the chunk's start to its token).

    Without STORE (first pass) the state starts at zero. Stored are the state at the end, the decay over the segment,
    and for each chunk the strongest decay among the tile's channels, which `passes_over` reads.
    With STORE (third pass) the state starts at `before`, and FIRST adds what `passed` leaves of `first`. The state
    before (in reverse: behind) each chunk is stored.

    Why at the odd places: programs with the same channels have the same gates, so only those with column_v = 0 store
    decays. Where a document begins in the chunk, total is -inf: nothing of the state before it is left.
    """
    TILES_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    TILES_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, h, s, b = program_at(tl.program_id(0), TILES_K * TILES_V, H, S)
    column_k = tile // TILES_V * BLOCK_K
    column_v = tile % TILES_V * BLOCK_V
    x_ptr += b * x_st[0] + h * x_st[2]
    y_ptr += b * y_st[0] + h * y_st[2]
    g_ptr += b * g_st[0] + h * g_st[2]
    begin_ptr += b * begin_st
    segment = (b * S + s) * H + h
    GATES: tl.constexpr = BLOCK_K if GATE == CHANNEL else 1
    if STORE:
        state = load(before_ptr + segment * (K * V), column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FIRST:
        start = load(first_ptr + (b * H + h) * (K * V), column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        state += tl.exp2(load_decays(passed_ptr, segment, column_k, K, BLOCK_K, GATE))[:, None] * start
    decay = tl.zeros([GATES], tl.float32)
    lo = s * length
    hi = tl.minimum(lo + length, N)
    for i in tl.range(lo, hi):
        n = lo + hi - 1 - i if REVERSE else i
        first = n * CHUNK
        if STORE:
            chunk = (b * N + n) * H + h
            store(states_ptr + chunk * (K * V), state, column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        x = load(x_ptr, first, T, column_k, x_st[1], x_st[3], CHUNK, K, BLOCK_K).to(tl.float32)
        y = load(y_ptr, first, T, column_v, y_st[1], y_st[3], CHUNK, V, BLOCK_V)
        g = gates(g_ptr, g_st, first, T, column_k, CHUNK, K, BLOCK_K, GATE)
        through, total = sums(g, GATE)
        if REVERSE:
            x = x * tl.exp2(through) * scale
        else:
            ahead = behind(g_ptr, g_st, through, total, first, T, column_k, CHUNK, K, BLOCK_K, GATE, EXACT)
            x = x * tl.exp2(ahead)
        if not STORE and GATE == CHANNEL:  # noqa: SIM102
            if column_v == 0:
                tl.store(strongest_ptr + ((b * N + n) * H + h) * TILES_K + tile // TILES_V, tl.min(total, 0))
        if DOCS:
            x = tl.where((seen_from_start if REVERSE else seen_from_end)(begin_ptr, first, T, CHUNK), x, 0.0)
            last = tl.load(begin_ptr + tl.minimum(first + CHUNK, T) - 1)
            total = tl.where(last < first, total, float("-inf"))
        state = product(tl.trans(x.to(DTYPE)), y.to(DTYPE), state * tl.exp2(total)[:, None], PRECISION)
        decay += total
    if not STORE:
        store(ends_ptr + segment * (K * V), state, column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        if column_v == 0:
            store_decays(decays_ptr, decay, segment, column_k, K, BLOCK_K, GATE)


@triton.jit(do_not_specialize=["S"])
def join_kernel(
    ends_ptr, decays_ptr, before_ptr, passed_ptr, end_ptr, log_decay_ptr, S, H,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """A tile of the state before each segment and behind the last one; in reverse, behind each and before the first.

    Programs: one for each head of each batch row, tile of K and tile of V. The loop over the segments adds up what the
    first pass of `states_kernel` stored: state = 2^decay * state + end, from a state of zero. `passed` is the decay
    from the start of the sequence (in reverse: from its end) to each segment.
    """
    row = tl.program_id(0).to(tl.int64)
    column_k = tl.program_id(1) * BLOCK_K
    column_v = tl.program_id(2) * BLOCK_V
    b, h = row // H, row % H
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    passed = tl.zeros([BLOCK_K if GATE == CHANNEL else 1], tl.float32)
    for i in tl.range(0, S):
        segment = (b * S + (S - 1 - i if REVERSE else i)) * H + h
        store(before_ptr + segment * (K * V), state, column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        if column_v == 0:
            store_decays(passed_ptr, passed, segment, column_k, K, BLOCK_K, GATE)
        decay = load_decays(decays_ptr, segment, column_k, K, BLOCK_K, GATE)
        end = load(ends_ptr + segment * (K * V), column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
        state = state * tl.exp2(decay)[:, None] + end
        passed += decay
    store(end_ptr + row * (K * V), state, column_k, K, column_v, V, 1, BLOCK_K, V, BLOCK_V)
    if column_v == 0:
        store_decays(log_decay_ptr, passed * LN2, row, column_k, K, BLOCK_K, GATE)
