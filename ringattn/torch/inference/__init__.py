"""Attention against a cache that is spread over ranks. Read function.py first.

function.py   prefill and decode
cache.py      KVCache
chunk.py      what the queries of a chunk see of a cache, as intervals
meeting.py    how the queries of a prompt attend to the keys of all ranks
exchange.py   how the partials of all ranks are merged
"""
