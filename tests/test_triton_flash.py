"""The Triton flash kernels equal the reference in float64: in the interpreter, and the same cases on a GPU."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from ringattn.kernels.attention import reference
from ringattn.kernels.attention.triton import KERNEL, attend, row_delta
from ringattn.kernels.attention.triton.backward import spans
from ringattn.kernels.attention.triton.table import TABLE, Tile, Tiles, load, save
from ringattn.kernels.families import over_families
from ringattn.kernels.intervals import Intervals, stack
from ringattn.kernels.partial import Partial
from ringattn.kernels.rows import row_delta as row_delta_of
from ringattn.masks.bands import bounds_at, families
from ringattn.masks.spec import AttentionSpec, Docs
from tests.cases import gradients
from tests.test_triton_linear import some_quick

attend_backward = partial(gradients, KERNEL)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SMALL = {f"cpu/{bits}/{width}": Tiles(*[Tile(32, 32, 4, 1)] * 3) for bits in (16, 32) for width in (32, 64, 128, 256)}
DESCRIBED = {key: Tiles(*[Tile(32, 16, 4, 1, tma=True)] * 3) for key in SMALL}
MOST = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.2e-2}  # relative error in norm: a few roundings of the dtype


@dataclass(frozen=True)
class Case:
    """A shape, its intervals by name, and what is asked of the kernels."""

    mask: str = "causal"
    B: int = 1
    T: int = 70
    S: int = 70
    H: int = 2
    G: int = 1
    D: int = 32
    V: int = 32
    softcap: float | None = None
    dtype: str = "float32"
    strided: bool = False

    def __str__(self) -> str:
        cap = f"-cap{self.softcap}" if self.softcap else ""
        shape = f"B{self.B}-T{self.T}-S{self.S}-H{self.H}.{self.G}-D{self.D}.{self.V}"
        return f"{self.mask}-{shape}-{self.dtype}{cap}{'-strided' * self.strided}"


def of_spec(case: Case, docs: Docs | None = None, **spec: object) -> tuple[np.ndarray, np.ndarray]:
    return bounds_at(
        *families(AttentionSpec(**spec), case.T, key_len=case.S, docs=docs, key_docs=docs), np.arange(case.T)
    )


def stacked(case: Case, spec: AttentionSpec, docs: Docs | None = None) -> Intervals:
    """The families of a mask, one after the other."""
    sides = [bounds_at(family, np.arange(case.T)) for family in families(spec, case.T, docs=docs)]
    assert len(sides) > 1
    return stack([on_device(*each) for each in sides])


def on_device(begin: np.ndarray, end: np.ndarray) -> Intervals:
    return Intervals(*(torch.from_numpy(np.ascontiguousarray(x).astype(np.int32)).to(DEVICE) for x in (begin, end)))


def intervals(case: Case) -> Intervals:
    """The case's begin and end, [rows, T], perhaps of several families."""
    if case.mask == "first":
        return stacked(case, AttentionSpec(window=19, first=9))
    if case.mask == "near spans":
        spans = Docs.from_lengths([50, case.T - 50], spans=[(7, 29), (60, 66)])
        return stacked(case, AttentionSpec(window=11, first=3), spans)
    if case.mask == "tree":
        return stacked(case, AttentionSpec(), Docs.tree([30, 15, 20, case.T - 65], [-1, 0, 0, 2]))
    rng = np.random.default_rng(0)
    t = np.arange(case.T)
    if case.mask == "causal":
        begin, end = of_spec(case)
    elif case.mask == "full":
        begin, end = of_spec(case, causal=False)
    elif case.mask == "window":
        begin, end = of_spec(case, window=19)
    elif case.mask == "docs":  # several short documents in one block, one that crosses blocks, and padding
        begin, end = of_spec(case, docs=Docs.from_lengths([3, 1, 7, 45, 2], pad_to=case.T))
    elif case.mask == "own":  # a single key for every query
        begin, end = np.minimum(t, case.S - 1)[None], np.minimum(t, case.S - 1)[None] + 1
    elif case.mask == "none":
        begin = end = np.full((1, case.T), case.S // 2)
    elif case.mask == "late":  # whole blocks of queries see nothing, then a causal rest: a ring step of later keys
        begin, end = np.zeros((1, case.T)), np.clip(t[None] - 40, 0, case.S)
    elif case.mask == "striped":  # every other query gains a key, and the first sees none
        begin, end = np.zeros((1, case.T)), (t[None] // 2).clip(0, case.S)
    elif case.mask == "random":  # any monotone intervals, each batch row its own, some of them empty
        begin = np.sort(rng.integers(0, case.S, (case.B, case.T)), 1)
        end = np.sort(rng.integers(0, case.S + 1, (case.B, case.T)), 1)
        end = np.maximum(end, begin * (rng.random((case.B, 1)) < 0.5))
    else:
        raise AssertionError(case.mask)
    return on_device(begin, end)


def draw(case: Case) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout in the case's dtype; with `strided`, views of one tensor whose heads come before its tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((case.T, case.H, case.D), (case.S, case.G, case.D), (case.S, case.G, case.V), (case.T, case.H, case.V))
    drawn = [torch.randn(case.B, *shape, generator=generator) for shape in shapes]
    if case.strided:
        drawn = [torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]] for x in drawn]
    return tuple(x.to(DEVICE, getattr(torch, case.dtype)) for x in drawn)


