"""Layers, losses, and models of other people.

nn.py, nn_linear.py   modules: attention, streaming attention, layers of linear attention
loss.py, pieces.py    the mean over all tokens of all ranks, in pieces that fit
hf.py                 models and trainers of Hugging Face
"""
