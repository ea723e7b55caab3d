"""Rows of figures: read from a file, one JSON object a line, and shown as a table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """The file's lines, each one JSON object."""
    rows: list[Row] = []
    if not path.is_file():
        run = path / "metrics.jsonl"
        raise ValueError(f"{path} is no file; did you mean {run}?" if run.is_file() else f"{path} is no file")
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            row = json.loads(line.strip() or "{}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not an object: {line[:60]}")
        rows += [row] if row else []
    if not rows:
        raise ValueError(f"{path} has no lines")
    return rows


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as aligned text; numbers to four significant places."""
    cells = [[*columns], *([cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
