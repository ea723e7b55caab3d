"""FlashAttention-4, if it is installed (`pip install 'ringattn[fa4]'`), for any intervals, in one call a step.

Where the intervals are one of FA4's own masks (full, causal, a window, packed documents), it runs that. For all others
it gets a mask function, which reads the interval of a query, and lists of the tiles to visit.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# FA4 compiles a kernel for each kind of call, which takes seconds, and keeps it on disk if these are set at its import.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path.home() / ".cache" / "ringattn" / "fa4"))

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

from ringattn.kernels import Problem
from ringattn.kernels.attention.libraries import equal_dims, gpu_refusal
from ringattn.kernels.attention.libraries.forms import Form, form_of
from ringattn.kernels.attention.libraries.rectangles import (
    cached,
    covers,
    heads_first,
    merge_rows,
    over_rectangles,
    unit_stride,
)
from ringattn.kernels.attention.libraries.thin import with_thin
from ringattn.kernels.attention.triton.block_lists import block_lists
from ringattn.kernels.intervals import Intervals, Rectangle, extent, within
from ringattn.kernels.partial import NEVER, Partial
from ringattn.kernels.protocol import Disjoint
from ringattn.kernels.rows import Rows
from ringattn.kernels.sequences import sequences_of, unseen
from ringattn.kernels.total import Total

NAME = "FlashAttention-4"
NEEDED = {"mask_mod", "block_sparse_tensors", "aux_tensors"}
OLD = NEEDED.difference(signature(_flash_attn_fwd).parameters)
OLD |= (NEEDED | {"dlse"}).difference(signature(_flash_attn_bwd).parameters)
DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # others were not right, or not tried
PADDED = 384  # a multiple of all blocks of queries: the mask function also reads the intervals of rows past the last
SPLIT_QUERIES = 4096  # a backward pass of so many queries takes a few of FA4's own masks rather than lists
MOST_CALLS = 3  # how many such masks at most: each prepares its queries, and its gradients are added up
COMPILING = Lock()  # one thread at a time: FA4's compiler keeps what it works on for the whole process


class Sizes(NamedTuple):
    """(queries, keys) of the tiles that FA4 computes with."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def refuses(problem: Problem) -> str | None:
    if OLD:
        return f"this {NAME} has no {', '.join(sorted(OLD))}: upgrade with pip install -U 'ringattn[fa4]'"
    if problem.arch is not None and problem.arch[0] != 9:  # tried on Hopper only: elsewhere what is surely there
        return gpu_refusal(problem, NAME, (9, 0), 128) or equal_dims(problem, NAME)
    dims = problem.head_dim, problem.value_dim
    if dims not in DIMS:
        return (
            f"{NAME} is used for head dims {', '.join(f'{d}/{v}' if d != v else str(d) for d, v in DIMS)}, got {dims}"
        )
    if problem.heads != problem.kv_heads and dims[0] != dims[1]:
        return f"{NAME} has no gradients for grouped heads with unequal dims"
    return gpu_refusal(problem, NAME, (9, 0), 256, any_mask=True)


class Own(NamedTuple):
    """One of FA4's own masks, as its arguments."""

    options: dict[str, Any]
    packed: bool  # whether the batch is one row of sequences
    empty: Tensor | None = None  # which rows see no key, [T]; None: all do


class Listed(NamedTuple):
    """Any intervals: what FA4 needs beside q, k and v."""

    bounds: list[Tensor]  # begin and end of each query, [B, T], with room past the last one
    lists: BlockSparseTensorsTorch  # of the tiles of each block of queries; for a backward pass, of keys
    empty: Tensor | None  # which rows see no key, [rows, 1, T]; None if the host knows that all do


@cute.jit
def sees(
    batch: cute.TensorSSA, head: cute.TensorSSA, query: cute.TensorSSA, key: cute.TensorSSA, seqlens: Any, bounds: Any
) -> cute.TensorSSA:
    """Whether a query sees a key: begin <= key < end."""
    begin = utils.scalar_to_ssa(bounds[0][batch[0], query[0]], cutlass.Int32)
    end = utils.scalar_to_ssa(bounds[1][batch[0], query[0]], cutlass.Int32)
    return (key >= begin) & (key < end)


@lru_cache(maxsize=1)
def announce() -> None:
    """Say once in a process why first calls take long."""
    where = os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"]
    logging.getLogger("ringattn").warning(
        f"{NAME} compiles a kernel for each new kind of call, which takes some seconds, and keeps it in {where}"
    )


