"""Other people's kernels behind our signature: a step cut into full and causal tiles, one vendor call a tile.

A file is a vendor. It says which problems it refuses, and brings `forward` and `backward` of one tile; `tiles.py` runs
the tiles and merges what they give. Conventions differ (which dim is which, what an empty row's lse is) and end here.
"""
