"""Attention over devices in JAX; ringattn.torch has the same names."""
