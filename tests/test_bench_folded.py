"""A few processes that play many ranks: each receives what it would among so many."""

from types import SimpleNamespace

import pytest
import torch

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.comms.axis import Slices
from ringattn.comms.local import run
from ringattn.launch.bench.folded import Folded, folded, processes_of
from ringattn.launch.bench.ring import Options


def trained(q, k, plan):
    q, k = q.requires_grad_(), k.requires_grad_()
    ra.attention(q, k, k, plan, spec=ra.AttentionSpec(causal=False)).sum().backward()  # all ranks read all


def prefilled(q, k, plan):
    cache = ra.KVCache.allocate(plan, batch=1, max_len=256, kv_heads=2, head_dim=8, dtype=q.dtype, block=4)
    for move in ("keys", "keys", "queries"):
        ra.prefill(q, k, k, plan, cache, move=move)


def scanned(q, k, plan):
    ra.linear_attention(q, q, q, None, plan, scan="gather")


@pytest.mark.parametrize("call", [trained, prefilled, scanned])
def test_what_a_rank_sends_is_what_it_sends_among_so_many(call):
    def bytes_of(mesh):
        plan = ra.plan(mesh, seq_len=64)
        plan = folded(plan, 4) if plan.ring < 4 else plan
        before = plan.ring_axis.sent
        call(torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8), plan)
        return plan.ring_axis.sent - before

    assert run(bytes_of, ring=2) == run(bytes_of, ring=4)[:2]


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_ranks_that_differ_receive_among_them_what_they_send(layout):
    """Of each rank what comes is played; of all together it is what they send."""
    docs = ra.Docs.from_lengths([40, 9, 3, 12, 21, 11])

    def bytes_of(mesh, ranks=4):
        axes, sent = ra.plan(mesh, seq_len=96).axes, []
        for played in range(ranks) if axes.ring.size < ranks else [None]:
            plan = ra.plan(elsewhere("cpu", [(ranks, 1)]), seq_len=96, docs=docs, strategy="ring", layout=layout)
            plan = folded(plan, ranks, played, axes) if played is not None else plan.replace(axes=axes)
            before = plan.ring_axis.sent
            q, k = (torch.randn(1, plan.local_len, h, 8).requires_grad_() for h in (4, 2))
            ra.attention(q, k, k, plan, docs=docs).sum().backward()
            sent.append(plan.ring_axis.sent - before)
        return sum(sent)

    assert sum(run(bytes_of, ring=2)) == 2 * sum(run(bytes_of, ring=4))


@pytest.mark.parametrize("wrong", [{"processes": 3}, {"processes": 1}, {"processes": 2, "ulysses": 2}])
def test_processes_that_cannot_play_all_ranks_are_refused(wrong):
    with pytest.raises(ValueError, match=f"processes={wrong['processes']} cannot play ranks=4"):
        Options(ranks=4, **wrong)
    assert processes_of(Options(ranks=4, processes=2)) == 2


def test_what_a_process_plays_comes_first_of_what_its_peer_shows():
    """Else it would wait for ever for what a rank with more readers shows before."""
    axis = Folded(SimpleNamespace(rank=0, size=2, name="ring", by="", cheap_words=False, hosts=1), size=4, played=2)
    rows = torch.zeros(1, 8, 1, 2)
    _, into = axis.between({3: Slices([rows], (range(4),), after=(5,))})
    assert into[1].after == () and len(into[1]) == 1
