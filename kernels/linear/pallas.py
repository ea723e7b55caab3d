"""Linear attention and the delta rule for TPUs, forward: one chunk after another, with the state in vector memory.

    R rows   T tokens   N chunks of C tokens   G key heads   H value heads   K key dim   V value dim

A grid step is one chunk of a few heads; consecutive steps of a row go through its chunks, and the states [K, V] of the
heads stay in scratch from one step to the next. Within a chunk, with E_ij the decay from token j to token i <= j:

    reads   = (E * q k^T) u + decay from the start * q S
    u       = v, or by the delta rule (1 + beta E * k k^T)^-1 beta (v - decay from the start * k S), below the diagonal
    S       = decay of the chunk * S + (decay to the end * k)^T u

All exponents are sums of gates, as in `jax_chunkwise.py`: never a difference. A gate a head makes E one
matrix [C, C]; with a gate a channel every pair has a decay for each channel, and E is found by halves: the cut that
separates a pair divides its decay in two factors.

Why at the odd places: heads are computed together in phases, so that the compiler fills the wait for the small products
of one head with those of another. Gates come as rows [1, C], and `column` turns a row by a mask and a sum, which is
cheaper than a transpose. If the inputs are bfloat16, float32 operands of products are taken as two halves of bfloat16:
two or three passes of the matrix unit in place of six, with an error far below that of the rounded output.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringattn.kernels.linear.jax_chunkwise import CHUNK, LOWEST, Map, begins
from ringattn.kernels.varying import axes_of, in_turn, vary

NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # a @ b and a @ b^T
TN = (((0,), (0,)), ((), ()))  # a^T @ b
HEADS, STATES = 8, 2**23  # of a grid step: how many heads, and about how many bytes of states, at most
LEVELS = range(CHUNK.bit_length() - 1)
MAX_DIM = 256  # of a head's keys and values


class Rows(NamedTuple):
    """Operands by heads: T is whole chunks, zeros behind the last token; q is None where nothing is read."""

    q: Array | None  # [R, G, T, K]
    k: Array
    v: Array  # [R, H, T, V]
    g: Array  # [R, H, N, 1, C], or a channel [R, H, T, K]
    beta: Array | None  # [R, H, N, 1, C]
    begin: Array | None  # [1 or R, N, 1, C]: where each token's document began, counted from its chunk

    @classmethod
    def of(
        cls, q: Array | None, k: Array, v: Array, g: Array | None, beta: Array | None, begin: Array | None
    ) -> "Rows":
        """From [R, T, heads, dim]; gates [R, T, H] or [R, T, H, K]; `begin` [1 or R, T], counted from the first one."""
        g = jnp.zeros(v.shape[:3], jnp.float32) if g is None else jnp.maximum(g.astype(jnp.float32), LOWEST)
        if begin is not None:
            begin = begins(begin).swapaxes(0, 1)[:, :, None]
        return cls(
            None if q is None else by_heads(q),
            by_heads(k),
            by_heads(v),
            by_heads(g) if g.ndim == 4 else of_chunks(g),
            None if beta is None else of_chunks(beta.astype(jnp.float32)),
            begin,
        )

    @property
    def chunks(self) -> int:
        return self.v.shape[2] // CHUNK

    @property
    def together(self) -> int:
        """How many heads a grid step computes: they share a key head, or have whole key heads."""
        H, (G, _, K), V = self.v.shape[1], self.k.shape[1:], self.v.shape[3]
        most = max(1, min(HEADS, STATES // (28 * K * (K + V))))
        return max(n for n in range(1, most + 1) if H % n == 0 and (H // G % n == 0 or n % (H // G) == 0))


def by_heads(x: Array) -> Array:
    return jnp.pad(jnp.einsum("rthx->rhtx", x), ((0, 0), (0, 0), (0, -x.shape[1] % CHUNK), (0, 0)))


def of_chunks(x: Array) -> Array:
    """[R, T, H] as [R, H, N, 1, C]."""
    x = by_heads(x[..., None])
    return x.reshape(*x.shape[:2], -1, 1, CHUNK)


def outputs(rows: Rows, start: Array, scale: float, keep: bool, interpret: bool) -> tuple[Array, ...]:
    """(out [R, T, H, V], the state behind each row [R, H, K, V]), and if kept the states before chunks [N, R, H, K, V].

    `start` is the state before each row.
    """
    (R, H, T, V), n = rows.v.shape, rows.together
    chunk = pl.BlockSpec((1, 1, n, *start.shape[2:]), lambda r, h, c: (c, r, h, 0, 0))
    results = [((R, H, T, V), rows.v.dtype, tokens(n, V)), (start.shape, jnp.float32, whole(n, start.shape))]
    results += [((rows.chunks, *start.shape), jnp.float32, chunk)] if keep else []
    kernel = partial(outputs_kernel, scale=scale)
    out, *states = run(kernel, rows, [start.astype(jnp.float32)], results, [start.shape[2:]], interpret)
    return jnp.einsum("rhtv->rthv", out), *states


def segment(rows: Rows, interpret: bool) -> Map:
    """What each row does to the state: the composition of the maps of its chunks."""
    (R, H, _, V), K = rows.v.shape, rows.k.shape[3]
    states = [(K, V)] if rows.beta is None else [(K, V), (K, K)]
    results = [((R, H, *shape), jnp.float32, whole(rows.together, (R, H, *shape))) for shape in states]
    kv, *factor = run(map_kernel, rows._replace(q=None), [], results, states, interpret)
    if factor:
        return Map(factor[0], kv)
    decay = jnp.exp(rows.g.sum(2)[..., None] if rows.g.ndim == 4 else rows.g.sum((2, 3, 4))[..., None, None])
    if rows.begin is not None:
        inside = rows.begin[:, -1, 0, -1] + CHUNK * (rows.chunks - 1) < 0  # the last document began before the row
        decay = decay * inside[:, None, None, None]
    return Map(decay, kv)


def tokens(heads: int, dim: int, shared: int = 1) -> pl.BlockSpec:
    """A chunk of so many heads of [R, heads, T, dim]; `shared` grid steps of heads take the same ones."""
    return pl.BlockSpec((1, heads, CHUNK, dim), lambda r, h, c: (r, h // shared, c, 0))


def whole(heads: int, shape: tuple[int, ...]) -> pl.BlockSpec:
    """The states of so many heads of [R, H, ...], the same for all chunks."""
    return pl.BlockSpec((1, heads, *shape[2:]), lambda r, h, c: (r, h, 0, 0))


def run(kernel: Any, rows: Rows, starts: list[Array], results: Any, states: Any, interpret: bool) -> list[Array]:
    """Run the kernel over rows, groups of heads and chunks; `states` are the shapes of a head's states in scratch."""
    (R, H, T, V), (G, _, K), n = rows.v.shape, rows.k.shape[1:], rows.together
    keys, steps = max(1, n * G // H), max(1, H // G // n)  # key heads of a grid step, grid steps of a key head
    row = pl.BlockSpec((1, n, 1, 1, CHUNK), lambda r, h, c: (r, h, c, 0, 0))
    each = 1 if rows.begin is not None and len(rows.begin) > 1 else 0
    key = tokens(keys, K, steps)
    specs = (
        key, key, tokens(n, V), tokens(n, K) if rows.g.ndim == 4 else row, row,
        pl.BlockSpec((1, 1, 1, CHUNK), lambda r, h, c: (r * each, c, 0, 0)),
    )  # fmt: skip
    given = [(x, spec) for x, spec in zip(rows, specs, strict=True) if x is not None]
    given += [(x, whole(n, x.shape)) for x in starts]
    operands = vary([x for x, _ in given], axes_of([x for x, _ in given]))
    kind = {"manual_axis_type": jax.typeof(jnp.int32(0) if interpret else operands[0]).manual_axis_type}
    out_shape = [jax.ShapeDtypeStruct(shape, dtype, **kind) for shape, dtype, _ in results]
    names = [name for name, x in zip(Rows._fields, rows, strict=True) if x is not None]
    call = pl.pallas_call(
        partial(kernel, names=names),
        grid=(R, H // n, rows.chunks),
        in_specs=[spec for _, spec in given],
        out_specs=[spec for _, _, spec in results],
        scratch_shapes=[pltpu.VMEM((n, *shape), jnp.float32) for shape in states],
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * R * H * T * (3 * K * V + CHUNK * (2 * K + V + 2 * CHUNK)),
            transcendentals=R * H * T * CHUNK,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *out_shape)),
        ),
        interpret=interpret,
        name=getattr(kernel, "func", kernel).__name__,
    )
    return in_turn(lambda x: call(*x), operands) if interpret else call(*operands)


