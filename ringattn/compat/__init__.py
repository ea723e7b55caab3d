"""Modules with the names and signatures of other libraries: one changed import.

ring_flash_attn.py      the functions of ring_flash_attn, and its substitute for transformers' flash_attention_2
yunchang.py             the modules of yunchang
"""
