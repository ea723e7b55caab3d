"""A mask as text: queries from top to bottom, keys from left to right."""

from itertools import pairwise

import numpy as np

from ringattn.masks.bands import Families, bounds_at

CELLS, SAMPLES = 32, 8  # cells of a side, and queries of a cell that are looked at


def drawn(families: Families, seq_len: int, key_len: int) -> list[str]:
    """The first row's mask in up to CELLS x CELLS cells: # all pairs are seen, + some, . none."""
    rows, columns = (np.linspace(0, n, min(n, CELLS) + 1).astype(int) for n in (seq_len, key_len))
    lines = []
    for first, stop in pairwise(rows.tolist()):
        at = np.unique(np.linspace(first, stop - 1, SAMPLES).astype(int))
        seen = np.zeros((len(at), len(columns) - 1), int)
        for family in families:
            begin, end = (side[0][:, None] for side in bounds_at(family[:1], at))
            seen += (np.minimum(end, columns[1:]) - np.maximum(begin, columns[:-1])).clip(0)
        level = (seen > 0).max(0) + (seen == np.diff(columns)).min(0).astype(int)
        lines.append("  " + "".join(".+#"[i] for i in level.tolist()))
    return lines
