"""Gradients in one pass equal what torch computes step by step."""

from types import SimpleNamespace

import pytest
import torch

from ringattn.kernels.attention.triton import gradients
from ringattn.kernels.total import Total


def some_parts(dtype: torch.dtype) -> Total:
    """All of [2, 37, 4, 20], of half precision and of `dtype`, and pieces of rows and of heads, also of a total's."""
    torch.manual_seed(0)
    total, inner = (Total(torch.empty(2, rows, 4, 20, dtype=torch.float16)) for rows in (37, 30))
    inner.add(torch.randn(2, 30, 4, 20).half())
    inner.add(torch.randn(2, 10, 2, 20), rows=slice(20, 30), heads=slice(1, 3))
    total.add(torch.randn(2, 37, 4, 20).to(dtype))
    total.add(torch.randn(2, 37, 3, 20).half(), heads=slice(1, None))
    total.add(None)
    total.add(inner, rows=slice(7, None))
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("first", [torch.float32, torch.float16], ids=str)
def test_the_sum_is_that_of_torch_in_the_same_order(first, dtype):
    parts = some_parts(first).terms
    assert [(rows, heads) for _, rows, heads in parts] == [
        ((0, 37), (0, 4)), ((0, 37), (1, 4)), ((7, 37), (0, 4)), ((27, 37), (1, 3))
    ]  # fmt: skip
    result = gradients.add_parts(torch.empty(2, 37, 4, 20, dtype=dtype), parts)
    assert torch.equal(result, some_parts(first).tensor(dtype))
    expected = torch.zeros(2, 37, 4, 20)
    for x, rows, heads in parts:
        expected[:, slice(*rows), slice(*heads)] += x
    assert torch.equal(result, expected.to(dtype))


def test_rows_of_a_sum_are_not_copied_if_a_single_part_covers_them():
    total, results = Total(torch.empty(2, 9, 4, 8, dtype=torch.float16)), torch.randn(2, 5, 4, 8).half()
    total.add(results, rows=slice(2, 7))
    total.add(torch.ones(2, 2, 4, 8).half(), rows=slice(5, 7))
    single = total.rows_at(range(3, 5), torch.float16)
    assert single.data_ptr() == results[:, 1:].data_ptr() and torch.equal(single, results[:, 1:3])
    assert (total.rows_at(range(7, 9), torch.float16) == 0).all() and len(total.terms) == 2
    for at in (range(4, 6), range(1, 3)):  # of two parts; of one and of none
        expected = torch.cat(
            [torch.zeros(2, 2, 4, 8), results[:, :3], results[:, 3:] + 1, torch.zeros(2, 2, 4, 8)], 1
        ).half()
        assert torch.equal(total.rows_at(at, torch.float16), expected[:, at.start : at.stop])
    assert len(total.terms) == 1 and torch.equal(total.tensor(torch.float32), expected.float())
    assert total.rows_at(range(3, 5), torch.float32).dtype == torch.float32
    assert torch.equal(total.rows_at(range(1, 9, 4), torch.float32), expected[:, 1:9:4].float())


def test_what_was_added_up_in_place_is_not_added_again():
    total, first = Total(torch.empty(1, 2, 1, 8)), torch.ones(1, 2, 1, 8)
    total.add(first)
    assert total.running is first
    first += 1
    total.add(first)
    assert (total.tensor(torch.float32) == 2).all() and (total.tensor(torch.float32) == 2).all()
    total.add(torch.ones(1, 2, 1, 8).half())
    assert total.running is None and (total.tensor(torch.float32) == 3).all()
    assert total.running is first and (first == 3).all(), "the sum lies where the first part lay"


def test_a_sum_in_place_writes_only_what_other_parts_touch():
    """As on a GPU, where one pass adds all parts in float32."""
    total, first = Total(torch.empty(1, 400, 4, 20).half()), torch.randn(1, 400, 4, 20).half()
    total.device = SimpleNamespace(type="cuda")
    parts = [(torch.randn(1, n, 4, 20).half(), slice(at, at + n)) for at, n in ((7, 90), (50, 3), (390, 10))]
    expected = first.float()
    total.add(first)
    for x, rows in parts:
        total.add(x, rows)
        expected[:, rows] += x
    first[:, 200:300] = -0.0  # which would be 0.0 after a sum
    expected[:, 200:300] = 0
    result = total.tensor(torch.float16)
    assert torch.equal(result, expected.half()) and result.data_ptr() == first.data_ptr()
    assert torch.signbit(first[:, 200:300]).all()


def test_a_sum_of_another_layout_gets_its_own_memory(monkeypatch):
    """A vendor's gradient has the strides of its inputs, perhaps heads before tokens; as on a GPU."""
    total, x = Total(torch.empty(2, 9, 4, 8)), torch.randn(2, 4, 9, 8).transpose(1, 2)
    monkeypatch.setattr(total, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device, empty=torch.empty: empty(shape, dtype=dtype))
    more = [torch.randn(2, 9, 4, 8) for _ in range(14)]
    expected = x.clone()
    for y in (x, *more):
        total.add(y)
        expected = y.clone() if y is x else expected + y
    kept = x.clone()
    assert torch.equal(total.tensor(torch.float32), expected), "fifteen parts, in their order"
    assert torch.equal(x, kept) and total.running is not x


def test_rows_that_lie_more_than_two_billion_numbers_apart_are_added():
    """Of int8 and never touched between: only the pages that are worked on are there."""
    rows, heads = 2**22 + 1, 2**9  # 2^31 + 2^9 numbers
    part, out = torch.empty(1, rows, heads, 1, dtype=torch.int8), torch.zeros(1, 1, heads, 1, dtype=torch.int8)
    part[:, -1] = 7
    places = tuple(16 * n for n in (1 - rows, 1, 0, heads))
    gradients.launch(
        gradients.add_kernel, (1,), (out, *[part] * gradients.TERMS), (places, 1, heads),
        N=1, D=1, WIDTH=1, ROWS=heads, IN_PLACE=False,
    )  # fmt: skip
    assert (out == 7).all()
