"""How fast kernels are, as measured: what "auto" chooses by. Plain data, the same on every rank.

The key of a row is "arch/kernel/mask/width", with "/softcap" after it if there is one. The width is the head dim
rounded up to a power of two, or "192x128" for a head dim of 192 and a value dim of 128; without a row of their own, two
dims have the rates of the larger one. The masks are

    rectangles   every step is a few full or causal rectangles
    packed       documents without a window, or a window without documents, on one device
    long         any other intervals, of at least MIN_KEYS_OF_LONG_MASKS keys a query on average
    short        any other intervals

A row of `rates.json` holds the useful TFLOP/s of long sequences in 16 bits, forward and backward.
`benchmarks/tune.py what=rates` measures them; benchmarks/rates-h200.jsonl and rates-h100.jsonl have the runs behind
it. An H100 gives the same as an H200 within 3%. At head dim 256 and at 192x128 the rows are the mean of both, which
differ by up to a fifth: backward at 256, FlashAttention-4 and cuDNN are equal on an H200, and cuDNN is a third faster
on an H100. With a softcap those rows are an H200's.
"""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

Rates = Mapping[str, tuple[float, float]]

MIN_KEYS_OF_LONG_MASKS = 1024  # keys a query
VENDOR_ROWS = 2**17  # queries x heads: with fewer, launching a vendor's kernel takes longer than running ours


def key_of(kernel: str, arch: tuple[int, int], mask: str, dims: tuple[int, int], softcap: bool = False) -> str:
    """The key of a row; `dims` are the head dim and the value dim."""
    width = f"{dims[0]}x{dims[1]}" if dims[0] != dims[1] else 1 << (dims[0] - 1).bit_length()
    return f"sm{arch[0]}0/{kernel}/{mask}/{width}{'/softcap' * softcap}"


def mask_of(lengths: np.ndarray, causal: bool, window: int | None, alone: bool) -> str:
    """The mask of a call that is not rectangles; `lengths` [rows, documents] are those of its
    documents; `alone`: on one device, and all batch rows have the same."""
    if alone and (window is None or lengths.size == 1):
        return "packed"
    keys = lengths / 2 if causal else lengths
    if window is not None:
        keys = np.minimum(keys, window)
    return "long" if (keys * lengths).sum() >= MIN_KEYS_OF_LONG_MASKS * lengths.sum() else "short"


def save(rates: Rates, path: str | Path) -> None:
    rows = [f" {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rates.items())]
    Path(path).write_text("{\n" + ",\n".join(rows) + "\n}\n")


def load(path: str | Path) -> Rates:
    """The rows of a file that `save` wrote."""
    rows: Any = json.loads(Path(path).read_text())
    if isinstance(rows, dict) and all(map(is_row, rows.values())):
        return {key: (row[0], row[1]) for key, row in rows.items()}
    raise ValueError(
        f"{path}: expected for each key two rates above 0, [forward, backward], as benchmarks/tune.py writes"
    )


def is_row(row: Any) -> bool:
    """Whether these are two rates."""
    return isinstance(row, list) and len(row) == 2 and all(type(x) in (int, float) and 0 < x < inf for x in row)


def use(path: str | Path) -> None:
    """Add the rows of a file to the table. Every rank must do so, before its first call."""
    from ringattn.kernels import select

    RATES.update(load(path))
    select.cache_clear()


RATES: dict[str, tuple[float, float]] = dict(load(Path(__file__).with_name("rates.json")))
