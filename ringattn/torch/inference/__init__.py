"""Attention against a cache that is spread over ranks. Read function.py first.

function.py   prefill and decode
call.py       bound calls: their checks and kernels
cache.py      KVCache
chunk.py      what the queries of a chunk see of a cache, as intervals
meeting.py    how queries attend to the keys of all ranks, and how partials are merged
"""
