"""Gated linear attention over ranks. Read public.py first, then call.py, function.py and states.py."""
