"""Rotary positions: products depend on distances alone. Layers: test_nn_linear.py."""

import torch

from ringattn.models.nn import rope, rope_angles


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
