"""FlashAttention-4 on intervals: sequences and lists of tiles here; the kernel itself on a GPU that has it."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import stand_in_fa4
import test_gpu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from benchmarks import tune
from ringattn import kernels
from ringattn.comms.local import run as run_ranks
from ringattn.kernels import Kernel, Problem, gain, rates, select
from ringattn.kernels.attention import reference
from ringattn.kernels.attention.libraries.block_lists import block_lists
from ringattn.kernels.families import over_families
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.kernels.partial import NEVER
from ringattn.kernels.rows import row_delta
from ringattn.kernels.sequences import sequences_of
from ringattn.launch.verify.cases import Case
from ringattn.plans import recipe
from ringattn.torch.attention import call
from ringattn.torch.attention.steps import score_with
from tests.cases import CASES, gradients

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PROBLEM = Problem("cuda", "bfloat16", 128, 128, 32, 8, rectangles=True, arch=(9, 0), rows=2**20)


def some_intervals(rng: np.random.Generator, T: int, S: int, rows: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random sorted intervals, or one of the masks that models have, with empty rows around it now and then."""
    last = np.clip(np.arange(T) + 1 + S - T, 0, S)
    starts = np.concatenate([[0], np.sort(rng.integers(0, T, 3))])
    document = starts[np.searchsorted(starts, np.arange(T), "right") - 1]
    kind = rng.integers(9)
    if kind == 0:
        begin, end = (np.sort(rng.integers(0, S + 1, T)) for _ in range(2))
    elif kind == 1:
        begin, end = np.zeros(T, int), last
    elif kind == 2:
        begin, end = np.zeros(T, int), np.full(T, S)
    elif kind == 3:
        begin, end = np.maximum(last - int(rng.integers(1, 200)), 0), last
    elif kind == 4:
        begin, end = np.minimum(document, S), np.minimum(np.arange(T) + 1, S)
    elif kind == 5:
        begin, end = (
            np.minimum(document, S),
            np.minimum(np.append(starts, T)[np.searchsorted(starts, document, "right")], S),
        )
    elif kind == 6:  # as in a step of a zigzag ring: a causal square, and below it all keys
        half = min(T, S) // 2
        begin, end = np.zeros(T, int), np.where(np.arange(T) < half, np.arange(T) + 1, S)
    elif kind == 7:  # as in a step of a balanced layout: pieces, three of a document, see what lies before them
        piece = np.searchsorted(np.sort(rng.integers(0, T, 5)), np.arange(T), "right")
        edges = np.sort(rng.integers(0, S + 1, 7))
        begin, end = edges[piece // 3 * 3], edges[piece + 1]
    else:
        end = np.sort(rng.integers(0, S + 1, T))
        begin = np.maximum(end - 100, 0)
    if rng.integers(3) == 0:
        at = int(rng.integers(0, T + 1))
        end = np.concatenate([begin[:at], end[at:]]) if rng.integers(2) else np.concatenate([end[:at], begin[at:]])
        end = np.maximum.accumulate(end)
        begin = np.minimum(begin, end)
    if rows == 1:
        return begin[None], end[None]
    other = some_intervals(rng, T, S)
    return np.concatenate([begin[None], other[0]]), np.concatenate([end[None], other[1]])


def intervals(begin: np.ndarray, end: np.ndarray, host: bool) -> Intervals:
    b, e = (torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (begin, end))
    return Intervals(b, e, rectangles_of(begin, end) if host else None, (begin, end) if host else None, made={})


def with_second(where: Intervals, first: int, host: bool) -> Intervals:
    """The same queries see a few of the first keys too, none of them twice."""
    end = np.minimum(where.begin.cpu().numpy(), first)
    return where._replace(also=(intervals(end * 0, end, host),))


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=400, deadline=None)
def test_sequences_are_exactly_the_intervals(seed: int, T: int, S: int) -> None:
    rng = np.random.default_rng(seed)
    begin, end = (x[0] for x in some_intervals(rng, T, S))
    groups, seen, at = sequences_of(begin, end), np.zeros((T, S), bool), np.arange(S)
    edges = np.unique([0, T, *rng.integers(0, T, 3)])  # of causal documents, which are always found
    packed = sequences_of(np.repeat(edges[:-1], np.diff(edges)), np.arange(T) + 1)
    assert packed is not None and sorted(at for each in packed for at in each[0][:, 0]) == edges[:-1].tolist()
    if groups is None:
        return
    for cells, causal, window in groups:
        for first, stop, start, last in cells.tolist():
            own, keys = np.arange(first, stop)[:, None] - stop + last, np.arange(start, last)[None]
            here = (keys <= own) | (not causal)
            seen[first:stop, start:last] = here if window is None else here & (keys >= own - window)
    assert (seen == ((begin[:, None] <= at) & (at < end[:, None]))).all(), (groups, begin, end)


