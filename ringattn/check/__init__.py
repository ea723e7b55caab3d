"""Checks of a call by shapes alone. Each returns the first problem, with its numbers and the remedy, or None.

They take arrays of any framework; torch/check.py and jax/check.py check dtypes and devices.
"""
