"""Layers: rotary positions depend on distances alone, and a layer over ranks is the layer on one device."""

from copy import deepcopy

import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.masks.spec import AttentionSpec
from ringattn.models.nn import Attention, rope, rope_angles


def test_rope_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def product(i: int, j: int) -> float:
        turned = [rope(x, *rope_angles(torch.tensor([p]), 16)) for x, p in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    for far in (0, 1000, 10**6, 10**8):  # angles in float64: exact where float32 positions would already be rounded
        assert abs(product(far + 7, far) - product(7, 0)) < 2e-6


def test_rope_keeps_the_dtype_and_turns_in_float32():
    x = torch.randn(1, 3, 2, 8)
    cos, sin = rope_angles(torch.arange(3), 8)
    assert torch.equal(rope(x.bfloat16(), cos, sin), rope(x.bfloat16().float(), cos, sin).bfloat16())
    assert torch.equal(rope(x, cos, sin)[:, 0], x[:, 0])


def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(32, heads=4, kv_heads=2, head_dim=8, spec=AttentionSpec(window=20))


def test_a_layer_over_ranks_is_the_layer_on_one_device():
    x, dout = torch.randn(2, 2, 45, 32, generator=torch.Generator().manual_seed(1))
    single, whole = layer(), x.clone().requires_grad_()
    untouched = deepcopy(single)
    expected = single(whole)
    expected.backward(dout)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=45, heads=(4, 2), head_dim=8)
        mine, local = deepcopy(untouched), plan.shard(x).requires_grad_()
        out = mine(local, plan)
        out.backward(plan.shard(dout))
        shares = {n: p.grad for n, p in mine.named_parameters()}
        return plan.unshard(out.detach()), plan.unshard(local.grad), shares

    results = run(one_rank, ring=2, ulysses=2)
    for out, dx, _ in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(dx, whole.grad, rtol=0, atol=1e-6)
    for name, weight in single.named_parameters():
        torch.testing.assert_close(sum(shares[name] for *_, shares in results), weight.grad, rtol=0, atol=1e-5)
