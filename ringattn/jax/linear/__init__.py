"""Gated linear attention over devices: function.py is the public function, states.py how states travel.

documents.py gives every document a state of its own.
"""
