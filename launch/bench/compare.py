"""What got faster or slower: a run's rows beside those of a file, case by case (`ringattn bench SUITE compare=OLD`).

A case is all of a row that is not a measured number. Of each the first figure of FIGURES is compared; less is better.
The noise band is the range of the file's rows of the case, and at least 3% to either side: measure the old commit
several times into one file, on the same machine.
"""

from collections.abc import Sequence
from typing import Any

from ringattn.launch.rows import Row

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
        verdict = "slower" if now > high * (1 + NOISE) else "faster" if now < low * (1 - NOISE) else "within the noise"
        if figure not in ("ms", "us"):
            verdict = {"slower": "more", "faster": "less"}.get(verdict, verdict)
        band = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        middle = sorted(values)[len(values) // 2]
        ratio = now / middle if middle else None
        rows.append({"case": name, "figure": figure, "old": band, "new": now, "ratio": ratio, "verdict": verdict})
    return rows
