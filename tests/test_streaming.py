"""A layer that takes its sequence as it comes gives what it gives for the whole at once, on any number of ranks."""

from copy import deepcopy
from functools import partial

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models.nn import GatedLinearAttention, StreamingAttention

MESHES = [{"ring": 1}, {"ring": 3}, {"ring": 2, "ulysses": 2}]


def layer(window=None, max_len=64) -> StreamingAttention:
    torch.manual_seed(0)
    spec = ra.AttentionSpec(window=window)
    return StreamingAttention(64, heads=4, kv_heads=2, spec=spec, max_len=max_len)


def tokens(B=2, T=41, seed=1):
    return torch.randn(B, T, 64, generator=torch.Generator().manual_seed(seed))


def off(result, expected):
    return float((result.double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("chunk", [3, 16, 41])
def test_prefill_step_and_forward_agree(sizes, window, chunk):
    x, whole = tokens(), layer(window)
    expected = deepcopy(whole).double()(x.double())

    def one_rank(mesh):
        mine, plan = deepcopy(whole), ra.plan(mesh, seq_len=41)
        trained = plan.unshard(mine(plan.shard(x), plan)).detach()
        outs = []
        for at in range(0, 36, chunk):
            n = min(chunk, 36 - at)
            here = plan.for_length(n)
            outs.append(here.unshard(mine.prefill(here.shard(x[:, at : at + n]), here)))
        outs += [mine.step(x[:, 36:37]), mine.step(x[:, 37:])]  # one token, then several
        streamed = torch.cat(outs, 1)
        mine.reset()
        again = plan.unshard(mine.prefill(plan.shard(x), plan))
        return trained, streamed, again

    for outs in run(one_rank, **sizes):
        assert [off(out, expected) <= 2e-6 for out in outs] == [True] * 3


def test_rows_of_different_lengths_go_on_at_their_own_positions():
    x, more, single = tokens(), tokens(T=2, seed=2), layer()
    single.prefill(x)
    single.cache.truncate([17, 41])
    out = single.step(more)
    for row, kept in enumerate((17, 41)):
        whole = torch.cat([x[row : row + 1, :kept], more[row : row + 1]], 1)
        assert off(out[row : row + 1], single.double()(whole.double())[:, kept:]) <= 2e-6
        single.float()


@pytest.mark.parametrize("make", [partial(layer, max_len=43), lambda: GatedLinearAttention(64, heads=4)])
def test_calls_in_the_wrong_order_are_named_and_change_nothing(make):
    x, single = tokens(), make()
    before = [(lambda: single.step(x[:, :1]), "step before prefill: this layer has seen no prompt")]
    after = [
        (lambda: single.prefill(x[:1]), "x has 1 batch rows, the sequence so far 2; reset"),
        (
            lambda: single.step(x[:, :1].clone().requires_grad_()),
            "x requires gradients, but prefill and step have none",
        ),
    ]
    if isinstance(single, StreamingAttention):
        before += [(lambda: single.prefill(tokens(T=44)), "44 tokens do not fit: rows hold up to 0 of max_len=43")]
        after += [(lambda: single.prefill(x), "41 tokens do not fit: rows hold up to 41 of max_len=43")]
    for prompt, wrong in ((None, before), (x, after), (None, before)):
        single.reset()
        if prompt is not None:
            single.prefill(prompt)
        state = state_of(single)
        for call, says in wrong:
            with pytest.raises(ValueError, match=says):
                call()
            assert state_of(single) == state


def state_of(single):
    """Of attention how many tokens are cached; of a linear layer which tensors it has."""
    if not isinstance(single, StreamingAttention):
        return id(single.state)
    return single.cache and single.cache.lengths.tolist()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_beside_a_window_chunks_may_grow(sizes):
    x, whole = tokens(T=400), layer(window=16, max_len=400)
    expected = deepcopy(whole).double()(x.double())

    def one_rank(mesh):
        mine, plan, outs = deepcopy(whole), ra.plan(mesh, seq_len=10), []
        for at, n in ((0, 10), (10, 300), (310, 7)):
            chunk = plan.for_length(n)
            outs.append(chunk.unshard(mine.prefill(chunk.shard(x[:, at : at + n]), chunk)))
        outs += [mine.step(x[:, t : t + 1]) for t in range(317, 320)] + [mine.step(x[:, 320:])]
        return torch.cat(outs, 1)

    for out in run(one_rank, **sizes):
        assert off(out, expected) <= 2e-6
