"""What got faster or slower: rows of `ringattn bench SUITE out=NEW` beside those of an older file, case by case.

    python benchmarks/compare.py NEW OLD

A case is all of a row that is not a measured number. Of each the first figure of FIGURES is compared; less is better.
The noise band is the range of the file's rows of the case, and at least 3% to either side: measure the old commit
several times into one file, on the same machine.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringattn.launch.rows import Row, read, table

FIGURES = ("ms", "us", "peak_mib", "peak", "MB", "bytes")
ABOUT = ("commit", "torch", "triton", "jax", "warmup", "repeats", "rounds")  # may differ between rows of one case
NOISE = 0.03
COLUMNS = ["case", "figure", "old", "new", "ratio", "verdict"]


def case_of(row: Row) -> dict[str, str]:
    return {n: str(x) for n, x in row.items() if not isinstance(x, (float, list, dict)) and n not in (*ABOUT, *FIGURES)}


def compared(new: Sequence[Row], old: Sequence[Row]) -> list[Row]:
    """A row a case: the range of the old figures, the new one, and whether it lies beyond the noise."""
    before: dict[tuple[Any, ...], list[Row]] = {}
    for row in old:
        before.setdefault(tuple(sorted(case_of(row).items())), []).append(row)
    cases = [case_of(row) for row in new]
    telling = [n for n in dict.fromkeys(n for case in cases for n in case) if len({case.get(n) for case in cases}) > 1]
    rows = []
    for row, case in zip(new, cases, strict=True):
        name = " ".join(case[n] for n in telling if n in case) or "the only case"
        figure = next((n for n in FIGURES if isinstance(row.get(n), (int, float))), "")
        like = before.get(tuple(sorted(case.items())), [])
        values = [r[figure] for r in like if isinstance(r.get(figure), (int, float))]
        if not values:
            rows.append({"case": name, "figure": figure or None, "verdict": "not in the file"})
            continue
        low, high, now = min(values), max(values), row[figure]
        verdict = "more" if now > high * (1 + NOISE) else "less" if now < low * (1 - NOISE) else "within the noise"
        band = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        ratio = now / sorted(values)[len(values) // 2] if any(values) else None
        rows.append({"case": name, "figure": figure, "old": band, "new": now, "ratio": ratio, "verdict": verdict})
    return rows


if __name__ == "__main__":
    print(table(compared(*(read(Path(name)) for name in sys.argv[1:3])), COLUMNS))
