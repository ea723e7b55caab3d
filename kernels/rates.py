"""How fast kernels are, as measured: what "auto" chooses by. Plain data, the same on every rank.

The key of a row is "arch/kernel/mask/width", with "/softcap" after it if there is one. The width is the head dim
rounded up to a power of two, or "192x128" for a head dim of 192 and a value dim of 128; without a row of their own, two
dims have the rates of the larger one. The masks are

    rectangles   every step is a few full or causal rectangles
    packed       documents without a window, or a window without documents, on one device
    long         any other intervals, of at least LONG_MASK keys a query on average
    short        any other intervals

A row holds the useful TFLOP/s of long sequences in 16 bits, forward and backward. `ringattn tune what=rates` measures
them; benchmarks/rates-h200.jsonl and rates-h100.jsonl have the runs behind this table. An H100 gives the same as an
H200 within 3%. At head dim 256 and at 192x128 the rows are the mean of both, which differ by up to a fifth: backward at
256, FlashAttention-4 and cuDNN are equal on an H200, and cuDNN is a third faster on an H100. With a softcap those rows
are an H200's.
"""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

Rates = Mapping[str, tuple[float, float]]

LONG_MASK = 1024  # keys a query
VENDOR_ROWS = 2**17  # queries x heads: with fewer, launching a vendor's kernel takes longer than running ours

RATES: dict[str, tuple[float, float]] = {
    "sm90/triton/rectangles/64": (447, 399),
    "sm90/triton/rectangles/128": (524, 439),
    "sm90/triton/rectangles/256": (564, 108),
    "sm90/triton/packed/64": (356, 350),
    "sm90/triton/packed/128": (437, 372),
    "sm90/triton/packed/256": (475, 104),
    "sm90/triton/long/64": (439, 383),
    "sm90/triton/long/128": (437, 372),
    "sm90/triton/long/256": (540, 108),
    "sm90/triton/short/64": (300, 280),
    "sm90/triton/short/128": (306, 264),
    "sm90/triton/short/256": (305, 87),
    "sm90/triton/rectangles/64/softcap": (162, 153),
    "sm90/triton/rectangles/128/softcap": (272, 284),
    "sm90/cudnn/rectangles/64": (455, 414),
    "sm90/cudnn/rectangles/128": (599, 535),
    "sm90/cudnn/rectangles/256": (656, 390),
    "sm90/triton/rectangles/192x128": (409, 85),
    "sm90/triton/packed/192x128": (358, 84),
    "sm90/triton/long/192x128": (407, 87),
    "sm90/triton/short/192x128": (227, 68),
    "sm90/cudnn/rectangles/192x128": (605, 476),
    "sm90/fa4/rectangles/64": (533, 528),
    "sm90/fa4/rectangles/128": (645, 608),
    "sm90/fa4/rectangles/256": (788, 338),
    "sm90/fa4/packed/64": (472, 453),
    "sm90/fa4/packed/128": (574, 506),
    "sm90/fa4/packed/256": (652, 313),
    "sm90/fa4/long/64": (460, 467),
    "sm90/fa4/long/128": (620, 510),
    "sm90/fa4/long/256": (716, 335),
    "sm90/fa4/short/64": (290, 220),
    "sm90/fa4/short/128": (335, 217),
    "sm90/fa4/short/256": (413, 190),
    "sm90/fa4/rectangles/192x128": (756, 480),
    "sm90/fa4/packed/192x128": (621, 430),
    "sm90/fa4/long/192x128": (660, 463),
    "sm90/fa4/short/192x128": (373, 284),
    "sm90/fa4/rectangles/64/softcap": (219, 202),
    "sm90/fa4/rectangles/128/softcap": (314, 401),
    "sm90/triton/rectangles/256/softcap": (370, 100),
    "sm90/triton/packed/256/softcap": (323, 100),
    "sm90/triton/long/256/softcap": (355, 99),
    "sm90/triton/short/256/softcap": (218, 86),
    "sm90/triton/rectangles/192x128/softcap": (290, 76),
    "sm90/triton/packed/192x128/softcap": (257, 73),
    "sm90/triton/long/192x128/softcap": (287, 77),
    "sm90/triton/short/192x128/softcap": (172, 60),
    "sm90/fa4/rectangles/256/softcap": (468, 354),
    "sm90/fa4/packed/256/softcap": (422, 318),
    "sm90/fa4/long/256/softcap": (445, 342),
    "sm90/fa4/short/256/softcap": (349, 223),
    "sm90/fa4/rectangles/192x128/softcap": (364, 387),
    "sm90/fa4/packed/192x128/softcap": (326, 349),
    "sm90/fa4/long/192x128/softcap": (343, 376),
    "sm90/fa4/short/192x128/softcap": (228, 247),
}


def key_of(kernel: str, arch: tuple[int, int], mask: str, dims: tuple[int, int], softcap: bool = False) -> str:
    """The key of a row; `dims` are the head dim and the value dim."""
    width = f"{dims[0]}x{dims[1]}" if dims[0] != dims[1] else 1 << (dims[0] - 1).bit_length()
    return f"sm{arch[0]}0/{kernel}/{mask}/{width}{'/softcap' * softcap}"


def rate(
    kernel: str, arch: tuple[int, int] | None, mask: str, dims: tuple[int, int], backward: bool, softcap: bool = False
) -> float | None:
    """The measured rate of a kernel, or None where it was not measured."""
    if arch is None:
        return None
    either = dims, (max(dims), max(dims))
    rows = [RATES.get(key_of(kernel, arch, mask, each, softcap)) for each in either]
    return next((row[backward] for row in rows if row is not None), None)


def mask_of(lengths: np.ndarray, causal: bool, window: int | None, alone: bool) -> str:
    """The mask of a call that is not rectangles; `lengths` [rows, documents] are those of its
    documents; `alone`: on one device, and all batch rows have the same."""
    if alone and (window is None or lengths.size == 1):
        return "packed"
    keys = lengths / 2 if causal else lengths
    if window is not None:
        keys = np.minimum(keys, window)
    return "long" if (keys * lengths).sum() >= LONG_MASK * lengths.sum() else "short"


def save(rates: Rates, path: str | Path) -> None:
    Path(path).write_text(json.dumps({key: list(row) for key, row in sorted(rates.items())}, indent=1) + "\n")


def load(path: str | Path) -> Rates:
    """The rows of a file that `save` wrote."""
    rows: Any = json.loads(Path(path).read_text())
    if isinstance(rows, dict) and all(map(is_row, rows.values())):
        return {key: (row[0], row[1]) for key, row in rows.items()}
    raise ValueError(f"{path}: expected for each key two rates above 0, [forward, backward], as `ringattn tune` writes")


def is_row(row: Any) -> bool:
    """Whether these are two rates."""
    return isinstance(row, list) and len(row) == 2 and all(type(x) in (int, float) and 0 < x < inf for x in row)


def use(path: str | Path) -> None:
    """Add the rows of a file to the table. Every rank must do so, before its first call."""
    from ringattn.kernels import select

    RATES.update(load(path))
    select.cache_clear()
