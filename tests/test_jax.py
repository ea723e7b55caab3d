"""The JAX backend equals dense float64 attention on eight CPU devices, with every kernel."""

import dataclasses
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy


import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from ringattn.kernels import select  # noqa: E402
from ringattn.kernels.attention import reference  # noqa: E402
from ringattn.kernels.attention.libraries import jax_cudnn  # noqa: E402
from ringattn.kernels.intervals import Choice, Intervals, Sets  # noqa: E402
from ringattn.launch.verify import oracle  # noqa: E402
from ringattn.launch.verify.cases import Case  # noqa: E402
from ringattn.plans.ranks import Ranks  # noqa: E402
from tests.cases import CASES, FEATURES, relative_error  # noqa: E402

LIMIT = 5e-6
PLACES = len(CASES) // len(FEATURES)

# Every feature on one place, but for those that others have, too; every second place with all features at once.
PARTS = (
    "docs", "softcap", "sinks", "value_dim", "cross_docs", "both_sides", "chunks", "tree", "shared_question", "even",
    "cross", "window", "first", "prefix",
)  # fmt: skip
ON_EACH_PLACE = [CASES[i * PLACES + (5 * i) % PLACES] for i, case in enumerate(FEATURES) if case.name not in PARTS]
ON_EACH_PLACE += [case for case in CASES if case.name == "all_at_once" and case not in ON_EACH_PLACE][::2]


def plan_of(case: Case):
    mesh = rj.init_mesh(ring=case.ring, ulysses=case.ulysses, devices=jax.devices()[: case.ring * case.ulysses])
    return ra.plan(
        mesh, seq_len=case.seq_len, key_len=case.key_len, spec=case.spec, strategy=case.strategy, layout=case.layout,
    )  # fmt: skip


def poisoned(x, plan):
    """The whole sequence in the plan's order, with NaN where the plan pads."""
    sharded = plan.shard(x)
    real = plan.real_tokens()
    return jnp.where(real.reshape(1, -1, *[1] * (x.ndim - 2)), sharded, jnp.nan)


def results(case: Case, given, kernel: str = "auto", device: str = "cpu", dtype=jnp.float32, groups: int | None = None):
    """out, lse and every gradient of the whole sequence, in one program."""
    plan = plan_of(case)
    transport = plan.transport.replace(groups=groups)
    plan = plan.replace(kernel=kernel, axes=Ranks(*plan.axes, "jax", device), transport=transport)

    def everything(q, k, v, sinks, dout, dlse):
        def loss(q, k, v, sinks):
            out, lse = ra.attention(
                poisoned(q, plan), poisoned(k, plan.keys), poisoned(v, plan.keys), plan, spec=case.spec,
                key_docs=case.key_docs, sinks=sinks if case.sinks else None, return_lse=True,
                **{"docs" if case.slices is None else "mask": case.docs},
            )  # fmt: skip
            out, lse = plan.unshard(out), plan.unshard(lse)
            finite = jnp.isfinite(lse)
            return (out * dout).sum() + (jnp.where(finite, lse, 0) * dlse).sum(where=finite), (out, lse)

        (_, (out, lse)), grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
        return out, lse, *grads

    kinds = (*[dtype] * 3, jnp.float32, dtype, jnp.float32)  # q, k, v, sinks, dout, dlse
    arrays = (jnp.asarray(x.float().numpy(), kind) for x, kind in zip(given.values(), kinds, strict=True))
    found = jax.jit(everything)(*arrays)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {n: torch.from_numpy(np.array(x, np.float32)) for n, x in zip(names, found, strict=True)}


def check(case: Case, found, truth, limit: float = LIMIT) -> None:
    for name, expected in truth.items():
        value = relative_error(found[name], expected)
        assert value <= limit, f"{case}: {name} is off by {value:.2e} (limit {limit:.0e})"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, case in enumerate(ON_EACH_PLACE)],
    ids=str,
)
def test_equals_dense_float64(case):
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given), oracle.dense(case, given))


@pytest.mark.parametrize(
    "name",
    [
        "all_at_once-ring2x2-zigzag",
        "all_at_once-ulysses1x4-contiguous",  # the groups share a rank's only key head
        pytest.param("all_at_once-gather4x1-striped", marks=pytest.mark.slow),
    ],
)
def test_heads_in_groups_equal_dense_float64(name):
    """One group arrives, and the results of another leave, beside a third: the heads must come home in their order."""
    case = next(c for c in CASES if str(c) == name)
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given, groups=2), oracle.dense(case, given))