def outputs_kernel(*refs: Any, names: list[str], scale: float) -> None:
    """`outputs`: what each token reads, and the states; see the head of this file."""
    given, (start, out, end, *kept, state) = dict(zip(names, refs, strict=False)), refs[len(names) :]

    @pl.when(pl.program_id(2) == 0)
    def begin() -> None:
        state[...] = start[0]

    if kept:
        kept[0][0, 0] = state[...]
    chunks = [Chunk.of(given, i) for i in range(len(state))]
    weights = [x.pairs(x.q) for x in chunks]
    inverses = solved([x.system() for x in chunks], chunks[0].exact) if "beta" in given else []
    for i, x in enumerate(chunks):
        before = state[i]
        u = x.written(before, x.v, inverses[i]) if inverses else x.v
        out[0, i] = ((x.read(x.q, before) + dot(weights[i], u, NN, x.exact)) * scale).astype(out.dtype)
        state[i] = x.after(before, u)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def finish() -> None:
        end[0] = state[...]


def map_kernel(*refs: Any, names: list[str]) -> None:
    """`segment`: the state from zero, and by the delta rule the factor, which is the state from 1 where v is 0."""
    given, results = dict(zip(names, refs, strict=False)), refs[len(names) :]
    results, states = results[: len(results) // 2], results[len(results) // 2 :]

    @pl.when(pl.program_id(2) == 0)
    def begin() -> None:
        states[0][...] = jnp.zeros_like(states[0])
        for unit in states[1:]:
            unit[...] = jnp.broadcast_to(eye(unit.shape[1]).astype(jnp.float32), unit.shape)

    chunks = [Chunk.of(given, i) for i in range(states[0].shape[0])]
    inverses = solved([x.system() for x in chunks], chunks[0].exact) if "beta" in given else []
    for i, x in enumerate(chunks):
        for state, v in zip(states, (x.v, None), strict=False):
            before = state[i]
            state[i] = x.after(before, x.written(before, v, inverses[i]) if inverses else x.v)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def finish() -> None:
        for result, state in zip(results, states, strict=True):
            result[0] = state[...]


class Chunk(NamedTuple):
    """One chunk of one head: its operands, decays, and which pairs are of one document."""

    q: Any  # [C, K], or None
    k: Any
    v: Any
    beta: Any  # [C, 1]
    decays: Any  # of pairs: [C, C], or for a gate a channel the two factors of each level
    from_start: Any  # [C, 1 or K]
    to_end: Any
    across: Any  # [1 or K, 1]
    same: Any  # [C, C], or None
    exact: bool  # whether products have the full precision of float32

    @classmethod
    def of(cls, given: dict[str, Any], i: int) -> "Chunk":
        """Head i of the block."""
        k_ref, g, n = given["k"], given["g"], given["v"].shape[1]
        head = i * k_ref.shape[1] // n
        rows, cols = index(0), index(1)
        decays: Any
        if len(g.shape) == 5:
            gates = g[0, i, 0]  # [1, C]
            until = jnp.where(cols <= rows, gates, 0.0)
            decays = jnp.exp(sums(until, rows > cols))
            from_start, to_end = until.sum(1, keepdims=True), jnp.where(cols > rows, gates, 0.0).sum(1, keepdims=True)
            across = gates.sum(1, keepdims=True)
        else:
            gates = g[0, i]  # [C, K]
            from_start, to_end = sums(cols <= rows, gates), sums(cols > rows, gates)
            across = column(gates.sum(0, keepdims=True))
            decays = [tuple(jnp.exp(sums(mask, gates)) for mask in sides(level)) for level in LEVELS]
        from_start, to_end, across, same = jnp.exp(from_start), jnp.exp(to_end), jnp.exp(across), None
        if "begin" in given:
            begin = given["begin"][0, 0]  # [1, C]
            started = column(begin)
            same = started <= cols
            last = begin[:, CHUNK - 1 :]
            from_start = from_start * (started < 0)
            to_end = to_end * (last <= index(0)[:, :1])
            across = across * (last < 0)
        beta = column(given["beta"][0, i, 0]) if "beta" in given else None
        q = given["q"][0, head] if "q" in given else None
        return cls(
            q,
            k_ref[0, head],
            given["v"][0, i],
            beta,
            decays,
            from_start,
            to_end,
            across,
            same,
            k_ref.dtype == jnp.float32,
        )

    def pairs(self, left: Any) -> Any:
        """(left_i . decay from j to i . k_j) for all pairs j <= i of one document, 0 for others."""
        if isinstance(self.decays, list):
            pairs = jnp.where(eye(CHUNK), (left.astype(jnp.float32) * self.k).sum(1, keepdims=True), 0.0)
            for level, (after, ahead) in zip(LEVELS, self.decays, strict=True):
                pairs += jnp.where(split_at(level), dot(left * after, self.k * ahead, NT, self.exact), 0.0)
        else:
            pairs = jnp.where(index(1) <= index(0), dot(left, self.k, NT, self.exact) * self.decays, 0.0)
        return pairs if self.same is None else jnp.where(self.same, pairs, 0.0)

    def system(self) -> Any:
        """What the delta rule adds to 1, strictly below the diagonal."""
        return jnp.where(index(1) < index(0), self.beta * self.pairs(self.k), 0.0)

    def read(self, left: Any, before: Any) -> Any:
        """What q or k reads of the state before the chunk."""
        if self.from_start.shape[1] == 1:
            return self.from_start * dot(left, before, NN, self.exact)
        return dot(left * self.from_start, before, NN, self.exact)

    def written(self, before: Any, v: Any, inverse: Any) -> Any:
        """What the delta rule writes, given the state before the chunk."""
        read = self.read(self.k, before)
        return dot(inverse, self.beta * (-read if v is None else v - read), NN, self.exact)

    def after(self, before: Any, u: Any) -> Any:
        """The state behind the chunk."""
        if self.to_end.shape[1] == 1:
            return self.across * before + dot(self.k, self.to_end * u, TN, self.exact)
        return self.across * before + dot(self.k * self.to_end, u, TN, self.exact)


def solved(lower: list[Any], exact: bool) -> list[Any]:
    """(1 + lower)^-1 of strictly lower triangular matrices, as `jax_chunkwise.inverse`; all of them level by level."""
    inverses = [eye(CHUNK) - jnp.where(split_at(0), x, 0.0) for x in lower]
    for level in LEVELS[1:]:
        corner = [dot(jnp.where(split_at(level), x, 0.0), y, NN, exact) for x, y in zip(lower, inverses, strict=True)]
        inverses = [y - dot(y, x, NN, exact) for x, y in zip(corner, inverses, strict=True)]
    return inverses


def index(dim: int) -> Any:
    """The row or the column of each element of [C, C]."""
    return lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), dim)


