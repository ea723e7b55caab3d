"""Layers, losses, and models of other people.

nn.py, linear.py      modules: attention, streaming attention, layers of linear attention
batch.py              a batch of whole rows as this rank's part of it
loss.py, pieces.py    the mean over all tokens of all ranks, in pieces that fit; recomputed layers
offload.py            what recomputed layers keep waits on the host
hf/                   models and trainers of Hugging Face
"""
