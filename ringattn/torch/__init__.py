"""Attention over ranks in PyTorch; ringattn.jax has the same names."""
