"""Attention on one device: `reference.py` in plain arrays, the same in tiles, for GPUs and TPUs, and by libraries."""
