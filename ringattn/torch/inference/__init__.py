"""Attention against a cache that is spread over ranks. Read function.py first, then call.py, cache.py and chunk.py."""
