"""Attention over ranks. Read public.py first, then call.py, function.py, ring.py and steps.py."""
