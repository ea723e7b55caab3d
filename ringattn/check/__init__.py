"""Checks of a call by shapes alone, in any framework. Each returns the first problem, with the remedy, or None."""
