"""Attention against a cache that is spread over devices: function.py has prefill and decode, cache.py the cache."""
