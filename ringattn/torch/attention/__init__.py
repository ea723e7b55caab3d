"""Attention over ranks. Read function.py first, then call.py, ring.py and steps.py.

function.py   the public function, its forward and its backward pass
call.py       what is decided before a call runs, once for each kind of call
steps.py      the steps of one rank, and the kernel that runs them
ring.py       the executor of a ring; gather.py and ulysses.py, what runs instead of it or around it
compiled.py   the same call as an op, for torch.compile
"""