@pytest.mark.parametrize(
    "name",
    [
        "docs_rows-gather2x2-zigzag",
        pytest.param("all_at_once-ring4x1-zigzag", marks=pytest.mark.slow),
        pytest.param("first-ring2x2-striped", marks=pytest.mark.slow),  # these masks are several families of intervals
        *(pytest.param(f"{name}-ring2x2-zigzag", marks=pytest.mark.slow) for name in ("spans_near", "trees")),
    ],
)
def test_the_tpu_kernel_interpreted_equals_dense_float64(name):
    case = next(c for c in CASES if str(c) == name)
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given, kernel="splash"), oracle.dense(case, given))


def seen_by(mask, T, S):
    """The intervals of one mask of cuDNN."""
    t = np.arange(T)
    begin, end = t * 0, t + 1 if "CAUSAL" in mask.kind else np.full(T, S)
    assert "CAUSAL" not in mask.kind or T == S
    if mask.window is not None:
        begin = np.maximum(begin, end - mask.window)
    if mask.starts is not None:
        starts = np.array(mask.starts)
        own = np.searchsorted(starts, t, "right") - 1
        begin, end = starts[own], np.minimum(end, starts[own + 1])
    return Intervals(jnp.asarray(begin[None]), jnp.asarray(end[None]))


MET = set()  # the masks that cuDNN was called with


@pytest.fixture
def dense_cudnn(monkeypatch):
    """cuDNN's place taken by dense calls, which know its masks and nothing else."""

    def fused_forward(q, k, v, mask, scale):
        MET.add((mask.kind, mask.window is not None))
        return reference.attend(q, k, v, seen_by(mask, q.shape[1], k.shape[1]), scale=scale)

    def fused_backward(q, k, v, dout, lse, out, mask, scale):
        seen, delta = seen_by(mask, q.shape[1], k.shape[1]), (dout.astype(lse.dtype) * out).sum(-1)
        grads = reference.attend_backward(q, k, v, seen, dout, lse, delta, scale=scale)
        return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))

    monkeypatch.setattr(jax_cudnn, "fused_forward", fused_forward)
    monkeypatch.setattr(jax_cudnn, "fused_backward", fused_backward)
    monkeypatch.setattr(jax_cudnn, "packs", lambda: True)
    MET.clear()
    other = {}
    other["refuses"] = lambda problem: None if problem.rectangles else "no rectangles"
    monkeypatch.setattr(jax_cudnn, "KERNEL", replace(jax_cudnn.KERNEL, **other))
    select.cache_clear()
    yield
    select.cache_clear()


SIZES = [  # dtype, and the sizes of v, dout and dlse
    (jnp.float32, 1e10, 1.0, 1.0),
    (jnp.float16, 1.0, 1e-3, 30.0),
    (jnp.bfloat16, 1.0, 1e-12, 1.0),
]


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_gradients_by_cudnn_are_right_whatever_the_size_of_dout_beside_that_of_the_lse(case, dense_cudnn):
    """dq and dk against float64, of values, gradients of out and gradients of the lse of any size."""
    dtype, *sizes = case
    rng = np.random.default_rng(0)
    q, k, v, dout = ((rng.normal(size=(1, 16, 1, 8)) * s).astype(dtype) for s in (1, 1, *sizes[:2]))
    dlse = (rng.normal(size=(1, 16, 1)) * sizes[2]).astype(np.float32)
    q64, k64, v64, dout64, dlse64 = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v, dout, dlse))
    s = np.where(np.tri(16, dtype=bool), q64 @ k64.T * 0.3, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    p = np.exp(s - lse[:, None])
    ds = p * (dout64 @ v64.T - (dout64 * (p @ v64)).sum(-1, keepdims=True) + dlse64[:, None]) * 0.3
    out, lse = (p @ v64)[None, :, None].astype(dtype), lse[None, :, None].astype(np.float32)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def gradients(q, k, v, dout, lse, out, dlse):
        return jax_cudnn.backward(q, k, v, jax_cudnn.prepare(q, dout, lse, None, out, dlse)[1:], mask=True, scale=0.3)

    found = gradients(q, k, v, dout, lse, out, dlse)
    for name, a, b in zip(("dq", "dk", "dv"), found, (ds @ k64, ds.T @ q64, p.T @ dout64), strict=True):
        off = np.linalg.norm(np.asarray(a, np.float64)[0, :, 0] - b)
        rounded = np.linalg.norm(v64) * np.linalg.norm(dout64) * float(jnp.finfo(dtype).eps)  # of out in its dtype
        limit = 4 * float(jnp.finfo(dtype).eps) * np.linalg.norm(b) + (name != "dv") * rounded
        assert off <= limit, f"{case}: {name} is off by {off:.1e}, limit {limit:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["causal-ring4x1-zigzag", "window-ring2x2-zigzag", "docs-ring2x2-striped", "docs-gather2x2-zigzag"]
)
def test_steps_cut_into_rectangles_equal_dense_float64(name, dense_cudnn):
    case = next(c for c in CASES if str(c) == name)
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given, kernel="cudnn", device="cuda"), oracle.dense(case, given))


