"""What people put around attention: torch.compile, checkpointing, FSDP2, accumulation, autocast, no_grad."""

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn as ra
import ringattn.torch.attention.public
from ringattn.comms.local import run as run_threads
from ringattn.launch.processes import run
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.nn import Attention
from ringattn.plans.ranks import one_rank
from ringattn.torch.linear.halo import causal_convolution

T, C = 48, 32
DOCS = Docs.from_lengths([13, 35])
LAYER = Attention(8, 2, 2, 4)


class Small(nn.Module):
    """Two attention layers between two matrices."""

    def __init__(self, plan=None, docs: Docs | None = DOCS):
        super().__init__()
        self.plan, self.docs = plan, docs
        self.layers = nn.ModuleList(Attention(C, 4, 2, 8, spec=AttentionSpec(window=30)) for _ in range(2))
        self.last = nn.Linear(C, C)
        generator = torch.Generator().manual_seed(0)  # not the global one: ranks are threads
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, self.plan, docs=self.docs)
        return self.last(x) + 0


def data() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2, T, C, generator=torch.Generator().manual_seed(1))
    return x, y


def planned(mesh, **choices) -> ra.Plan:
    return ra.plan(mesh, seq_len=T, heads=(4, 2), head_dim=8, layout="zigzag", strategy="ring", **choices)


def trained(model: nn.Module, call, plan=None) -> list[Tensor]:
    """The output and all gradients of one pass."""
    x, y = data()
    if plan is not None:
        x, y = plan.shard(x), plan.shard(y)
    model.zero_grad()
    out = call(x)
    F.mse_loss(out, y, reduction="sum").backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def check_close(results: list[Any], expected: list[Any], atol: float = 1e-5) -> None:
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        torch.testing.assert_close(
            torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=atol, msg=lambda m, i=i: f"result {i}: {m}"
        )


def test_compile_fullgraph_on_threads():
    """Compiling is not made for threads: one rank compiles, and meets ranks that do not."""
    torch._dynamo.reset()

    def each_rank(mesh):
        plan = planned(mesh)
        model = Small(plan)
        first = mesh.rank == 0
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if first else model
        return trained(model, model, plan), trained(model, call, plan)

    for plain, compiled in run_threads(each_rank, ring=2):
        check_close(compiled, plain)


def attended(x: Tensor, plan: ra.Plan) -> Tensor:
    return ra.attention(x, x, x, plan)


def scanned(x: Tensor, plan: ra.Plan) -> Tensor:
    return ra.linear_attention(x, x, x, None, plan)


def convolved(x: Tensor, plan: ra.Plan) -> Tensor:
    return causal_convolution(x.flatten(2), x.new_ones(x.shape[2] * x.shape[3], 3), plan)


def layered(x: Tensor, plan: ra.Plan) -> Tensor:
    return LAYER(x.flatten(2), plan)


@pytest.mark.parametrize("function", [attended, scanned, convolved])
def test_backward_needs_nobody_to_keep_the_plan(function):
    x = torch.ones(1, 4, 2, 8, requires_grad=True)
    for _ in range(2):  # what is worked out for the first plan is found for the second one, which is its equal
        loss = function(x, ra.plan(seq_len=4)).sum()
        gc.collect(1)  # the plan is young: a whole collection takes seconds beside all that tests import
        loss.backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("function", [ra.attention, ra.linear_attention])
def test_padding_is_masked_on_the_device_of_the_tensors(function):
    """A plan without a mesh is made for the default device, a call without a plan for CPUs."""
    x, docs = torch.randn(1, 8, 2, 8), ra.Docs.from_lengths([3, 2], pad_to=8)
    elsewhere = ra.plan(seq_len=8).replace(axes=one_rank("meta"))
    assert torch.equal(function(x, x, x, plan=elsewhere, docs=docs), function(x, x, x, docs=docs))
    losses = torch.rand(1, 8)
    assert ra.token_mean(losses, elsewhere, docs=docs) == ra.token_mean(losses, ra.plan(seq_len=8), docs=docs)


