"""The shared cases on GPUs: threads on one GPU; ranks over NCCL and symmetric memory, and what may go wrong.

NCCL needs a GPU for each rank. Through symmetric memory ranks may share GPUs: slower, so what must not be overtaken is
overtaken sooner.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run as run_ranks
from ringattn.launch.processes import run as run_processes
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.models.nn import StreamingAttention
from ringattn.plans import recipe
from tests.cases import CASES as SMALL
from tests.cases import errors as errors_of
from tests.cases import passes, relative_error

pytestmark = pytest.mark.gpu
CASES = [replace(c, head_dim=8 * c.head_dim, value_dim=8 * c.value_dim) for c in SMALL]  # dims that GPU kernels have
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def limits(case: Case, given: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Twice the error of the same dtype, dense on one device; 2e-6 for float32."""
    dtype = given["q"].dtype
    if dtype == torch.float32:
        return dict.fromkeys(truth, 2e-6)
    single = oracle.dense(case, given, dtype)
    return {n: 2 * relative_error(single[n].double(), truth[n]) + 1e-5 for n in truth}


def compare(case: Case, mesh: object, dtype: torch.dtype, kernel: str = "auto") -> list[str]:
    """What is off on this rank."""
    given = oracle.inputs(case, dtype)
    truth = oracle.dense(case, given)
    allowed = limits(case, given, truth)
    result = passes(case, mesh, {n: x.cuda() for n, x in given.items()}, kernel)
    errors = errors_of(case, mesh, result, truth)
    return [f"{case} {dtype}: {n} {e:.1e} > {allowed[n]:.1e}" for n, e in errors.items() if not e <= allowed[n]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_on_one_gpu(case, dtype):
    for off in run_ranks(lambda mesh: compare(case, mesh, dtype), device="cuda", ring=case.ring, ulysses=case.ulysses):
        assert not off, off


@lru_cache(maxsize=64)
def answers(name: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], ...]:
    """(inputs, truth, limits) of a feature, whatever its layout: each process computes them once."""
    case = next(c for c in CASES if c.name == name)
    given = oracle.inputs(case, dtype)
    truth = oracle.dense(case, given)
    return given, truth, limits(case, given, truth)


def placed_on(ranks: int) -> list[Case]:
    """Every case on that many ranks, each place once."""
    if ranks == 4:
        return [c for c in CASES if c.ring * c.ulysses == 4]
    halves = {(4, 1): {"ring": 2}, (1, 4): {"ulysses": 2}}
    return [replace(c, **halves[c.ring, c.ulysses]) for c in CASES if (c.ring, c.ulysses) in halves]


@lru_cache
def mesh_of(ring: int, ulysses: int) -> object:
    import ringattn as ra

    return ra.init_mesh(ring=ring, ulysses=ulysses, device_type="cuda")


def every_case(ranks: int, transport: str) -> list[str]:
    """What is off: all cases with a kernel that needs no compiling, some rings with auto's and a vendor's."""
    off = []
    recipe.HALVES_FROM = 0  # heads at home take turns, as where keys have a long way
    for case in placed_on(ranks):
        mesh = mesh_of(case.ring, case.ulysses)
        runs = [("tiled", torch.float32)]
        if case.strategy == "ring" and case.ulysses == 1:
            runs += [("auto", torch.bfloat16)] * (case.name in ("all_at_once", "causal", "window"))
            vendor = case.layout == "zigzag" and case.name in ("causal", "short")  # it plans for seconds
            runs += [("cudnn", torch.bfloat16)] * vendor
        for kernel, dtype in runs:
            given, truth, allowed = answers(case.name, dtype)
            result = passes(case, mesh, {n: x.cuda() for n, x in given.items()}, kernel, by=transport)
            errors = errors_of(case, mesh, result, truth)
            off += [f"{case} {kernel} {dtype}: {n} {e:.1e}" for n, e in errors.items() if not e <= allowed[n]]
    return off


TRANSPORTS = ("group", "symmetric")


def backend_for(ranks: int, transport: str) -> str:
    """How so many ranks are started: with NCCL where each has a GPU."""
    if torch.cuda.device_count() >= ranks:
        return "nccl"
    if transport == "group":
        pytest.skip(f"needs {ranks} GPUs")
    return "gloo"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_over_gpus(ranks, transport):
    backend = backend_for(ranks, transport)
    for off in run_processes(every_case, ranks, ranks, transport, backend=backend, timeout=300):
        assert not off, f"{len(off)}: {off[:5]}"