WINDOW, T = np.arange(40) - 6, np.arange(40)
STARTS = np.cumsum([0, *[1, 5, 2, 4] * 3, 4])
OWN = np.searchsorted(STARTS, T, "right") - 1


@pytest.mark.parametrize(
    ("begin", "end", "calls", "masks"),
    [
        (np.maximum(WINDOW, 0), T + 1, 1, {("CAUSAL", True)}),
        pytest.param(
            np.maximum(WINDOW, 0)[7:], T[7:] + 1, 13, {("CAUSAL", False), ("NO_MASK", False)}, marks=pytest.mark.slow
        ),
        (STARTS[OWN], T + 1, 1, {("PADDING_CAUSAL", False)}),
        (STARTS[OWN], STARTS[OWN + 1], 1, {("PADDING", False)}),
        (np.minimum(T, 33), T * 0 + 40, 3, {("CAUSAL", False), ("NO_MASK", False)}),
    ],
    ids=["window", "a later window", "causal documents", "documents", "a flipped half"],
)
def test_masks_that_cudnn_has_are_few_calls(begin, end, calls, masks, dense_cudnn):
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(2, n, h, 8)), jnp.float32)
                     for n, h in ((len(begin), 4), (40, 2), (40, 2), (len(begin), 4)))  # fmt: skip
    found = jax_cudnn.rectangles(begin[None], end[None], 40)
    where = Intervals(*(jnp.asarray(x[None]) for x in (begin, end)), choice=Choice(Sets((found,)), 0))

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(q, k, v, dout):
        part, truth = (kernel.attend(q, k, v, where, scale=0.3) for kernel in (jax_cudnn, reference))
        rows = dout, truth.lse, (dout * truth.out).sum(-1)
        expected = reference.attend_backward(q, k, v, where, *rows, scale=0.3)
        grads = jax_cudnn.attend_backward(q, k, v, where, *jax_cudnn.prepare(q, *rows, truth.out)[1:], scale=0.3)
        return (*part, *grads), (*truth, *expected)

    for a, b in zip(*both(q, k, v, dout), strict=True):
        assert np.abs(a - b).max() <= 1e-5
    assert len(found) == calls and masks == MET


@pytest.mark.parametrize("lse_too", [False, True])
def test_programs_for_gpus_call_cudnn(monkeypatch, lse_too):
    """Lowered for GPUs without one: a call for each rectangle in each branch, and the work at home is not done twice.

    Where somebody gets the lse, its gradient has a call of its own beside each in backward.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    mesh = rj.init_mesh(ring=4, devices=jax.devices()[:4])
    plan = ra.plan(mesh, seq_len=1024, heads=(4, 2), head_dim=64, layout="zigzag", strategy="ring")
    plan = plan.replace(axes=Ranks(*plan.axes, "jax", "cuda"))

    def loss(q, k, v):
        found = ra.attention(q, k, v, plan, return_lse=lse_too)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(found))

    given = [jax.ShapeDtypeStruct((1, 1024, h, 64), jnp.bfloat16) for h in (4, 2, 2)]
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = Counter(re.findall(r"@__cudnn\$fmha(\w+)\(.*?mask_type\\22: \\22(\w+)", lowered))
    # forward: home, a loop, and the last step, two kinds each; backward: three steps away, then home
    assert found == {
        ("Softmax", "CAUSAL"): 1, ("Softmax", "NO_MASK"): 2 + 2,
        ("SoftmaxBackward", "NO_MASK"): (1 + lse_too) * 3 * 2, ("SoftmaxBackward", "CAUSAL"): 1 + lse_too,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("name", ["causal", "docs", "many docs", "window", "softcap"])
def test_over_gpus_equals_dense_float64(name, strategy):
    """bfloat16: by cuDNN where it has the mask, by the reference where it does not."""
    feature = next(c for c in FEATURES if c.name == name.removeprefix("many "))
    devices = jax.devices("gpu")
    case = dataclasses.replace(feature, ring=len(devices), strategy=strategy, seq_len=61 * 8, head_dim=64, value_dim=64,
                               lengths=[400, 88] if feature.lengths else None)  # fmt: skip
    case = dataclasses.replace(case, lengths=[7, 60] * 7 + [19]) if name == "many docs" else case
    given = oracle.inputs(case, torch.bfloat16)
    truth, dense = oracle.dense(case, given), oracle.dense(case, given, torch.bfloat16)
    found = results(case, given, device="cuda", dtype=jnp.bfloat16)
    for n, expected in truth.items():
        off, allowed = (relative_error(x, expected) for x in (found[n], dense[n]))
        assert off <= 2 * allowed + 1e-5, f"{case}: {n} is off by {off:.1e}, bfloat16 densely by {allowed:.1e}"
