"""Who holds what, and who meets whom: a notebook as a script (cells start with # %%).

python examples/who_holds_what.py [FOLDER]

Change the numbers in the first cell and look again: another length, layout, window or packing of documents. It needs
no ranks and no GPU, since plans, layouts and masks are plain values.
"""

# %% What to look at
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import ringattn as ra
from ringattn.launch.commands.plot import RANKS as COLORS
from ringattn.launch.commands.plot import STYLE, save
from ringattn.layouts.layout import LAYOUTS, Layout
from ringattn.masks.bands import bounds_at, families
from ringattn.plans.cost import seen_pairs

TOKENS, RANKS = 48, 4
SPEC = ra.AttentionSpec(causal=True, window=None)
DOCS = ra.Docs.from_lengths([14, 5, 21, 8])
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

# %% The mask: every query sees one interval of keys
begin, end = bounds_at(*families(SPEC, TOKENS, docs=DOCS), np.arange(TOKENS))
for t in (0, 13, 14, 40):
    print(f"query {t} sees keys {begin[0, t]} to {end[0, t] - 1}")

# %% Who holds which tokens, by layout; a row of the mask has the colour of the rank that holds its query
layouts = [Layout(name, TOKENS, RANKS) for name in LAYOUTS]
layouts.append(ra.Plan(TOKENS, ring=RANKS, layout="balanced", docs=DOCS, work=SPEC).tokens)
with matplotlib.rc_context(STYLE):  # readable on light and on dark pages
    figure = Figure(figsize=(3 * len(layouts), 3.6), layout="constrained")
    for ax, layout in zip(figure.subplots(1, len(layouts)), layouts, strict=True):
        for rank in range(RANKS):
            for t in layout.positions(rank):
                ax.add_patch(Rectangle((begin[0, t], t), end[0, t] - begin[0, t], 1, color=COLORS[rank], lw=0))
                ax.add_patch(Rectangle((t, -3), 1, 2, color=COLORS[rank], lw=0))
        ax.set(title=layout.name, xlim=(0, TOKENS), ylim=(TOKENS, -3), xlabel="keys", ylabel="queries", aspect="equal")
    ranks = [Patch(color=COLORS[r], label=f"rank {r}") for r in range(RANKS)]
    figure.legend(handles=ranks, loc="outside lower center", ncols=RANKS)
    save(figure, FOLDER / "who-holds-what.svg")

# %% How much work each rank has, and with whose keys: rows are ranks, columns the ranks whose keys they see
for layout in layouts:
    counts = seen_pairs(layout, layout, SPEC, DOCS)
    busiest = counts.sum(1).max() / counts.sum(1).mean()
    print(f"\n{layout.name}: the busiest rank has {busiest:.2f} x the mean work; pairs of queries and keys:")
    print(counts)

# %% What a plan does with these documents, and what it expects
plan = ra.plan(seq_len=131072, heads=(32, 8), head_dim=128)
print(f"\n{plan.explain()}")
