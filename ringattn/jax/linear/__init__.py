"""Gated linear attention over devices: function.py is the public function, device.py what each device does.

states.py is how states travel; documents.py gives every document a state of its own.
"""
