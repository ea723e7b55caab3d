"""Attention over ranks. Read public.py first, then call.py, function.py, ring.py and steps.py.

public.py   the public function; where ops are traced, it is an op
function.py   the forward and the backward pass of a call
call.py       what is decided before a call runs, once for each kind of call
steps.py      the steps of one rank, and the kernel that runs them
ring.py       the executor of a ring; gather.py and ulysses.py, what runs instead of it or around it
"""