def test_masks_of_models_are_sequences() -> None:
    t = np.arange(40)

    def are(begin: np.ndarray, end: np.ndarray) -> list[tuple[object, ...]]:
        return [(cells.tolist(), causal, window) for cells, causal, window in sequences_of(begin, end)]

    whole, tens = [[0, 40, 0, 40]], [[a, a + 10, a, a + 10] for a in range(0, 40, 10)]
    assert are(t * 0, t + 1) == [(whole, True, None)] and are(t * 0, t * 0 + 40) == [(whole, False, None)]
    assert are(np.maximum(t - 6, 0), t + 1) == [(whole, True, 6)]
    assert are(t // 10 * 10, t + 1) == [(tens, True, None)]
    assert are(t // 10 * 10, t // 10 * 10 + 10) == [(tens, False, None)]
    assert are(np.maximum(t // 20 * 20, t - 3), t + 1) == [([[0, 20, 0, 20], [20, 40, 20, 40]], True, 3)]
    prefix = [([[0, 9, 0, 9]], False, None), ([[9, 40, 0, 40]], True, None)]
    assert are(t * 0, np.maximum(t + 1, 9)) == prefix, "a prefix that sees all of itself"


@pytest.mark.parametrize("seed", range(4))
def test_lists_hold_every_tile_once(seed: int) -> None:
    """Against a dense mask: full tiles have no hidden pair, masked ones a visible pair, others none."""
    rng = np.random.default_rng(seed)
    T, S = (int(x) for x in rng.integers(1, 200, 2))
    begin, end = some_intervals(rng, T, S, rows=1 + seed % 2)
    queries, keys = [(64, 64), (48, 32), (128, 64), (192, 128)][seed % 4]
    grid = -(-T // queries), -(-S // keys)
    for host in (True, False):
        for by_keys in (False, True):
            results = block_lists(intervals(begin, end, host), S, queries, keys, by_keys)
            for row, (b, e) in enumerate(zip(begin, end, strict=True)):
                dense = np.zeros((grid[0] * queries, grid[1] * keys), bool)
                dense[:T, :S] = (b[:, None] <= np.arange(S)) & (np.arange(S) < e[:, None])
                tiles = dense.reshape(grid[0], queries, grid[1], keys).swapaxes(1, 2)
                some, every = tiles.any((2, 3)), tiles.all((2, 3))
                some, every = (some.T, every.T) if by_keys else (some, every)
                for block in range(len(some)):
                    masked, full = (
                        index[row, 0, block, : int(count[row, 0, block])].tolist()
                        for count, index in (results[:2], results[2:])
                    )
                    assert sorted(masked + full) == np.flatnonzero(some[block]).tolist()
                    assert every[block][full].all()


def test_auto_takes_the_fastest_kernel() -> None:
    """By measured rates: here with cuDNN's refusals in the place of FA4, which this machine may lack."""
    fa4 = Kernel("fa4", "ringattn.kernels.attention.libraries.cudnn", skipped_on=("cpu",))
    triton, cudnn = (
        Kernel(n, f"ringattn.kernels.attention.{m}", skipped_on=("cpu",))
        for n, m in (("triton", "triton"), ("cudnn", "libraries.cudnn"))
    )
    both, without = (triton, cudnn, fa4), (triton, cudnn)
    for backward in (False, True):
        assert select(PROBLEM, table=both, backward=backward).name == "fa4"
        assert select(PROBLEM, table=without, backward=backward).name == "cudnn"
        for change in ({"arch": (8, 0)}, {"rows": 1000}, {"deterministic": True}, {"rectangles": False}):
            assert select(replace(PROBLEM, **change), table=both, backward=backward).name == "triton", change


def test_what_is_missing_and_would_be_faster_says_so() -> None:
    missing = Kernel("fa4", "a_package_that_nobody_has")
    says = gain(missing, PROBLEM, "triton") or ""
    assert "ringattn[fa4]" in says and "1.2" in says
    assert gain(Kernel("other", "a_package_that_nobody_has"), PROBLEM, "triton") is None


def test_tune_writes_rates_that_auto_uses(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rates, "RATES", {})
    options = tune.Options(what="rates", tokens=64, heads=2, kv_heads=1, dtype="float32", rounds=1)
    results = tune.rates_of(options, 16, "cpu", ("tiled", "sdpa_cpu"))
    assert {key.split("/")[2] for key in results if "tiled" in key} == {"rectangles", "packed", "long", "short"}
    rates.save({key.replace("sm00/tiled", "sm90/triton"): row for key, row in results.items()}, tmp_path / "rates.json")
    rates.use(tmp_path / "rates.json")
    problem = replace(PROBLEM, head_dim=16, value_dim=16, rectangles=False, mask="long", arch=(9, 0))
    assert problem.rate("triton", backward=True) == results["sm00/tiled/long/16"][1] > 0
    options = replace(options, value_dim=8)
    assert "sm00/tiled/long/16x8" in tune.rates_of(options, 16, "cpu", ("tiled",))
    select.cache_clear()


@pytest.fixture
def fa4_here(monkeypatch):
    """Our module of FA4 over a stand-in for its package."""

    def load() -> object:
        for name, module in stand_in_fa4.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "ringattn.kernels.attention.libraries.fa4", raising=False)
        kernels.lacking.cache_clear()
        score_with.cache_clear()
        return import_module("ringattn.kernels.attention.libraries.fa4")

    yield load
    score_with.cache_clear()
    sys.modules.pop("ringattn.kernels.attention.libraries.fa4", None)
    kernels.lacking.cache_clear()


@pytest.mark.parametrize("split, few", [(1, 1024), (4096, 1024), (1, 0)])
def test_what_is_passed_to_fa4_gives_attention(fa4_here, monkeypatch, split: int, few: int) -> None:
    """Its own forms, lists, merges into a carry, and gradients from out or from delta, without FA4 itself."""
    pytest.importorskip("triton")
    fa4, rng = fa4_here(), np.random.default_rng(0)
    monkeypatch.setattr(fa4, "SPLIT_QUERIES", split)
    monkeypatch.setattr(fa4, "KEYS_A_QUERY", few)
    oracle, kernel = over_families(reference.KERNEL), over_families(fa4.KERNEL)
    for trial in range(14):
        rows = int(rng.integers(1, 3))
        B, (T, S) = max(rows, int(rng.integers(1, 3))), rng.integers(1, 40, 2).tolist()
        where = intervals(*some_intervals(rng, T, S, rows), host=bool(rng.integers(2)))
        where = with_second(where, 3, host=where.host is not None) if trial % 3 == 0 else where
        q, k, v, dout = (torch.randn(B, n, h, 16) for n, h in ((T, 4), (S, 2), (S, 2), (T, 4)))
        options = {"scale": 0.3, "softcap": 2.0 if trial % 2 else None}
        wide = [x.double() for x in (q, k, v)]
        truth = oracle.attend(*wide, where, **options)
        delta = (truth.out * dout).sum(-1)
        expected = gradients(oracle, *wide, where, dout.double(), truth.lse, delta, **options)
        part = kernel.attend(q, k, v, where, **options)
        rows_of = (dout, truth.lse.float())
        by_out = gradients(kernel, q, k, v, where, *rows_of, None, out=truth.out.float(), **options)
        by_delta = gradients(kernel, q, k, v, where, *rows_of, delta.float(), **options)
        for a, b in zip((*part, *by_out, *by_delta), (*truth, *expected, *expected), strict=True):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5, msg=lambda text: f"trial {trial}: {text}")  # noqa: B023
        before = part.lse.clone()
        again = kernel.attend(q, k, v, where, carry=part, **options)
        live = truth.lse > NEVER
        torch.testing.assert_close(again.out.double(), truth.out, atol=2e-5, rtol=2e-5)
        assert torch.allclose(again.lse[live], before[live] + np.log(2), atol=1e-5)


def test_a_backward_pass_takes_sequences_where_lists_would_be_slower(fa4_here) -> None:
    """A long step of a zigzag ring; pieces of documents, as a balanced layout has them: three calls, and no more."""
    fa4, T = fa4_here(), 4096
    q, k, t = torch.zeros(1, T, 1, 8), torch.zeros(1, T, 1, 8), np.arange(T)

    def calls(begin: np.ndarray, end: np.ndarray) -> list[tuple[object, ...]]:
        (step,) = fa4.rectangles_of(intervals(begin[None], end[None], True), q, k, k, True)
        if isinstance(step.mask, fa4.Packed):
            at = [(x.queries, x.keys, x.options.get("causal")) for x in step.mask.calls]
            return [(a.start + step.queries.start, b.start + step.keys.start, b.stop - b.start, c) for a, b, c in at]
        return [(step.queries.start, step.keys.start, step.keys.stop, step.mask.options.get("causal", "lists"))]

    def seen(*pieces: tuple[int, int, int]) -> list[tuple[object, ...]]:
        return calls(*(np.concatenate([[x[i]] * x[0] for x in pieces]) for i in (1, 2)))

    assert calls(t * 0, np.where(t < T // 2, t + 1, T)) == [(T // 2, 0, T, False), (0, 0, T // 2, True)]
    assert calls(t * 0, t + 1) == [(0, 0, T, True)]
    assert calls(t * 0, np.where((t < 1000) | (t >= 2000), t + 1, 1500)) == [(0, 0, T, "lists")], "three masks"
    pieces = seen((500, 0, 0), (1000, 10, 50), (1000, 10, 90), (500, 90, 90), (596, 100, 120), (500, 120, 130))
    assert pieces == [(500, 10, 120, False), (1500, 10, 80, False)], "two of one document"
    assert len(seen((1000, 0, 10), (1000, 0, 20), (2096, 0, 30))) == 3
    assert seen((1000, 0, 10), (1000, 0, 20), (1000, 0, 30), (1096, 0, 40)) == [(0, 0, 40, "lists")], "four calls"
    alone = intervals(*np.array([[[0]], [[9]]]).repeat(T, 2), True)._replace(host=None, made=None)
    assert all(len(fa4.rectangles_of(alone, q, k, k, way)) == 1 for way in (False, True)), "nothing on the host"


def seen_by_pieces(seed: int, tokens: int) -> dict[str, Any]:
    """Random documents dealt to ranks, or at times one sequence, or queries that see none of their own rank's keys."""
    if seed % 9 == 8:
        return {"spec": ra.AttentionSpec(), "layout": "zigzag"}
    window = ra.AttentionSpec(window=tokens // 20, softcap=3.0)
    if seed % 8 == 7:
        return {"spec": window, "layout": "zigzag" if seed % 3 else "contiguous"}
    if seed % 7 == 6:
        low, half = (0, tokens // 4), (tokens // 2, tokens)
        slices = [low, (tokens // 4, tokens // 2), half], [low, half, half], ["causal", "full", "full"]
        return {"mask": ra.Mask.from_slices(*slices, tokens), "layout": "contiguous"}
    rng = np.random.default_rng(seed)
    spec = [ra.AttentionSpec(), ra.AttentionSpec(causal=False), window][seed % 3]
    lengths = rng.multinomial(tokens - 12, rng.dirichlet(np.full(9, 0.6))).tolist()
    return {"spec": spec, "docs": ra.Docs.from_lengths([*lengths, 5], pad_to=tokens), "layout": "balanced"}


def visits_once(fa4, monkeypatch, seed: int, tokens: int, dim: int, like: torch.Tensor, near: float) -> None:
    """Against float64, every third time with a gradient of the lse: pieces get own keys beside those that arrive.

    If backward gets these too, only gradients travel in it, as many bytes as forward. Long ranks visit once in turn.
    """
    visits, asked = [], seen_by_pieces(seed, tokens)
    kept, sent = seed % 4 != 1, [0, 0]
    layout, slices = asked.pop("layout"), "mask" in asked
    plain = seed % 9 == 8  # short shards of two ranks: all keys are kept
    long = not slices and not plain and seed % 3 == 2  # as if a second stream would take too much memory
    ring = 2 if slices or plain else (2, 3, 4)[seed // 2 % 3]
    q, k, v, dout = (torch.randn(1, tokens, h, dim).to(like) for h in (4, 2, 2, 4))
    dlse = torch.randn(1, tokens, 4).to(like.device) if seed % 3 == 0 else None
    sinks = torch.randn(4).to(like) if seed % 2 else None
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    truth = ra.attention(*leaves, **asked, sinks=None if sinks is None else sinks.double().cpu(), return_lse=True)
    back(truth, dout.double().cpu(), None if dlse is None else dlse.double().cpu())
    monkeypatch.setattr(fa4, "KEYS_A_QUERY", 0)
    once, twice = recipe.Recipe.disjoint, seed % (ring + 1) if ring > 2 else -1  # a rank, or none
    each = lambda self, steps, kernel, **_: (  # noqa: E731
        steps if self.rank == twice else once(self, steps, kernel, work=1, sent=0, visits=9)
    )
    monkeypatch.setattr(recipe.Recipe, "disjoint", each)
    monkeypatch.setattr(recipe, "HALVES_FROM", 0 if seed % 2 else recipe.HALVES_FROM)
    monkeypatch.setattr(recipe, "SIDE_STREAM_UP_TO", 0 if long else tokens)
    if seed % 4 == 1:  # as if ranks had different kernels, of which one keeps nothing
        monkeypatch.setattr(call, "has_of", lambda *_: torch.rand(()).item())
    counted = fa4.KERNEL.disjoint._replace(
        write=lambda *x, **score: visits.append("forward") or fa4.write(*x, **score),
        backward=lambda *x, **score: visits.append("backward") or fa4.backward_disjoint(*x, **score),
    )
    monkeypatch.setattr(fa4, "KERNEL", replace(fa4.KERNEL, refuses=lambda _: None, disjoint=counted))
    score_with.cache_clear()

    def one_rank(mesh: object) -> list[torch.Tensor]:
        plan = ra.plan(
            mesh, seq_len=tokens, strategy="ring", layout=layout, kernel="fa4",
            transport=ra.Transport(together=ring), **asked,
        )  # fmt: skip
        own = [plan.shard(x).requires_grad_() for x in (q, k, v)]
        axis = plan.axes.ring
        began = axis.sent
        results = ra.attention(*own, plan, **asked, sinks=sinks, return_lse=True)
        sent[0] += (forward := axis.sent) - began
        back(results, plan.shard(dout), None if dlse is None else plan.shard(dlse))
        sent[1] += axis.sent - forward
        first = next(iter(plan.calls.values())).recipe.backward.steps[0]
        assert not first.queries or bool(first.receive) == (long and kept), "long ranks: pieces first"
        return [plan.unshard(x) for x in (results[0], *(x.grad for x in own))]

    for results in run_ranks(one_rank, ring=ring, device=like.device.type):
        for name, a, b in zip(("out", "dq", "dk", "dv"), results, (truth[0], *(x.grad for x in leaves)), strict=True):
            error = ((a.double().cpu() - b).norm() / b.norm()).item()
            assert error < near, f"{name} is off by {error}"
    assert {*visits} == (set() if plain else {"forward", "backward"} if kept or not long else {"forward"})
    assert sent[1] == (1 if kept else 2) * sent[0]


def back(results: Any, dout: torch.Tensor, dlse: torch.Tensor | None) -> None:
    torch.autograd.backward(results[: 1 + (dlse is not None)], [dout] if dlse is None else [dout, dlse])


SEEDS = [("cpu", seed) for seed in range(9)]
SEEDS += [pytest.param("cuda", seed, marks=pytest.mark.gpu) for seed in range(24)]


@pytest.mark.parametrize(("device", "seed"), SEEDS)
def test_each_query_is_visited_once(fa4_here, monkeypatch, device: str, seed: int) -> None:
    if device == "cpu":
        visits_once(fa4_here(), monkeypatch, seed, 480, 16, torch.zeros(()), 1e-5)
    else:
        like = torch.zeros((), device=device, dtype=torch.bfloat16)
        visits_once(needs_fa4(), monkeypatch, seed, 3000 + 97 * seed, (64, 128)[seed // 6 % 2], like, 8e-3)


def test_threads_call_fa4_one_after_the_other(fa4_here, monkeypatch) -> None:
    """Its compiler keeps what it works on in the module, and mixes up what two threads compile."""
    fa4, inside, most = fa4_here(), [], []

    def slow(*args: object, **options: object) -> tuple[torch.Tensor, ...]:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return stand_in_fa4.forward(*args, **options)

    monkeypatch.setattr(fa4, "_flash_attn_fwd", slow)
    x, end = torch.randn(1, 8, 1, 8), np.arange(1, 9)[None]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(fa4.KERNEL.attend, x, x, x, intervals(end * 0, end, True), scale=1.0)
    assert most == [1] * 4


def needs_fa4() -> object:
    reason = next(k for k in kernels.TABLE if k.name == "fa4").refuses(PROBLEM)
    if reason:
        pytest.skip(reason)
    from ringattn.kernels.attention.libraries import fa4

    return fa4


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256)], ids=str)
def test_any_intervals_equal_float64(monkeypatch, dims: tuple[int, int], part: int) -> None:
    """75 random problems for each of four dims: out, lse, and gradients of out and of the lse.

    Two of five are computed as long ones are, by several of FA4's own masks. A quarter has a softcap.
    """
    fa4 = needs_fa4()
    monkeypatch.setattr(fa4, "SPLIT_QUERIES", 1 if part % 2 else fa4.SPLIT_QUERIES)
    oracle, kernel, (D, V) = over_families(reference.KERNEL), over_families(fa4.KERNEL), dims
    rng = np.random.default_rng((D, part))
    for trial in range(15 * part, 15 * part + 15):
        rows = int(rng.integers(1, 3))
        T, S = (int(x) for x in rng.integers(1, 700, 2))
        B, (H, G) = max(rows, int(rng.integers(1, 3))), (2, 2) if D != V else (4, 2)
        where = intervals(*some_intervals(rng, T, S, rows), host=bool(rng.integers(2)))
        where = with_second(where, 100, host=where.host is not None) if trial % 3 == 1 else where
        generator = torch.Generator("cuda").manual_seed(trial)
        q, k, v, dout = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
            for shape in ((B, T, H, D), (B, S, G, D), (B, S, G, V), (B, T, H, V))
        )
        dlse = torch.randn(B, T, H, device="cuda", generator=generator) if trial % 3 == 0 else None
        options = {"scale": D**-0.5, "softcap": 2.0 if trial % 4 == 2 else None}
        wide = [x.double() for x in (q, k, v)]
        truth = oracle.attend(*wide, where, **options)
        live = sum(family.begin < family.end for family in where.families).bool()[..., None].expand(B, T, H)
        delta = (truth.out * dout).sum(-1) - (0 if dlse is None else dlse)
        expected = gradients(oracle, *wide, where, dout.double(), truth.lse, torch.where(live, delta, 0), **options)
        part = kernel.attend(q, k, v, where, **options)
        assert (part.lse[~live] == NEVER).all() and (part.out[~live] == 0).all(), "empty rows"
        near = 2e-4 if options["softcap"] is None else 4e-3  # FA4's tanh is the processor's: 2^-11 of the softcap
        assert not live.any() or (part.lse - truth.lse)[live].abs().max() < near
        out = truth.out.to(q.dtype)
        rows_delta = None if dlse is None else row_delta(out, dout, dlse)
        results = gradients(
            kernel, q, k, v, where, dout, truth.lse.float(), rows_delta, out=out if dlse is None else None, **options
        )
        for name, a, b in zip(("out", "dq", "dk", "dv"), (part.out, *results), (truth.out, *expected), strict=True):
            # of a query with one key dq is 0; delta in float32 misses that by 2e-5, for numbers of length 16
            error = ((a.double() - b).norm() / b.norm().clamp_min(1e-2)).item()
            assert error < 8e-3, f"trial {trial}, {name} is off by {error}: {rows} rows, {T} queries, {S} keys"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_shared_cases_by_name(case: Case) -> None:
    """With dims that FA4 has; ranks are threads on one GPU."""
    needs_fa4()
    wide = replace(case, head_dim=64, value_dim=64)
    ranks = partial(test_gpu.compare, case=wide, dtype=torch.bfloat16, kernel="fa4")
    sizes = {"ring": case.ring, "ulysses": case.ulysses}
    for off in run_ranks(lambda mesh: ranks(mesh=mesh), timeout=300.0, device="cuda", **sizes):  # it compiles
        assert not off, off


@pytest.mark.gpu
def test_lengths_and_documents_that_change_compile_nothing_new_and_keep_memory_flat() -> None:
    fa4 = needs_fa4()
    rng, spec = np.random.default_rng(0), ra.AttentionSpec()
    peaks, compiled = [], []
    for _ in range(200):
        T = int(rng.integers(5000, 6000))
        docs = ra.Docs.from_lengths([int(x) for x in np.diff(np.unique([0, *rng.integers(1, T, 6), T]))])
        plan = ra.plan(seq_len=T, heads=(32, 8), head_dim=128, kernel="fa4")
        q, k, v = (
            torch.randn(1, T, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (32, 8, 8)
        )
        torch.cuda.reset_peak_memory_stats()
        ra.attention(q, k, v, plan, spec=spec, docs=docs).sum().backward()
        window = ra.AttentionSpec(window=512)
        ra.attention(q, k, v, plan, spec=window, docs=docs).sum().backward()  # no form of its own: lists
        peaks.append(torch.cuda.max_memory_allocated())
        compiled.append(sum(len(f.compile_cache.cache) for f in (fa4._flash_attn_fwd, fa4._flash_attn_bwd)))
        del q, k, v
    assert len(set(compiled[3:])) == 1, compiled
    assert max(peaks[100:]) < 1.25 * max(peaks[5:100]), peaks


@pytest.mark.gpu
def test_what_is_deterministic_repeats_its_bits() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8192, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8, 32))
    plan = ra.plan(seq_len=8192, heads=(32, 8), head_dim=128, deterministic=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(ra.attention(*leaves, plan), leaves, dout)

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, gradients(), first))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 77])
def test_nan_in_a_query_is_nan_in_its_row_alone(window: int | None) -> None:
    fa4 = needs_fa4()
    q, k, v = (torch.randn(1, 512, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    q[0, 5, 0, 3] = torch.nan
    end = np.arange(1, 513)[None]
    begin = end * 0 if window is None else np.maximum(end - window, 0) // 3 * 3
    part = fa4.KERNEL.attend(q, k, v, intervals(begin, end, True), scale=0.1)
    assert part.out[0, 5, 0].isnan().all() and part.lse[0, 5, 0].isnan()
    assert part.out[0, 6:].isfinite().all() and part.out[0, :, 1].isfinite().all()
