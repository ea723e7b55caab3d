"""Whatever is done to caches, in any order: what attends to them is attention over the tokens that they were given."""

import random

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.function import decode, prefill
from tests.test_cache import MESHES, draw, off

STEPS = 25


def plainly(q, k, v, window):
    """Attention of a row's last tokens over all of its tokens, from the definition."""
    T, S, R = len(q), len(k), q.shape[1] // k.shape[1]
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(R, 1)) * q.shape[-1] ** -0.5
    hidden = (j > i) | (j <= i - (window or S))
    return torch.einsum("hts,shv->thv", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(R, 1))


def lowest(cache):
    """Where its rows can go back to."""
    origin, window = cache.stripes.origin, cache.window
    return np.maximum(np.maximum(cache.start, cache.shared), origin + window - 1 if origin and window else 0)


def story(mesh, seed):
    """Caches and, beside each, its rows as plain tensors [(k, v), ...]; what is done to one is done to the other."""
    choose = random.Random(seed)
    window, block = choose.choice([None, None, 5]), choose.choice([1, 2, 4])
    plan = ra.plan(mesh, seq_len=8)
    sizes = {"max_len": 60, "kv_heads": 2, "head_dim": 8, "value_dim": 4, "dtype": torch.float64}

    def allocate(batch):
        return KVCache.allocate(plan, batch=batch, window=window, room=8, block=block, **sizes)

    steps, caches = [], [(allocate(2), [tuple(x[0, :0] for x in draw(V=4, T=1)[1:])] * 2)]
    for step in range(STEPS):
        at, do = choose.randrange(len(caches)), choose.choice(["prefill", "decode", "decode", "append", "back", "more"])
        cache, rows = caches[at]
        n, low = choose.randint(1, 6), lowest(cache).tolist()
        if do == "more" and len(caches) < 5 and not window:
            copies = choose.randint(1, 2)
            caches.append((cache.fork(copies), [row for row in rows for _ in range(copies)]))
        elif do == "more" and cache.prefix is None and not cache.shared.any():
            order = [choose.randrange(len(rows)) for _ in rows]
            cache.select(torch.tensor(order))
            rows = [rows[i] for i in order]
        elif do == "back":
            lengths = [choose.randint(a, b) for a, b in zip(low, cache.lengths.tolist(), strict=True)]
            cache.truncate(lengths)
            rows = [tuple(x[:n] for x in row) for row, n in zip(rows, lengths, strict=True)]
        elif do != "more" and not cache.overflow(n) and (do != "decode" or cache.lengths.all()):
            q, k, v = (x.double() for x in draw(B=len(rows), T=n, V=4, seed=100 * seed + step))
            rows = [tuple(map(torch.cat, zip(row, new, strict=True))) for row, *new in zip(rows, k, v, strict=True)]
            given = {"spec": ra.AttentionSpec(window=window)}
            if do == "append":
                cache.append(k, v)
            elif do == "decode":
                out = decode(q, k, v, cache, **given)
            else:
                chunk, move, keys = plan.for_length(n), choose.choice(["queries", "keys"]), choose.choice([None, 2])
                mine = [chunk.shard(x) for x in (q, k, v)]
                out = chunk.unshard(prefill(*mine, chunk, cache, move=move, keys=keys, **given))
            steps.append(f"{do} {n} to {at}")
            if do != "append":
                expected = torch.stack([plainly(x, *row, window) for x, row in zip(q, rows, strict=True)])
                assert off(out, expected) <= 1e-12, (seed, steps)
        caches[at] = cache, rows
        assert cache.lengths.tolist() == [len(k) for k, _ in rows], (seed, steps)
    return len(steps)


@pytest.mark.parametrize("seed", range(12))
def test_caches_hold_what_they_were_given(seed):
    assert min(run(lambda mesh: story(mesh, seed), **MESHES[seed % 4])) > 5
