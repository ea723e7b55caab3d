"""`ringattn verify`: random calls (drawn.py, cases.py) beside their definitions (oracle.py); or a model (model.py)."""
