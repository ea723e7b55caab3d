"""`ringattn verify`: command.py compares random calls (drawn.py) with their definitions in float64 (oracle.py).

cases.py     one call with every argument, on torch or, on devices.py, on JAX arrays
model.py     a transformers model over ranks beside itself on one rank
"""
