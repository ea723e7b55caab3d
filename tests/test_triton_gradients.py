"""Gradients in one pass equal what torch computes step by step."""

import pytest
import torch

from ringattn.kernels.triton import gradients
from ringattn.kernels.vendor.tiles import stand_in


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_the_sum_is_that_of_torch_in_the_same_order(count, dtype):
    torch.manual_seed(0)
    own, more = torch.randn(2, 37, 3, 20), torch.randn(count, 2, 37, 3, 20)
    expected = own.clone()
    for x in more:
        expected += x
    assert torch.equal(gradients.add_up(own, more, dtype), expected.to(dtype))


@pytest.mark.parametrize("size", [1e-22, 1e-12, 1.0, 1e3])
def test_the_stand_in_is_that_of_torch(size):
    torch.manual_seed(0)
    dout, delta = torch.randn(2, 5, 3, 40) * size, torch.randn(2, 3, 5).transpose(1, 2) * size
    dout[:, 0], dout[:, 1], delta[:, 1] = 0, 0, 0
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    for found, expected in zip(gradients.stand_in(dout, delta, 2.0**-30), stand_in(dout, delta), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def test_parts_that_lie_more_than_two_billion_numbers_apart_are_added():
    size, block = 2**30, 4  # 2 * size is beyond 32 bits; only the pages that are worked on are there
    own, more = torch.ones(block, dtype=torch.int8), torch.empty(2 * size + block, dtype=torch.int8)
    for i in range(3):
        more[i * size : i * size + block] = 10**i
    gradients.launch(gradients.add_kernel, (1,), (own, more, own), (size, 3), BLOCK=block)
    assert own.tolist() == [112] * block
