"""Gated linear attention over devices: function.py is the public function, states.py how states travel."""