def compiled() -> int:
    """How many kinds of calls this process has compiled, or loaded from disk."""
    return sum(len(function.compile_cache.cache) for function in (_flash_attn_fwd, _flash_attn_bwd))


def rectangles_of(
    where: Intervals, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, backward: bool = False
) -> tuple[Rectangle, ...]:
    """The step as one call, with `Own` or `Listed` as its mask, or a few in backward; none if no query sees a key."""
    kind = "fa4", backward, q_BTHD.shape[0], k_BSGD.shape[1], q_BTHD.shape[3], v_BSGV.shape[3]

    def fitting() -> tuple[Rectangle, ...]:
        few = (two_own(where, q_BTHD) or blocks(where, q_BTHD)) if backward else apart(where, q_BTHD)
        return few or made(where, q_BTHD, k_BSGD, v_BSGV, backward)

    return cached(where, kind, fitting)


def two_own(where: Intervals, q_BTHD: Tensor) -> tuple[Rectangle, ...]:
    """Two of FA4's own masks, one after the other along the queries, if the intervals are those; else none.

    Lists cost a backward pass 5% and more, and adding up the gradients of two calls less than 1%, but for short
    sequences.
    """
    if where.rectangles is None or where.host is None or q_BTHD.shape[1] < SPLIT_QUERIES:
        return ()
    begin, end = where.host[0][0], where.host[1][0]
    starts = sorted({x.queries.start for x in where.rectangles})
    if len(starts) != 2 or form_of(begin, end) is not None:
        return ()
    rectangles = []
    for first, stop in ((starts[0], starts[1]), (starts[1], len(begin))):
        form = form_of(begin[first:stop], end[first:stop])
        if form is None or form.starts is not None:
            return ()
        queries = slice(first + form.queries.start, first + form.queries.stop)
        rectangles.append(Rectangle(queries, form.keys, own(form, q_BTHD.shape[0], q_BTHD.device)))
    return tuple(rectangles)


def are_full(where: Intervals, q_BTHD: Tensor) -> bool:
    """Whether many queries see a few runs of keys whole."""
    if where.rectangles is None or where.host is None or q_BTHD.shape[0] > 1 or q_BTHD.shape[1] < SPLIT_QUERIES:
        return False
    return len(where.rectangles) > 1 and all(x.mask is False for x in where.rectangles)


def apart(where: Intervals, q_BTHD: Tensor) -> tuple[Rectangle, ...]:
    """Queries that see runs of keys whole, forward, as one call of sequences, which may share keys; else none."""
    if not are_full(where, q_BTHD):
        return ()
    queries, keys = extent(where)
    sees_none = where.host[0][0, queries] >= where.host[1][0, queries]
    cells, at = [], 0
    for x in (*(where.rectangles or ()), None):
        stop = queries.stop - queries.start if x is None else x.queries.start - queries.start
        if at < stop:
            cells.append((at, stop, 0, 0))
        if x is not None:
            at = x.queries.stop - queries.start
            cells.append((stop, at, x.keys.start - keys.start, x.keys.stop - keys.start))
    empty = torch.from_numpy(sees_none).to(q_BTHD.device, non_blocking=True) if sees_none.any() else None
    return (Rectangle(queries, keys, Own({"causal": False} | longest_first(cells, q_BTHD.device), True, empty)),)


def longest_first(cells: Iterable[tuple[int, int, int, int]], device: torch.device) -> dict[str, Any]:
    """The options for sequences, given each one's queries [start, stop) and keys [start, stop), forward.

    Blocks of queries with many keys take long: those that begin last would run alone.
    """
    return cells_of(np.array(sorted(cells, key=lambda cell: cell[2] - cell[3]), np.int32), device)


def cells_of(cells: np.ndarray, device: torch.device) -> dict[str, Any]:
    """The options for sequences in this order, which may lie apart."""
    options: dict[str, Any] = {}
    for name, (start, stop) in (("q", cells[:, :2].T), ("k", cells[:, 2:].T)):
        for kind, x in ((f"cu_seqlens_{name}", np.append(start, stop.max())), (f"seqused_{name}", stop - start)):
            options[kind] = torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True)
        options[f"max_seqlen_{name}"] = int((stop - start).max())
    return options


