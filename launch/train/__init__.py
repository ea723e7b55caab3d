"""Training: `ringattn train`.

start.py                      the command: starts the ranks of a configuration (configured.py), sums up, draws
trainer.py                    what every rank does; model.py, data.py, checkpoint.py, metrics.py serve it
torchrun.py, ray.py           who starts ranks, here or on many nodes
estimate.py                   memory and flops, counted beforehand: the dry run
"""