@pytest.mark.slow
@pytest.mark.parametrize("function", [attended, scanned, convolved, layered])
def test_a_compiled_function_takes_one_plan_after_another(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for length in (4, 4, 6):
        x = torch.ones(1, length, 2, 4, requires_grad=True)
        loss = compiled(x, ra.plan(seq_len=length)).sum()
        gc.collect(1)  # the plan is young: a whole collection takes seconds beside all that tests import
        loss.backward()
        assert x.grad.isfinite().all()


class Gradients(TorchDispatchMode):
    """The dtypes of the gradients that ops return."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        if op is torch.ops.ringattn.attention_backward.default:
            self.dtypes = [x.dtype for x in results[:3]]
        return results


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_ops_return_gradients_in_the_dtype_of_their_inputs_as_compiled_graphs_expect(strategy):
    def one_rank(mesh):
        x = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        with Gradients() as noted:
            ra.attention(x, x, x, ra.plan(mesh, seq_len=8, strategy=strategy)).sum().backward()
        return noted.dtypes

    assert run_threads(one_rank, ring=2) == [[torch.bfloat16] * 3] * 2


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("function", [ra.attention, ra.linear_attention])
def test_a_call_without_a_plan_is_exported(function, strict):

    class Module(nn.Module):
        def forward(self, x):
            return function(x, x, x)

    x = torch.randn(1, 12, 2, 8)
    exported = torch.export.export(Module(), (x,), strict=strict).module()
    torch.testing.assert_close(exported(x), function(x, x, x))


@pytest.mark.parametrize(
    "make",
    [
        Docs.from_lengths,
        pytest.param(lambda n: Docs.from_cu_seqlens(np.cumsum([0, *n])), marks=pytest.mark.slow),
    ],
)
def test_documents_may_be_made_in_a_compiled_function(make):
    def function(x, lengths):
        return ra.attention(2 * x, x, x, docs=make(lengths)).sin()

    torch._dynamo.reset()
    compiled, x = torch.compile(function, backend="aot_eager"), torch.randn(1, 8, 2, 4)
    for lengths in ([3, 5], [4, 4], [1, 2, 5]):
        torch.testing.assert_close(compiled(x, lengths), function(x, lengths))


def sharded_steps(data_ranks: int, ring: int) -> tuple[list[float], list[np.ndarray]]:
    """Three steps of FSDP2 over data x ring, each rank's loss its share of the mean over all tokens of all ranks."""
    from torch.distributed.fsdp import fully_shard

    from ringattn.comms.mesh import axis

    mesh = ra.init_mesh(data=data_ranks, ring=ring, device_type="cpu")
    plan = planned(mesh)
    model = Small(plan, docs=None)
    everyone = mesh._flatten("everyone") if dist.get_world_size() > 1 else mesh["data"]
    for module in (*model.layers, model):
        fully_shard(module, mesh=everyone)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    along = axis(mesh, "data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    rows = slice(along.rank * 2 // data_ranks, (along.rank + 1) * 2 // data_ranks)
    losses = []
    for _ in range(3):
        error = (model(plan.shard(x[rows])) - plan.shard(y[rows])).square().mean(-1)
        loss = ra.token_mean(error, plan, over=(along,))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [p.full_tensor().detach().numpy() for p in model.parameters()]


def test_fsdp2_over_data_and_ring_trains_as_one_rank():
    ((expected, weights),) = run(sharded_steps, 1, 1, 1)
    assert expected[2] < expected[1] < expected[0]
    for losses, mine in run(sharded_steps, 4, 2, 2):
        assert losses == pytest.approx(expected, abs=1e-6)
        check_close(mine, weights, 1e-6)


def test_autocast_runs_attention_in_its_dtype():
    x, _ = data()
    plain = Small()(x)
    with torch.autocast("cpu", torch.bfloat16):
        single = Small()(x)
        q = torch.randn(1, T, 4, 8, requires_grad=True)
        out, lse = ra.attention(q, q, q, return_lse=True)
    assert single.dtype == torch.bfloat16 and out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32

    def each_rank(mesh):
        plan = planned(mesh)
        with torch.autocast("cpu", torch.bfloat16):
            return plan.unshard(Small(plan)(plan.shard(x)))

    for out in run_threads(each_rank, ring=2):
        assert out.dtype == torch.bfloat16
        assert (out - plain).norm() <= 2 * (single - plain).norm() + 1e-3


def test_results_may_be_written_into_as_torchs_may():
    """As a residual is added in place. Where backward needs what was overwritten, autograd says so as always."""
    x = torch.randn(1, 9, 4, 8, requires_grad=True)

    def twice(call, write):
        out = call(x, x, x)
        doubled = out.mul_(2) if write else out * 2
        return torch.autograd.grad(doubled.square().sum(), x)[0]

    assert torch.equal(twice(ra.linear_attention, True), twice(ra.linear_attention, False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice(ra.attention, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_new_tokens_have_the_dtype_of_their_cache(dtype):
    """A position code leaves q and k in float32 beside values in bfloat16."""
    plan = ra.plan(seq_len=4)
    result, expected = (
        ra.KVCache.allocate(plan, batch=1, max_len=6, kv_heads=2, head_dim=8, dtype=dtype) for _ in range(2)
    )
    device = result.k.device
    q, k, v = (torch.randn(1, 6, heads, 8, device=device) for heads in (4, 2, 2))
    for tokens in (slice(0, 4), slice(4, 6)):
        call = partial(ra.prefill, plan=plan) if tokens.start == 0 else ra.decode
        new = [x[:, tokens] for x in (q, k, v.bfloat16())]
        with torch.autocast(device.type, torch.bfloat16):
            out = call(*new, cache=result)
        assert out.dtype == dtype and torch.equal(out, call(*(x.to(dtype) for x in new), cache=expected))


def test_unshard_is_differentiated_twice():
    x, weights = torch.randn(1, 7, 2), torch.randn(4, 1, 7, 2)
    whole = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((weights.sum(0) * whole**3).sum(), whole, create_graph=True)
    (expected,) = torch.autograd.grad(grad.square().sum(), whole)

    def each_rank(mesh):
        plan = ra.plan(mesh, seq_len=7, layout="zigzag")
        mine = plan.shard(x).requires_grad_()
        loss = (weights[mesh.rank] * plan.unshard(mine) ** 3).sum()
        (grad,) = torch.autograd.grad(loss, mine, create_graph=True)
        return plan.unshard(torch.autograd.grad(grad.square().sum(), mine)[0])

    check_close(run_threads(each_rank, ring=2, ulysses=2), [expected] * 4)


class Kept(TorchDispatchMode):
    """How many tensors our ops gave back for a backward pass."""

    def __init__(self):
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.ringattn.attention.default:
            self.counts.append(len(results[2]))
        return results


def test_no_grad_and_inference_mode_give_the_same_bits_and_keep_nothing():
    def each_rank(mesh):
        plan = planned(mesh)
        model, x = Small(plan), plan.shard(data()[0])
        with Kept() as kept:
            graded = model(x)
            with torch.no_grad():
                free = model(x)
            with torch.inference_mode():
                inferred = model(x)
            frozen = model.requires_grad_(False)(x)
        assert graded.requires_grad and not free.requires_grad and not inferred.requires_grad
        return kept.counts, graded.detach(), free, inferred.clone(), frozen

    for counts, graded, *others in run_threads(each_rank, ring=2, ulysses=2):
        assert counts == [5, 5, 0, 0, 0, 0, 0, 0]
        assert all(torch.equal(graded, other) for other in others)


def test_what_was_first_used_in_inference_mode_can_be_trained_afterwards():
    """Tensors that were cached then may be kept for a backward pass."""

    def each_rank(mesh):
        plan = ra.plan(mesh, seq_len=41, layout="zigzag")  # a length of no other test
        docs = Docs.from_lengths([13, 0, 20], pad_to=41)
        x = torch.ones(1, plan.local_len, 2, 4, requires_grad=True)

        def used() -> Tensor:
            results = (
                ra.attention(x, x, x, plan, docs=docs),
                *ra.linear_attention(x, x, x, None, plan, docs=docs, return_state="documents"),
            )
            loss = ra.cross_entropy(x[:, :, 0], torch.zeros(1, plan.local_len, dtype=torch.long), plan, docs=docs)
            return sum((y.sum() for y in (*results, plan.roll(x, docs=docs), plan.unshard(x))), loss)

        with torch.inference_mode():
            used()
        (gradient,) = torch.autograd.grad(used(), x)
        assert gradient.isfinite().all()

    run_threads(each_rank, ring=2, ulysses=2)


@pytest.mark.parametrize("function", [ra.attention, ra.linear_attention])
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_function_takes_batches_and_lengths_as_they_come(function, dynamic):
    """Without a plan, and nothing was called eagerly before; with one, any batch."""
    torch._dynamo.reset()
    plan, options = ra.plan(seq_len=24), {"fullgraph": True, "backend": "aot_eager", "dynamic": dynamic}
    single = torch.compile(lambda x: function(x, x, x), **options)
    planned = torch.compile(lambda x: function(x, x, x, plan=plan), **options)
    for batch, length in ((1, 16), (2, 16), (3, 17), (3, 40)):
        x = torch.randn(batch, length, 2, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(single(x).square().sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(function(x, x, x).square().sum(), x)[0])
        x = torch.randn(batch, 24, 2, 8)
        torch.testing.assert_close(planned(x), function(x, x, x, plan=plan))