def blocks(where: Intervals, q_BTHD: Tensor) -> tuple[Rectangle, ...]:
    """Queries that see blocks of keys whole, as a few calls of packed sequences; none for other intervals.

    Other ranks' keys in a balanced layout are so: pieces of a long document see what lies before them.

        keys      a a a b b b c c
        queries 1 x x x              call 1: 1 and 2 see a, 3 sees c
                2 x x x x x x        call 2: 2 sees b
                3             x x
    """
    if not are_full(where, q_BTHD):
        return ()
    groups = staircases(where.rectangles or ())
    calls: list[list[Rectangle]] = [[] for _ in range(max(map(len, groups)))]
    if len(calls) > MOST_CALLS:
        return ()
    for stairs in groups:
        seen = stairs[0].keys.start
        for cells, x in zip(calls, stairs, strict=False):
            if cells and cells[-1].keys.stop > seen:
                return ()
            cells.append(Rectangle(slice(x.queries.start, stairs[-1].queries.stop), slice(seen, x.keys.stop), False))
            seen = x.keys.stop
    return tuple(packed(cells, q_BTHD.device) for cells in calls)


def staircases(full: Iterable[Rectangle]) -> list[list[Rectangle]]:
    """Rectangles in groups: of each the queries follow on those before, and see the same keys and more."""
    groups: list[list[Rectangle]] = []
    for x in full:
        last = groups[-1][-1] if groups else None
        if (
            last
            and (last.queries.stop, last.keys.start) == (x.queries.start, x.keys.start)
            and last.keys.stop < x.keys.stop
        ):
            groups[-1].append(x)
        else:
            groups.append([x])
    return groups


def packed(cells: list[Rectangle], device: torch.device) -> Rectangle:
    """Rectangles of ever later queries and keys as one, each a sequence; what lies between them sees nothing."""
    if len(cells) == 1:
        return cells[0]._replace(mask=Own({"causal": False}, packed=False))
    corner = cells[0].queries.start, cells[0].keys.start
    corners = [corner]
    for queries, keys, _ in cells:
        corners += [(queries.start, corners[-1][1]), (queries.start, keys.start), (queries.stop, keys.stop)]
    rows, columns = (np.array([*dict.fromkeys(corners)], np.int32) - np.array(corner, np.int32)).T
    mask = Own({"causal": False} | sequences(rows, columns, device), packed=True)
    return Rectangle(slice(corner[0], corners[-1][0]), slice(corner[1], corners[-1][1]), mask)


def made(where: Intervals, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, backward: bool) -> tuple[Rectangle, ...]:
    """The step as one call, of the queries that see a key and of the keys that are seen, as far as the host knows."""
    (B, T, _, D), S, V = q_BTHD.shape, k_BSGD.shape[1], v_BSGV.shape[3]
    queries, keys = slice(0, T), slice(0, S)
    if where.host is not None:
        if len(where.host[0]) == 1:
            form = form_of(where.host[0][0], where.host[1][0])
            whole = form is not None and covers(form.queries, q_BTHD) and covers(form.keys, k_BSGD)
            if form is not None and (form.starts is None or B == 1 or whole):
                return (Rectangle(form.queries, form.keys, own(form, B, q_BTHD.device)),)
        queries, keys = extent(where)
        if queries.start == queries.stop:
            return ()
        where = within(where, queries, keys.start)
    size = sizes_of(D, V)[backward]
    lists = block_lists(where, keys.stop - keys.start, *size, by_keys=backward)
    room = 0, -(queries.stop - queries.start) % PADDED
    bounds = [pad(x.to(torch.int32), room).expand(B, -1) for x in (where.begin, where.end)]
    all_see = where.host is not None and bool((where.host[0] < where.host[1]).all())
    empty = None if all_see else (where.begin >= where.end)[:, None]
    return (Rectangle(queries, keys, Listed(bounds, BlockSparseTensorsTorch(*lists, block_size=size), empty)),)


def sizes_of(head_dim: int, value_dim: int) -> Sizes:
    """The tiles that FA4 computes with on Hopper, for these dims."""
    if head_dim <= 64:
        return Sizes((192, 128), (128, 128))
    if head_dim <= 96:
        return Sizes((192, 128), (64, 128))
    if head_dim <= 128:
        return Sizes((128, 128), (128, 128))
    if head_dim <= 192:
        return Sizes((128, 128 if value_dim <= 128 else 112), (64, 96))
    return Sizes((128, 80), (64, 64))


