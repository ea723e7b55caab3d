"""A batch of whole rows as each rank's part of it gives one rank's loss and gradient."""

import pytest
import torch
from torch.nn import functional as F

import ringattn as ra
from ringattn.comms.local import run

V, WIDTH = 11, 16
CASES = {
    "whole rows": (None, None, False),
    "packed and padded": ([[20, 3, 9], [5, 20]], 37, False),
    "all rows as one, dealt out": ([[20, 3, 9], [5, 20]], 37, True),
    "trees": ("tree", 37, False),
}


@pytest.mark.parametrize("name", CASES)
def test_local_batches_give_one_ranks_loss_and_gradient(name):
    lengths, pad_to, deal = CASES[name]
    docs = None if lengths is None else ra.Docs.from_lengths(lengths, pad_to=pad_to) if lengths != "tree" else (
        ra.Docs.tree([[10, 6, 7], [20, 9, 0]], [[-1, 0, 1], [-1, -1, -1]], pad_to=37))  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (2, 37), generator=g)
    weights = torch.randn(V, WIDTH, generator=g), torch.randn(WIDTH, V, generator=g)

    def loss_of(mesh, **asked):
        embed, head = (w.clone().requires_grad_() for w in weights)
        mine = ra.local_batch(tokens, ra.plan(mesh, seq_len=37), docs=docs, **asked)
        x = embed[mine.tokens].unflatten(-1, (2, 8)) * (1 + 0.01 * mine.positions[:, None, None])
        out = ra.attention(x, x, x, mine.plan, docs=mine.docs)
        loss = mine.loss(out.flatten(2) @ head)
        loss.backward()
        return loss.item(), embed.grad + 0, head.grad + 0, mine

    ranks = run(lambda mesh: loss_of(mesh, deal=deal), ring=2)
    alone = run(lambda mesh: loss_of(mesh, deal=False), ring=1)[0]
    assert all(abs(each[0] - alone[0]) < 1e-5 for each in ranks)
    for i in (1, 2):
        torch.testing.assert_close(sum(each[i] for each in ranks), alone[i], atol=1e-5, rtol=1e-5)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):  # bytes have no value for what is ignored
        for labels in (None, tokens) if lengths != "tree" else (tokens,):
            plan, given = ra.plan(seq_len=37), {"docs": docs, "deal": deal}
            mine = ra.local_batch(tokens.to(dtype), plan, labels=None if labels is None else labels.to(dtype), **given)
            assert torch.equal(mine.labels, ra.local_batch(tokens, plan, labels=labels, **given).labels)
    assert {each[3].plan.layout for each in ranks} == ({"balanced"} if deal else {"zigzag"})
    if lengths is None:  # as everybody shifts
        expected = F.pad(tokens[:, 1:], (0, 1), value=-100)
        assert torch.equal(alone[3].labels, expected)