def iterations(transport: str, count: int) -> tuple[int, int, bool]:
    """Allocated bytes before and after so many training-like steps of random lengths, and whether bits repeat."""
    import ringattn as ra

    mesh = ra.init_mesh(ring=torch.distributed.get_world_size(), device_type="cuda")
    torch.cuda.synchronize()

    def step(length: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        plan = ra.plan(mesh, seq_len=length, transport=ra.Transport(by=transport))
        q, k, v = (
            plan.shard(torch.randn(1, length, h, 64, device="cuda", dtype=torch.bfloat16)).requires_grad_()
            for h in (8, 2, 2)
        )
        out = ra.attention(q, k, v, plan)
        out.float().pow(2).sum().backward()
        return torch.cat([x.grad.flatten() for x in (q, k, v)] + [out.detach().flatten()])

    lengths = np.random.default_rng(0).integers(1, 40000, count + 80).tolist()
    for i, length in enumerate(lengths[:80]):  # more than the calls that are kept
        step(length, i)
    again = torch.equal(step(30000, 7), step(30000, 7))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i, length in enumerate(lengths[80:]):
        step(length, i)
    torch.cuda.synchronize()
    return before, torch.cuda.memory_allocated(), again


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_200_steps_of_random_lengths_leave_memory_as_it_was_and_bits_repeat(transport):
    backend = backend_for(2, transport)
    for before, after, again in run_processes(iterations, 2, transport, 200, backend=backend, timeout=300):
        assert abs(after - before) < 2**21  # a step takes 100 MB
        assert again


def captured(transport: str) -> float:
    """The largest difference between a call and the replay of its CUDA graph on other data."""
    import ringattn as ra

    mesh = ra.init_mesh(ring=torch.distributed.get_world_size(), device_type="cuda")
    plan = ra.plan(mesh, seq_len=8192, transport=ra.Transport(by=transport))
    q, k, v = (torch.randn(1, plan.local_len, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                ra.attention(q, k, v, plan)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = ra.attention(q, k, v, plan)
        gap = 0.0
        for _ in range(3):
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
            graph.replay()
            mine = out.clone()
            gap = max(gap, float((mine - ra.attention(q, k, v, plan)).abs().max()))
    return gap


@pytest.mark.parametrize("ranks, transport", [(2, "group"), (2, "symmetric"), (4, "symmetric")])
def test_a_call_can_be_captured_in_a_cuda_graph(ranks, transport):
    backend = backend_for(ranks, transport)
    assert run_processes(captured, ranks, transport, backend=backend, timeout=120) == [0.0] * ranks


def axis_of_training() -> str:
    """Its groups have gloo for what lies on hosts, beside NCCL."""
    import ringattn as ra

    return str(ra.plan(ra.init_mesh(ring=2, device_type="cuda"), seq_len=64).ring_axis)


def test_shared_memory_is_found_where_groups_have_gloo_too():
    backend_for(2, "group")
    assert all(
        "symmetric memory" in message for message in run_processes(axis_of_training, 2, backend="cpu:gloo,cuda:nccl")
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_kernels_run_where_their_tensors_are():
    """Whichever device is current: attention with its gradients, prefill, a step, merged rectangles, and linear."""

    def results(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 256, 4, 64).to(device, torch.bfloat16).requires_grad_() for _ in range(3))
        out = ra.attention(q, k, v)
        out.sum().backward()
        layer, x = StreamingAttention(256, heads=4), torch.randn(1, 65, 256)
        layer, x = layer.to(device, torch.bfloat16), x.to(device, torch.bfloat16)
        steps = [layer.prefill(x[:, :64]), layer.step(x[:, 64:])]
        scanned = ra.linear_attention(q, k, v, -v.detach().float().abs())
        cudnn = ra.attention(q, k, v, ra.plan(seq_len=256, kernel="cudnn"))
        return [x.detach().cpu() for x in (out, q.grad, k.grad, v.grad, *steps, scanned, cudnn)]

    assert torch.cuda.current_device() == 0
    for here, there in zip(results("cuda:0"), results("cuda:1"), strict=True):
        assert torch.equal(here, there)
