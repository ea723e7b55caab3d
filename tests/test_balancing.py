"""Sequences of a global batch are dealt to data ranks by their work, and the loss stays the same."""

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms import mesh as meshes
from ringattn.comms.local import run
from ringattn.layouts.balancing import pairs


def drawn(seed, count, tokens):
    """Packed sequences of documents with a long tail."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(int(min(tokens - sum(lengths), max(1, random.lognormal(np.log(tokens / 16), 1.4)))))
        rows.append(lengths)
    return rows


@pytest.mark.parametrize("spec", [None, ra.AttentionSpec(window=512), ra.AttentionSpec(causal=False)], ids=str)
def test_data_ranks_finish_together(spec):
    before, after = [], []
    for seed in range(10):
        batch = drawn(seed, 64, 32768)
        work = np.array([pairs(docs, spec or ra.AttentionSpec()) for docs in batch])
        held = ra.balance(batch, 8, spec)
        assert sorted(i for own in held for i in own) == list(range(64)) and {len(own) for own in held} == {8}
        loads = np.array([work[own].sum() for own in held])
        before.append(work.reshape(8, 8).sum(1).max() / work.sum() * 8)
        after.append(loads.max() / loads.mean())
    assert max(after) < 1.03 and np.mean(after) - 1 < 0.3 * (np.mean(before) - 1) + 1e-3


def test_the_loss_of_all_ranks_is_the_same():
    batch = drawn(1, 8, 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 64, 2, 8) for _ in range(3))

    def loss(mesh, held):
        plan = ra.plan(mesh, seq_len=64, heads=2, head_dim=8)
        data = meshes.axis(mesh, "data")
        total = torch.zeros(())
        for i in held[data.rank]:
            docs = ra.Docs.from_lengths(batch[i])
            out = ra.attention(*(plan.shard(x[i : i + 1], compare=False) for x in (q, k, v)), plan, docs=docs)
            total = total + ra.token_mean(out.square().mean((-1, -2)), plan, over=[data]) / len(held[data.rank])
        return float(total)

    plain = [list(range(4)), list(range(4, 8))]
    assert ra.balance(batch, 2) != plain
    losses = [
        run(lambda mesh, held=held: loss(mesh, held), data=2, ring=2)[0] for held in (plain, ra.balance(batch, 2))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