def eye(n: int) -> Any:
    return lax.broadcasted_iota(jnp.int32, (n, n), 0) == lax.broadcasted_iota(jnp.int32, (n, n), 1)


def split_at(level: int) -> Any:
    """The pairs (i, j) on both sides of the cut of a block of 2 ** (level + 1) tokens: [C, C]."""
    i, j = index(0) >> level, index(1) >> level
    return (i ^ j == 1) & (i & 1 == 1)


def sides(level: int) -> tuple[Any, Any]:
    """Which gates t lie from the cut of i's block to i, and which behind i up to the cut: two masks [C, C]."""
    i, t = index(0), index(1)
    near, second = i >> level == t >> level, (i >> level) & 1 == 1
    return near & second & (t <= i), near & ~second & (t > i)


def column(row: Any) -> Any:
    """A row [1, n] as a column."""
    return jnp.where(eye(row.shape[1]), row, jnp.zeros_like(row)).sum(1, keepdims=True)


def dot(a: Any, b: Any, dims: Any, exact: bool) -> Any:
    """A product in float32. If not exact, float32 is taken as two halves of bfloat16, to 2^-16 of each number."""
    if exact:
        return lax.dot_general(a, b, dims, lax.Precision.HIGHEST, jnp.float32)
    pairs = [(x, y) for i, x in enumerate(parts(a, 2)) for j, y in enumerate(parts(b, 2)) if i + j < 2]
    return sum(lax.dot_general(x, y, dims, lax.Precision.DEFAULT, jnp.float32) for x, y in pairs)


def sums(a: Any, b: Any) -> Any:
    """The product of gates with a mask, in either order, to the precision of float32."""
    a, b = ([x.astype(jnp.bfloat16)] if x.dtype == jnp.bool else parts(x, 3) for x in (a, b))
    return sum(lax.dot_general(x, y, NN, lax.Precision.DEFAULT, jnp.float32) for x in a for y in b)


def parts(x: Any, n: int) -> list[Any]:
    """n arrays of bfloat16 that add up to x, to about 8 * n bits."""
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(n):
        pieces.append(x.astype(jnp.bfloat16))
        x = x - pieces[-1].astype(jnp.float32)
    return pieces
