"""Gated linear attention over ranks. Read public.py first, then function.py.

public.py     the public function; where ops are traced, it is an op
function.py   the forward and the backward pass of a call
call.py       bound calls: their checks, their kernel, and the passage of a state
states.py     how states travel from rank to rank
documents.py  one state a document: rows of one document each
chains.py     how states travel where only some documents go on from rank to rank
halo.py       the tokens before a shard, for a short convolution
"""
