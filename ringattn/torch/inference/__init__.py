"""Attention against a cache that is spread over ranks. Read function.py first.

function.py   prefill and decode: what travels, and how partials are merged
call.py       bound calls: their checks, their kernels, and attention to the keys that a rank holds
cache.py      KVCache
chunk.py      what the queries of a chunk see of a cache, as intervals
"""
