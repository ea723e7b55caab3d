"""Decode and the fused merges: equal to the reference, in the interpreter here and on the GPU where there is one."""

import math

import pytest
import torch

pytest.importorskip("triton")

from ringattn.kernels import partial
from ringattn.kernels.attention import reference
from ringattn.kernels.attention.triton.decode import PROGRAMS, attend, choose_splits, decode_splits
from ringattn.kernels.attention.triton.merge import STACK, merge_stack
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#        B   T  H  G    D    V    S  dtype           softcap
CASES = [
    (2, 1, 4, 2, 64, 64, 130, torch.float32, None),
    (1, 1, 8, 1, 128, 128, 70, torch.float16, None),  # MQA
    (2, 5, 6, 2, 40, 72, 150, torch.float16, None),  # dims that are no powers of two, a value dim of its own
    (1, 16, 2, 1, 96, 32, 90, torch.float32, 30.0),  # speculative decoding
    (1, 3, 2, 2, 256, 256, 40, torch.float16, 5.0),
    (1, 40, 2, 1, 32, 32, 60, torch.float32, None),  # more rows than one tile holds
]


def decode(q, k, v, where, *, scale, softcap=None, splits=None) -> Partial:
    """As `attend`, with a given number of splits."""
    return merge_stack(decode_splits(q, k, v, where, scale, softcap, splits))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def ragged(B: int, T: int, S: int) -> Intervals:
    """Random monotone intervals, another one a row; some are empty, the last never is."""
    begin, end = (torch.randint(0, high, (B, T)).sort(1).values.int() for high in (S // 3, S + 1))
    end[:, -1] = S
    return Intervals(torch.minimum(begin, end).to(DEVICE), end.to(DEVICE))


def problem_of(case: tuple) -> tuple:
    B, T, H, G, D, V, S, dtype, softcap = case
    torch.manual_seed(sum(case[:7]))
    q, k, v = draw(B, T, H, D, dtype=dtype), draw(B, S, G, D, dtype=dtype), draw(B, S, G, V, dtype=dtype)
    return (q, k, v, ragged(B, T, S)), {"scale": D**-0.5, "softcap": softcap}


def worst(got: Partial, expected: Partial) -> tuple[float, float]:
    """The largest error of out and of lse; rows without keys must agree exactly."""
    seen = expected.lse != NEVER
    assert (got.lse[~seen] == NEVER).all() and (got.out[~seen] == 0).all(), "a row without keys is not (0, -inf)"
    assert got.out.isfinite().all() and got.lse[seen].isfinite().all()
    out, lse = (got.out.double() - expected.out).abs().max(), (got.lse - expected.lse)[seen].abs().max()
    return out.item(), lse.item()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_decode_equals_reference(case: tuple, splits: int | None) -> None:
    inputs, options = problem_of(case)
    q, k, v, where = inputs
    expected = reference.attend(q.double(), k.double(), v.double(), where, **options)
    out, lse = worst(decode(*inputs, splits=splits, **options), expected)
    assert out < (2e-6 if case[7] == torch.float32 else 2e-3) and lse < 5e-6, f"{case} splits={splits}: {out} {lse}"


def test_scores_of_ten_thousand_lose_no_digits_between_splits() -> None:
    """With a scale of log(2), by which scores are exact in base 2 as well; and merged into a carry."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randint(-3, 4, s, device=DEVICE).float() / 2 for s in ((1, 3, 2, 16), (1, 90, 1, 16), (1, 90, 1, 16))
    )
    q[..., 0], k[..., 0] = 1e4, 1.0
    where, some = (
        Intervals(*(torch.full((1, 3), x, dtype=torch.int32, device=DEVICE) for x in (0, n))) for n in (90, 60)
    )
    truth = reference.attend(q.double(), k.double(), v.double(), where, scale=math.log(2))
    parts = decode_splits(q, k[:, :60], v[:, :60], some, math.log(2), None, 3)
    got = attend(
        q, k[:, 60:], v[:, 60:], Intervals(some.begin, some.end - 30), scale=math.log(2), carry=merge_stack(parts)
    )
    assert max(worst(got, truth)) <= 2e-6


def test_a_strided_cache_is_read_in_place_and_nothing_past_it() -> None:
    """Keys and values of one interleaved cache, poisoned where no query looks."""
    torch.manual_seed(0)
    cache = draw(2, 100, 2, 2, 80)  # [B, S, k and v, G, D + padding]
    cache[:, 60:], cache[..., 64:] = float("nan"), float("nan")
    k, v = cache[:, :, 0, :, :64], cache[:, :, 1, :, :64]
    q = draw(2, 4, 3, 64).transpose(1, 2)  # [B, T, H, D] from heads-first memory
    where = Intervals(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[0, 0, 5]], [[58, 59, 60]])))
    expected = reference.attend(q.double(), k[:, :60].double(), v[:, :60].double(), where, scale=0.1)
    out, lse = worst(decode(q, k, v, where, scale=0.1, splits=3), expected)
    assert out < 2e-6 and lse < 2e-6


def test_attend_merges_into_a_carry_and_leaves_it_alone() -> None:
    inputs, options = problem_of(CASES[0])
    carry = Partial(draw(2, 1, 4, 64), draw(2, 1, 4))
    before = carry.out.clone()
    expected = reference.attend(*inputs, carry=carry, **options)
    got = attend(*inputs, carry=carry, out_dtype=torch.float64, **options)
    assert got.out.dtype == torch.float64 and torch.equal(carry.out, before)
    assert max(worst(got, expected)) < 2e-6
    assert max(worst(attend(*inputs, **options), reference.attend(*inputs, **options))) < 2e-6


def broken(B: int, T: int, H: int, V: int) -> Partial:
    """A partial with an empty row whose out is garbage, and a row of NaN."""
    part = Partial(draw(B, T, H, V), draw(B, T, H))
    for t, mark in enumerate((NEVER, float("nan"))):
        part.lse[:, t], part.out[:, t] = mark, float("nan")
    return part


@pytest.mark.parametrize("V", [16, 40])
def test_a_merge_in_place_equals_the_formula(V: int) -> None:
    torch.manual_seed(V)
    a, b, sinks = broken(2, 7, 3, V), broken(2, 7, 3, V), draw(3)
    a = Partial(a.out.flip(1), a.lse.flip(1))
    expected = partial.add_sinks(partial.merge(a, b), sinks)
    assert expected.lse.isnan().all(-1).sum() == 4
    got = merge_stack(Partial(b.out[None], b.lse[None]), a, sinks, a)
    assert got.out.data_ptr() == a.out.data_ptr()
    torch.testing.assert_close(got.out, expected.out, atol=1e-6, rtol=0, equal_nan=True)
    torch.testing.assert_close(got.lse, expected.lse, atol=1e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 2, 5, STACK + 3])
def test_merge_stack_equals_merging_one_by_one(n: int) -> None:
    torch.manual_seed(n)
    parts = Partial(draw(n, 1, 3, 2, 16), draw(n, 1, 3, 2) * 5)
    parts.lse[:, :, 0], parts.lse[n // 2, :, 1] = NEVER, NEVER
    carry, sinks = Partial(draw(1, 3, 2, 16), draw(1, 3, 2)), draw(2)
    expected = Partial(*(x.double() for x in carry))
    for i in range(n):
        expected = partial.merge(expected, Partial(parts.out[i].double(), parts.lse[i].double()))
    expected = Partial(*(x.float() for x in partial.add_sinks(expected, sinks)))
    got = merge_stack(parts, carry, sinks)
    torch.testing.assert_close(got.out, expected.out, atol=2e-6, rtol=0)
    torch.testing.assert_close(got.lse, expected.lse, atol=2e-6, rtol=0)
    rounded = merge_stack(parts, carry, sinks, dtype=torch.float16)
    assert torch.equal(rounded.out, got.out.half()) and torch.equal(rounded.lse, got.lse)


def test_merge_stack_of_a_float64_lse_is_as_exact_as_float32() -> None:
    torch.manual_seed(1)
    parts = Partial(draw(3, 1, 2, 2, 16), 1e4 + draw(3, 1, 2, 2).double())
    expected = partial.merge_stack(Partial(*(x.double() for x in parts)))
    for x, y in zip(merge_stack(parts), expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=0)


def test_splits_fill_the_machine_in_whole_waves() -> None:
    slots = 132 * PROGRAMS  # an H200
    for rows, keys in ((8, 131072), (64, 65536), (8, 8192)):
        splits = choose_splits(rows, keys, slots)
        waves = rows * splits / slots
        assert waves <= 1 and waves > (0.9 if keys > 8192 else 0.3), f"{rows} x {keys}: {splits} splits, {waves} waves"
    assert choose_splits(8, 100, slots) == 1 and choose_splits(4096, 1000, slots) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("D,V", [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("T", [1, 5, 16])
def test_decode_in_bfloat16(D: int, V: int, T: int) -> None:
    inputs, options = problem_of((2, T, 8, 2, D, V, 3000, torch.bfloat16, None))
    q, k, v, where = inputs
    expected = reference.attend(q.double(), k.double(), v.double(), where, **options)
    for splits in (None, 1, 13, 200):
        out, lse = worst(decode(*inputs, splits=splits, **options), expected)
        assert out < 1e-2 and lse < 1e-5, f"{splits} splits: {out} {lse}"


@pytest.mark.gpu
def test_offsets_past_two_billion_elements() -> None:
    """Keys whose last element lies beyond 2^31: the end of the cache is what is asked for."""
    S = 2**31 // (8 * 128) + 4096
    k = torch.randn(1, S, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    q = draw(1, 1, 8, 128, dtype=torch.bfloat16)
    where = Intervals(*(torch.tensor([[x]], dtype=torch.int32, device=DEVICE) for x in (S - 512, S)))
    tail = Intervals(where.begin * 0, where.end * 0 + 512)
    expected = reference.attend(*(x.double() for x in (q, k[:, -512:], k[:, -512:])), tail, scale=0.1)
    out, lse = worst(decode(q, k, k, where, scale=0.1), expected)
    assert out < 1e-2 and lse < 1e-5
