"""A plan and what it takes: sizes, machines, the recipe of a call, predictions, simulation, memory."""