def distance(result: torch.Tensor, truth: torch.Tensor, floor: float = 0.0) -> float:
    """|found - truth| / |truth|; a truth that vanishes counts as one of tenths, or of the norm `floor`."""
    assert result.isfinite().all(), f"{int((~result.isfinite()).sum())} values are not finite"
    floor = max(floor, 0.1 * max(1, truth.numel()) ** 0.5)
    return ((result.double() - truth).norm() / truth.norm().clamp(min=floor)).item()


def truth_of(case: Case, where: Intervals, tensors: tuple[torch.Tensor, ...], carry: Partial | None = None) -> tuple:
    """(partial, gradients) in float64."""
    q, k, v, dout = (x.double() for x in tensors)
    options = {"scale": case.D**-0.5, "softcap": case.softcap}
    part = carry
    for family in where.families:
        part = reference.attend(q, k, v, family, carry=part, **options)
    delta = (part.out * dout).sum(-1)
    each = [reference.attend_backward(q, k, v, family, dout, part.lse, delta, **options) for family in where.families]
    return part, [sum(grads) for grads in zip(*each, strict=True)]


def check(case: Case, table: dict[str, Tiles] | None) -> None:
    """Forward, lse and all three gradients against float64; empty rows give 0, -inf and 0."""
    where, tensors = intervals(case), draw(case)
    q, k, v, dout = tensors
    (out, lse), grads = truth_of(case, where, tensors)
    options = {"scale": case.D**-0.5, "softcap": case.softcap, "table": table}
    many = over_families(KERNEL)
    forward, backward = (many.attend, partial(gradients, many)) if where.also else (attend, attend_backward)
    result = forward(q, k, v, where, **options)
    assert torch.equal(result.lse == -torch.inf, lse == -torch.inf)
    seen = lse > -torch.inf
    assert (result.out[~seen] == 0).all()
    most = MOST[case.dtype]
    assert distance(result.out, out) <= most, ("out", distance(result.out, out))
    assert distance(result.lse[seen], lse[seen]) <= 3e-6, ("lse", distance(result.lse[seen], lse[seen]))
    delta = row_delta(out.to(q.dtype), dout)
    found_grads = backward(q, k, v, where, dout, lse.float(), delta, **options)
    floor = 0.1 * max(x.norm().item() for x in grads)  # a single key's gradient is what is left of terms as large as dv
    for name, x, truth in zip(("dq", "dk", "dv"), found_grads, grads, strict=True):
        assert x.dtype == torch.float32
        assert distance(x, truth, floor) <= most * 2, (name, distance(x, truth, floor))
    if case.mask in ("causal", "late") or ON_GPU:
        by_out = backward(q, k, v, where, dout, lse.float(), None, out=out.to(q.dtype), **options)
        assert all(torch.equal(a, b) for a, b in zip(by_out, found_grads, strict=True)), "delta computed on the way"


CASES = [
    Case("causal"),
    Case("causal", T=65, S=65, H=4, G=2, dtype="float16"),
    Case("causal", H=3, G=1, D=80, V=96),
    Case("causal", D=192, V=128, H=1, T=40, S=40),
    Case("full", T=33, S=97, B=2),
    Case("full", T=1, S=70),
    Case("full", T=40, S=1),
    Case("window", T=100, S=100),
    Case("window", T=100, S=100, dtype="float16", softcap=5.0),
    Case("docs", H=4, G=2),
    Case("docs", softcap=3.0, strided=True, B=2),
    Case("own"),
    Case("none", T=40, S=40),
    Case("late", T=100, S=64),
    Case("striped", B=2, H=4, G=1),
    Case("first"),
    Case("near spans", H=4, G=2),
    Case("tree", T=80, S=80, dtype="float16", softcap=5.0),
    Case("random", B=2, T=101, S=130, H=4, G=2, D=40, V=48),
    Case("random", B=2, T=75, S=60, dtype="float16", strided=True),
]


