"""Gated linear attention over ranks. Read function.py first.

function.py   the public function, its forward and its backward pass
states.py     how states travel from rank to rank
documents.py  one state a document: rows of one document each, which fragments.py cuts
halo.py       the tokens before a shard, for a short convolution
"""
