"""Training: `ringattn train`.

start.py                      the command: reads the configuration (configured.py), starts the ranks, sums up
trainer.py                    what every rank does; model.py, data.py, checkpoint.py, metrics.py serve it
torchrun.py, ray.py           who starts ranks, here or on many nodes
estimate.py                   the memory of a rank, counted beforehand
"""
