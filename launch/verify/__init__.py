"""`ringattn verify`: command.py runs cases.py, or calls drawn at random (drawn.py), against float64.

oracle.py, linear_oracle.py   attention and linear attention by their definitions
model.py                      a transformers model over ranks beside itself on one rank
rounding.py                   how far a single element may be off
"""
