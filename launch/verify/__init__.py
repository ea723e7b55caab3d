"""`ringattn verify`: random calls (cases.py) beside their definitions (oracle.py); or a model (model.py)."""
