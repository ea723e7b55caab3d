"""Attention over devices, as in ringattn/torch/attention. Read function.py first.

function.py   the public function and its gradients
steps.py      the steps of one device, and the kernel that runs them
ring.py, gather.py, ulysses.py   how keys and heads travel
"""