def own(form: Form, batch: int, device: torch.device) -> Own:
    options = masked(form.causal, form.window)
    if form.starts is not None:
        each = np.asarray(form.starts[:-1])[None] + np.arange(batch)[:, None] * form.starts[-1]
        ends = np.append(each.ravel(), batch * form.starts[-1]).astype(np.int32)
        options |= sequences(ends, ends, device)
    return Own(options, form.starts is not None)


def sequences(q: np.ndarray, k: np.ndarray, device: torch.device) -> dict[str, Any]:
    """The options for packed sequences, given where each begins and the last one ends."""
    options: dict[str, Any] = {}
    for name, at in (("q", q), ("k", k)):
        starts = torch.from_numpy(np.ascontiguousarray(at)).to(device, non_blocking=True)
        options |= {f"cu_seqlens_{name}": starts, f"max_seqlen_{name}": int(np.diff(at).max())}
    return options


def forward(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, mask: Own | Listed, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    announce()
    B, T, H, _ = q_BTHD.shape
    given: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap, "return_lse": True}
    tensors: tuple[Tensor, ...] = q_BTHD, k_BSGD, v_BSGV
    if isinstance(mask, Listed):
        given |= {"mask_mod": sees, "block_sparse_tensors": mask.lists, "aux_tensors": mask.bounds}
        with COMPILING:
            out, lse = _flash_attn_fwd(*tensors, **given)[:2]
        lse = nan_kept(lse) if mask.empty is None else nan_kept(lse).masked_fill_(mask.empty, NEVER)
        return out, heads_first(lse)
    if mask.packed:
        tensors = tuple(x.flatten(0, 1) for x in tensors)
    with COMPILING:
        out, lse = _flash_attn_fwd(*tensors, **given, **mask.options)[:2]
    lse = nan_kept(lse) if mask.empty is None else nan_kept(lse).masked_fill_(mask.empty, NEVER)
    if mask.packed:  # [H, B * T]
        return out.view(B, T, *out.shape[1:]), lse.view(H, B, T).permute(1, 2, 0)
    return out, heads_first(lse)


def nan_kept(lse: Tensor) -> Tensor:
    """FA4 writes -inf as the lse of a row with NaN, as of a row that sees no key: now NaN again, in place."""
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.nan)


