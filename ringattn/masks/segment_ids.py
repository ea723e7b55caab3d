"""Packed documents from the id of each token, as data pipelines write them. In numpy, or in JAX while it traces."""

from typing import Any

import numpy as np

from ringattn.masks.numeric import Row, is_traced, whole


def starts_of(ids: Any, most: int | None, padding: int | None) -> tuple[Any, int]:
    """The starts of the documents of `Docs.from_segment_ids`, [rows, n + 1], and the length of a row."""
    room = None if most is None else whole(most)
    if most is not None and (room is None or room < 1):
        raise ValueError(f"most={most!r}: the most documents of a row of the batch, a whole number of at least 1")
    rows = ids if is_traced(ids) else np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or 0 in rows.shape or rows.dtype.kind not in "iu":
        raise ValueError(f"segment ids must be whole numbers [batch, tokens], got {rows.dtype} {tuple(rows.shape)}")
    if is_traced(ids):
        return traced_starts(rows, room, padding), rows.shape[1]
    counts = [documents_in(row, padding) for row in rows]
    if room is not None and max(counts) > room:
        raise ValueError(f"row {np.argmax(counts)} of the ids has {max(counts)} documents, more than most={most}")
    return runs_of(rows, max(1, *counts) if room is None else room, padding, np), rows.shape[1]


def traced_starts(ids: Any, most: int | None, padding: int | None) -> Any:
    """The same traced; -1 in a row of more than `most` documents, whose results are NaN."""
    import jax
    from jax.sharding import PartitionSpec as P

    if most is None:
        raise ValueError("these ids are traced (jit, grad, vmap): pass most=, the most documents of a row of the batch")
    there = jax.typeof(ids).sharding
    if there.spec[1] is not None:  # an explicit axis cuts the tokens
        ids = jax.reshard(ids, there.update(spec=P(there.spec[0], None)))
    starts = runs_of(ids, most, padding, jax.numpy)
    starts = jax.numpy.where(starts[:, -1:] < end_of(ids, padding, jax.numpy), -1, starts)
    return starts.astype(jax.numpy.int32)


def runs_of(ids: Any, most: int, padding: int | None, xp: Any) -> Any:
    """[R, T] -> [R, most + 1]: where each run of equal ids begins, and where the last one ends."""
    T, at = ids.shape[1], xp.arange(ids.shape[1])
    begins = xp.concatenate([ids[:, :1] == ids[:, :1], ids[:, 1:] != ids[:, :-1]], 1)  # the first token begins one
    starts = xp.sort(xp.where(begins, at, T), 1)[:, : most + 1]
    starts = xp.pad(starts, ((0, 0), (0, max(0, most + 1 - T))), constant_values=T)
    return xp.minimum(starts, end_of(ids, padding, xp))


def end_of(ids: Any, padding: int | None, xp: Any) -> Any:
    """The number of tokens of each row without the padding at its end, [R, 1]."""
    at = xp.arange(1, ids.shape[1] + 1)
    return xp.where(ids == ids if padding is None else ids != padding, at, 0).max(1, keepdims=True)


def documents_in(ids: Row, padding: int | None) -> int:
    """The number of documents in a row; an error if an id comes back after another one."""
    ids = ids if padding is None else ids[: end_of(ids[None], padding, np)[0, 0]]
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)])
    _, first = np.unique(ids[starts], return_index=True)
    again = np.setdiff1d(np.arange(len(starts)), first)
    again = again[ids[starts[again]] != padding]
    if len(again):
        at = starts[again[0]]
        raise ValueError(f"segment id {ids[at]} comes back at token {at}: the tokens of a document are consecutive")
    return len(starts)
