"""plan.roll: every token's neighbour along the whole sequence, whichever rank holds it."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import ringattn as ra
from ringattn.comms.local import run
from ringattn.layouts.layout import LAYOUTS


def expected(x, shift, dim, docs, fill):
    """Token by token, from the definition."""
    results = torch.full_like(x, fill)
    T = x.shape[dim]
    for row in range(x.shape[0]):
        starts = [0, T] if docs is None else docs.starts[min(row, len(docs.starts) - 1)].tolist()
        document = [sum(start <= p for start in starts) if p < starts[-1] else None for p in range(T)]
        into, out_of = (results, x) if dim == 0 else (results[row].movedim(dim - 1, 0), x[row].movedim(dim - 1, 0))
        for p in range(T):
            if 0 <= p - shift < T and document[p] is not None and document[p] == document[p - shift]:
                into[p] = out_of[p - shift]
    return results


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(
    layout=st.sampled_from(LAYOUTS), ring=st.integers(1, 4), ulysses=st.integers(1, 3), shift=st.integers(-12, 12),
    dim=st.integers(0, 2), rows=st.lists(lengths, min_size=2, max_size=2),
    docs=st.sampled_from(["none", "one", "each"]),
)  # fmt: skip
@example(layout="zigzag", ring=2, ulysses=3, shift=5, dim=1, rows=[[9, 9, 9], [9]], docs="none")
def test_equals_the_definition_in_every_layout(layout, ring, ulysses, shift, dim, rows, docs):
    T = max(1, *map(sum, rows))
    if docs == "each" and dim == 0:
        dim = 1
    packed = {
        "none": None,
        "one": ra.Docs.from_lengths(rows[0], pad_to=T),
        "each": ra.Docs.from_lengths(rows, pad_to=T),
    }
    shape = [2, 3, 2]
    shape[dim] = T
    ids, weights = torch.randint(0, 99, shape), torch.randn(shape, dtype=torch.float64)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T, layout=layout)
        leaf = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        moved = plan.roll(plan.shard(leaf, dim=dim), shift, dim=dim, docs=packed[docs])
        (moved * plan.shard(weights, dim=dim)).sum().backward()
        rolled = plan.roll(plan.shard(ids, dim=dim), shift, dim=dim, docs=packed[docs])
        assert rolled.movedim(dim, 0)[~plan.real_tokens()].eq(-100).all()
        assert torch.equal(plan.roll(plan.shard(ids.byte(), dim=dim), shift, dim=dim, docs=packed[docs]), rolled)
        return plan.unshard(rolled, dim=dim), leaf.grad

    results = run(one_rank, ring=ring, ulysses=ulysses)
    back = expected(weights, -shift, dim, packed[docs], 0.0)
    assert torch.equal(sum(gradient for _, gradient in results), back)
    for result, _ in results:
        assert torch.equal(result, expected(ids, shift, dim, packed[docs], -100))


def test_what_is_sent_is_one_token_a_segment():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=64, layout="zigzag")
        x = plan.shard(torch.arange(64.0)[None])
        before = plan.ring_axis.sent
        plan.roll(x, -1)
        return plan.ring_axis.sent - before

    assert max(run(one_rank, ring=4)) <= 2 * 4  # two segments, of float32


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_jax_arrays(layout):
    jax = pytest.importorskip("jax")
    import ringattn.jax as rj

    plan = ra.plan(rj.init_mesh(ring=2, ulysses=2, devices=jax.devices()[:4]), seq_len=13, layout=layout)
    docs = ra.Docs.from_lengths([[6, 7], [2, 8]], pad_to=13)
    for x, fill in ((torch.randint(0, 99, (2, 13)), -100), (torch.randn(2, 13, 2), 0)):
        for shift, packed in ((-1, None), (-1, docs), (3, None), (3, docs)):
            roll = jax.jit(lambda a, d, s=shift: plan.unshard(plan.roll(plan.shard(a), s, docs=d)))
            result = torch.from_numpy(jax.device_get(roll(x.numpy(), packed)).copy())
            assert torch.equal(result, expected(x.to(result.dtype), shift, 1, packed, fill))