def backward(
    dout_BTHV: Tensor,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    out_BTHV: Tensor | None,
    lse_BTH: Tensor,
    mask: Own | Listed,
    scale: float,
    softcap: float | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FA4 computes delta = rowsum(dout * out) - dlse. Given delta instead of out, out = 0 and dlse = -delta."""
    if out_BTHV is None:
        out_BTHV = torch.zeros_like(dout_BTHV)
    lse, minus = (None if x is None else heads_first(x).contiguous() for x in (lse_BTH, delta))
    tensors: tuple[Tensor, ...] = q_BTHD, k_BSGD, v_BSGV, out_BTHV, dout_BTHV
    dlse = None if minus is None else -minus
    options: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap or 0.0, "dlse": dlse}
    if isinstance(mask, Listed):
        options |= {"mask_mod": sees, "block_sparse_tensors": mask.lists, "aux_tensors": mask.bounds}
    else:
        options |= mask.options
        if mask.packed:
            tensors = tuple(x.flatten(0, 1) for x in tensors)
            lse, options["dlse"] = (None if x is None else x.transpose(0, 1).flatten(1) for x in (lse, options["dlse"]))
    with COMPILING:
        dq, dk, dv = _flash_attn_bwd(*tensors, lse, **options)[:3]
    return dq.view(q_BTHD.shape), dk.view(k_BSGD.shape), dv.view(v_BSGV.shape)


def allocate(q_BTHD: Tensor, value_dim: int) -> Partial:
    """Memory for a partial of one batch row, as FA4 writes it."""
    _, T, H, _ = q_BTHD.shape
    return Partial(q_BTHD.new_empty(1, T, H, value_dim), q_BTHD.new_empty(H, T, dtype=torch.float32).T[None])


def write(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, into: Partial, *, scale: float,
    softcap: float | None = None,
) -> None:  # fmt: skip
    """All sequences of a step in one call, which writes their rows of `into`."""
    announce()
    given = {"softmax_scale": scale, "softcap": softcap, "return_lse": True, "out": into.out[0], "lse": into.lse[0].T}
    given |= cached(where, "sequences", lambda: options_of(where, q_BTHD.device))
    with COMPILING:
        _flash_attn_fwd(*(unit_stride(x)[0] for x in (q_BTHD, k_BSGD, v_BSGV)), **given)


def options_of(where: Intervals, device: torch.device) -> dict[str, Any]:
    """The options for intervals that are sequences."""
    sequences = sequences_of(*(side[0] for side in where.host))
    assert sequences  # the recipe asked
    cells, causal, window = sequences
    return masked(causal, window) | longest_first(cells.tolist(), device)


def masked(causal: bool, window: int | None) -> dict[str, Any]:
    """The options for the mask of all sequences."""
    return {"causal": causal} if window is None else {"window_size_left": window, "window_size_right": 0}


def backward_disjoint(
    tensors: tuple[Tensor, Tensor, Tensor], where: Intervals, rows: Rows, dq_BTHD: Tensor, *, scale: float,
    softcap: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """The gradients of a step that is sequences, in one call, or in a few if several sequences see the same keys."""
    out = torch.zeros_like(rows.dout) if rows.out is None else rows.out
    by_row = [unit_stride(x[0]) for x in (tensors[0], out, rows.dout, dq_BTHD)]
    k, v = (unit_stride(x[0]) for x in tensors[1:])
    lse, delta = rows.lse[0].T, None if rows.delta is None else rows.delta[0].T
    calls = cached(where, "sequences of a backward pass", lambda: calls_of(where, len(k), k.device))
    sums = Total(tensors[1]), Total(tensors[2])
    for options, queries, keys, gaps in calls:
        q, out, dout, dq = (x[queries] for x in by_row)
        dk, dv = (x.new_empty(x[keys].shape) for x in (k, v))
        if gaps:
            torch._foreach_zero_([x[at] for at in gaps for x in (dk, dv)])
        given = {"softmax_scale": scale, "softcap": softcap or 0.0, "dq": dq, "dk": dk, "dv": dv, **options}
        if delta is not None:
            given["dlse"] = -delta[:, queries].contiguous()
        with COMPILING:
            _flash_attn_bwd(q, k[keys], v[keys], out, dout, lse[:, queries].contiguous(), **given)
        if len(calls) == 1:
            return dk[None], dv[None]
        for total, x in zip(sums, (dk, dv), strict=True):
            total.add(x[None], rows=keys)
    return sums


def calls_of(
    where: Intervals, length: int, device: torch.device
) -> list[tuple[dict[str, Any], slice, slice, list[slice]]]:
    """The calls of a backward pass over sequences of `length` keys: of each its options, its queries and keys, and
    which of these keys no query sees, for which FA4 writes nothing. One call has all keys.

    In a call the keys of a sequence lie behind those of the one before, so that none has gradients from two.
    """
    sequences = sequences_of(*(side[0] for side in where.host))
    assert sequences  # the recipe asked
    cells, causal, window = sequences
    calls: list[list[list[int]]] = []
    for cell in cells.tolist():
        fitting = next((call for call in calls if call[-1][3] <= cell[2]), None)
        if fitting is None:
            calls.append(fitting := [])
        fitting.append(cell)
    made = []
    for call in calls:
        queries = slice(call[0][0], call[-1][1])
        keys = slice(call[0][2], call[-1][3]) if len(calls) > 1 else slice(0, length)
        corner = np.array([queries.start, queries.start, keys.start, keys.start], np.int32)
        moved = np.array(call, np.int32) - corner
        edges = [0, *moved[:, 2:].ravel().tolist(), keys.stop - keys.start]
        gaps = [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        made.append((masked(causal, window) | cells_of(moved, device), queries, keys, gaps))
    return made


def clear(x: Tensor, steps: Sequence[Intervals], fill: float = 0.0) -> None:
    for rows in cached(steps[-1], "unseen", lambda: unseen(steps)):
        x[:, rows] = fill


def finish(into: Partial, steps: Sequence[Intervals], start: Partial | None) -> Partial:
    nan_kept(into.lse)
    clear(into.out, steps)
    clear(into.lse, steps, NEVER)
    if start is None:
        return into
    merge_rows(start, slice(None), into, start)
    return start


KERNEL = with_thin(over_rectangles(NAME, forward, backward, refuses, rectangles_of))
KERNEL = replace(KERNEL, disjoint=Disjoint(allocate, write, finish, backward_disjoint, clear))