@pytest.mark.skipif(ON_GPU, reason="the same cases run compiled")
@pytest.mark.parametrize("case", some_quick(CASES, (0, 5, 6, 8, 9, 11, 12, 13, 15, 17, 19)), ids=str)
def test_equals_the_reference_in_the_interpreter(case: Case) -> None:
    check(case, SMALL)


LOADED = [case for case in CASES if case.mask in ("causal", "docs", "random")][::2]


@pytest.mark.skipif(ON_GPU, reason="the same cases run compiled")
@pytest.mark.parametrize("case", some_quick(LOADED, (0,)), ids=str)
def test_descriptors_load_what_pointers_load(case: Case) -> None:
    check(case, DESCRIBED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference_on_a_gpu(case: Case, dtype: str) -> None:
    check(replace(case, dtype=dtype), None)


@pytest.mark.gpu
@pytest.mark.parametrize("key", [key for key in TABLE if key.startswith(("sm90", "sm80"))])
def test_every_entry_of_the_table_is_right_on_a_gpu(key: str) -> None:
    """Each entry at its full width and with a narrower value dim; sm80's are what a newer GPU falls back on."""
    bits, width = (int(x) for x in key.split("/")[1:])
    major = torch.cuda.get_device_capability()[0]
    if key.startswith("sm90") and major != 9:
        pytest.skip(f"entries for capability 9, this GPU has {major}")
    table = {f"sm{major}0/{bits}/{width}": TABLE[key]}
    shape = {"B": 2, "T": 700, "S": 900, "H": 8, "G": 2, "D": width, "V": width}
    for case in (Case("random", **shape), Case("causal", **{**shape, "S": 700, "V": width // 2})):
        for dtype in ("bfloat16", "float16") if bits == 16 else ("float32",):
            check(replace(case, dtype=dtype), table)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_no_less_accurate_than_cudnn(dim: int) -> None:
    """bf16 errors against float64, on the same inputs: at most 1.5 times cuDNN's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = Case("causal", T=2000, S=2000, H=8, G=2, D=dim, V=dim, dtype="bfloat16")
    where, tensors = intervals(case), draw(case)
    (out, _), grads = truth_of(case, where, tensors)
    q, k, v, dout = tensors
    ours = attend(q, k, v, where, scale=dim**-0.5, out_dtype=q.dtype)
    results = (ours.out, *attend_backward(q, k, v, where, dout, ours.lse, row_delta(ours.out, dout), scale=dim**-0.5))
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        theirs = (theirs, *torch.autograd.grad(theirs, inputs, dout.transpose(1, 2)))
    for name, x, y, truth in zip(("out", "dq", "dk", "dv"), results, theirs, (out, *grads), strict=True):
        assert distance(x, truth) <= 1.5 * distance(y.transpose(1, 2), truth), name


@pytest.mark.gpu
def test_the_same_bits_every_run() -> None:
    case = Case("random", B=2, T=700, S=900, H=8, G=2, D=64, V=64, dtype="bfloat16")
    where, (q, k, v, dout) = intervals(case), draw(case)
    runs = []
    for _ in range(3):
        out, lse = attend(q, k, v, where, scale=0.1)
        runs.append((out, lse, *attend_backward(q, k, v, where, dout, lse, row_delta(out, dout), scale=0.1)))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


def test_scores_of_ten_thousand_lose_no_digits_on_their_way_from_step_to_step() -> None:
    """With a scale of log(2), by which scores are exact in base 2 as well; the last keys raise the maximum."""
    torch.manual_seed(0)
    q, k, v = (torch.randint(-3, 4, (1, n, h, 16), device=DEVICE).float() / 2 for n, h in ((24, 2), (60, 1), (60, 1)))
    q[..., 0], k[..., 0], k[:, 45:, :, 0] = 1e4, 1.0, 1.0 + 2**-12
    dout, scale, ranges = (
        torch.randn(1, 24, 2, 16, device=DEVICE),
        math.log(2),
        (slice(0, 20), slice(20, 40), slice(40, 60)),
    )

    def where(keys: int) -> Intervals:
        return Intervals(*(torch.full((1, 24), x, dtype=torch.int32, device=DEVICE) for x in (0, keys)))

    exact = [x.double() for x in (q, k, v)]
    truth = reference.attend(*exact, where(60), scale=scale)
    expected = reference.attend_backward(
        *exact, where(60), dout.double(), truth.lse, row_delta_of(truth.out, dout), scale=scale
    )
    part = None
    for some in ranges:
        part = attend(q, k[:, some], v[:, some], where(20), scale=scale, carry=part, table=SMALL)
    rows = dout, part.lse, row_delta(part.out, dout)
    results = [attend_backward(q, k[:, c], v[:, c], where(20), *rows, scale=scale, table=SMALL) for c in ranges]
    dq, dk, dv = sum(x[0] for x in results), *(torch.cat([x[i] for x in results], 1) for i in (1, 2))
    for name, x, y in zip(("out", "dq", "dk", "dv"), (part.out, dq, dk, dv), (truth.out, *expected), strict=True):
        assert distance(x, y) <= 2e-6, name
    assert float((part.lse - truth.lse).abs().max()) <= 1e-6


@pytest.mark.parametrize("out_dtype", [None, torch.float16])
def test_a_carried_partial_is_merged(out_dtype: torch.dtype | None) -> None:
    """Two halves of the keys, one after the other, equal all of them; rows that only one half reaches included."""
    case = Case("random", B=2, T=80, S=90, H=2, G=1)
    whole, (q, k, v, dout) = intervals(case), draw(case)
    (out, lse), _ = truth_of(case, whole, (q, k, v, dout))
    part = None
    for keys in (slice(0, 50), slice(50, 90)):
        ends = (x.clip(keys.start, keys.stop) - keys.start for x in (whole.begin, whole.end))
        last = keys.stop == 90
        part = attend(
            q, k[:, keys], v[:, keys], Intervals(*ends), scale=case.D**-0.5, carry=part, table=SMALL,
            out_dtype=out_dtype if last else None,
        )  # fmt: skip
    assert part is not None
    assert part.out.dtype == (out_dtype or torch.float32)
    assert torch.equal(part.lse == -torch.inf, lse == -torch.inf)
    assert distance(part.out, out) <= (3e-6 if out_dtype is None else 1e-3)


def test_a_carried_partial_is_updated_in_place_and_a_fresh_one_has_no_stale_memory() -> None:
    case = Case("late", T=100, S=64)
    where, (q, k, v, _) = intervals(case), draw(case)
    held = attend(q, k, v, where, scale=0.2, table=SMALL)
    before = Partial(held.out.clone(), held.lse.clone())
    again = attend(q, k, v, where, scale=0.2, carry=held, table=SMALL)
    assert again.out.data_ptr() == held.out.data_ptr() and again.lse.data_ptr() == held.lse.data_ptr()
    saw = before.lse > -torch.inf
    torch.testing.assert_close(again.lse[saw], before.lse[saw] + np.log(2.0))
    torch.testing.assert_close(again.out, before.out)


def test_gradients_add_up_in_what_is_given() -> None:
    case = Case("window", T=80, S=80, H=4, G=2)
    where, tensors = intervals(case), draw(case)
    q, k, v, dout = tensors
    (out, lse), grads = truth_of(case, where, tensors)
    given = [torch.randn(x.shape, device=DEVICE) for x in (q, k, v)]
    before = [x.double() for x in given]
    delta = row_delta(out.float(), dout)
    results = attend_backward(q, k, v, where, dout, lse.float(), delta, scale=case.D**-0.5, table=SMALL, into=given)
    for x, total, start, truth in zip(results, given, before, grads, strict=True):
        assert x.data_ptr() == total.data_ptr()
        assert distance(x, start + truth) <= 3e-6


def test_padding_that_holds_nan_does_not_leak() -> None:
    """NaN in the queries, keys, values and gradients that no real row reaches changes nothing, and gets no gradient."""
    case = Case("causal", T=70, S=70, H=2, G=1)
    q, k, v, dout = draw(case)
    real = 45
    where = on_device(*bounds_at(*families(AttentionSpec(), real), np.arange(70)))
    clean = [torch.cat([x[:, :real], torch.zeros_like(x[:, real:])], 1) for x in (q, k, v, dout)]
    (out, _), grads = truth_of(case, where, tuple(clean))
    for x in (q, k, v, dout):
        x[:, real:] = torch.nan
    for table in (SMALL, DESCRIBED):
        part = attend(q, k, v, where, scale=case.D**-0.5, table=table)
        assert distance(part.out, out) <= 3e-6
        delta = row_delta(part.out, dout)
        results = attend_backward(q, k, v, where, dout, part.lse, delta, scale=case.D**-0.5, table=table)
        for x, truth in zip(results, grads, strict=True):
            assert (x[:, real:] == 0).all()
            assert distance(x, truth) <= 6e-6


@pytest.mark.parametrize("mask", ["causal", "full", "high"])
def test_blocks_of_keys_begin_a_tile_of_queries_apart(mask: str) -> None:
    """So that they do not all ask for the same one: by themselves under a causal mask, by their turn elsewhere."""
    t = torch.arange(256, dtype=torch.int32, device=DEVICE)[None]
    end = {"causal": t + 1, "full": t * 0 + 256, "high": torch.where(t < 128, 0, 256).int()}[mask]
    lo, hi, zero, head, turn, tail, count, _ = spans(Intervals(t * 0, end), 256, Tile(32, 32, 4, 1))[0].T
    assert (zero == 0).all() and (hi == 256).all() and (head <= turn).all() and (turn <= tail).all()
    first = (lo // 32 + turn) % 8
    if mask == "causal":
        assert (turn == head).all() and (head == 1).all() and first.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    elif mask == "full":
        assert first.tolist() == list(range(8)) and (tail == 8).all()
    else:
        assert sorted(first.tolist()) == [4, 4, 5, 5, 6, 6, 7, 7] and (first.diff() != 0).all() and (lo == 128).all()
    assert (count == (hi - lo) // 32).all()


def test_no_queries_or_no_keys() -> None:
    q, k = torch.randn(1, 5, 2, 32, device=DEVICE), torch.randn(1, 0, 1, 32, device=DEVICE)
    zeros = torch.zeros(1, 5, dtype=torch.int32, device=DEVICE)
    part = attend(q, k, k, Intervals(zeros, zeros), scale=1.0, table=SMALL)
    assert (part.out == 0).all() and (part.lse == -torch.inf).all()
    dq, dk, _ = attend_backward(q, k, k, Intervals(zeros, zeros), q, part.lse, part.lse * 0, scale=1.0, table=SMALL)
    assert (dq == 0).all() and dk.shape == k.shape
    none, k, where = q[:, :0], q[:, :, :1], Intervals(zeros[:, :0], zeros[:, :0])
    for table in (SMALL, DESCRIBED):
        part = attend(none, k, k, where, scale=1.0, table=table)
        assert part.out.shape == (1, 0, 2, 32)
        inputs = (none, k, k, where, none, part.lse, part.lse)
        dq, dk, dv = attend_backward(*inputs, scale=1.0, table=table)
        assert dq.shape == none.shape and (dk == 0).all() and (dv == 0).all()
        given = torch.ones(2, *k.shape, device=DEVICE)
        dk, dv = attend_backward(*inputs, scale=1.0, table=table, into=(None, *given))[1:]
        assert (dk == 1).all() and (dv == 1).all()


def test_threads_compile_and_interpret_one_after_the_other() -> None:
    """Triton's interpreter has one state for all threads: each would see the program number of another."""
    q, k, v = (torch.randn(1, 96, 2, 32, device=DEVICE) for _ in "qkv")
    end = torch.arange(1, 97, dtype=torch.int32, device=DEVICE)[None]
    calls = [lambda: attend(q, k, v, Intervals(end * 0, end), scale=0.2, table=SMALL)] * 4
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            first, *others = [family.result() for family in [pool.submit(call) for call in calls]]
    finally:
        sys.setswitchinterval(before)
    assert all(torch.equal(first.out, other.out) for other in others)
    torch.testing.assert_close(first.out, reference.attend(q, k, v, Intervals(end * 0, end), scale=0.2).out)


def test_a_table_survives_the_disk(tmp_path) -> None:
    save(SMALL, tmp_path / "table.json")
    assert load(tmp_path / "table.json") == SMALL


def test_heads_that_lie_more_than_two_billion_numbers_apart_have_gradients():
    """The third head of a group begins beyond 32 bits; only the pages that hold numbers are there."""
    case = Case(H=3, dtype="float16")
    near = draw(case)
    q, dout = (torch.empty(2**31 + 70 * 32, dtype=x.dtype, device=DEVICE) for x in (near[0], near[3]))
    q, dout = (x.as_strided(near[0].shape, (0, 32, 2**30, 1)) for x in (q, dout))
    q.copy_(near[0])
    dout.copy_(near[3])
    where, rows = intervals(case), torch.zeros(1, 70, 3, device=DEVICE)
    options = {"scale": 0.1, "table": None if ON_GPU else SMALL}
    results = attend_backward(q, *near[1:3], where, dout, rows, rows, **options)
    expected = attend_backward(*near[:3], where, near[3], rows, rows, **options)
    assert all(map(torch.equal, results, expected))
