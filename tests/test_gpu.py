"""The shared cases on GPUs: threads on one GPU, NCCL on two and four; low precision against the oracle."""

from dataclasses import replace

import pytest
import torch

from ringattn.comms.local import run as run_ranks
from ringattn.launch import oracle
from ringattn.launch.cases import CASES as SMALL
from ringattn.launch.cases import FEW, Case
from ringattn.launch.processes import run as run_processes

pytestmark = pytest.mark.gpu
CASES = [replace(c, head_dim=8 * c.head_dim, value_dim=8 * c.value_dim) for c in SMALL]  # dims that GPU kernels have
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def limits(case: Case, given: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Twice the error of the same dtype, dense on one device; 2e-6 for float32."""
    dtype = given["q"].dtype
    if dtype == torch.float32:
        return dict.fromkeys(truth, 2e-6)
    single = oracle.dense(case, given, dtype)
    return {
        n: 2 * oracle.error(single[n].double(), truth[n], float(torch.nan_to_num(truth[n], neginf=0).norm())) + 1e-5
        for n in truth
    }


def compare(case: Case, mesh: object, dtype: torch.dtype) -> list[str]:
    """What is off on this rank."""
    given = oracle.inputs(case, dtype)
    truth = oracle.dense(case, given)
    allowed = limits(case, given, truth)
    found = oracle.run(case, mesh, {n: x.cuda() for n, x in given.items()})
    errors = oracle.errors(case, mesh, found, truth)
    return [f"{case} {dtype}: {n} {e:.1e} > {allowed[n]:.1e}" for n, e in errors.items() if not e <= allowed[n]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_on_one_gpu(case, dtype):
    for off in run_ranks(lambda mesh: compare(case, mesh, dtype), device="cuda", ring=case.ring, ulysses=case.ulysses):
        assert not off, off


def over_nccl(cases: list[Case]) -> list[str]:
    import ringattn as ra

    off = []
    for case in cases:
        mesh = ra.init_mesh(ring=case.ring, ulysses=case.ulysses, device_type="cuda")
        for dtype in DTYPES:
            off += compare(case, mesh, dtype)
    return off


@pytest.mark.parametrize("ranks", [2, 4])
def test_nccl(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    cases = [replace(c, head_dim=64, value_dim=96) for c in FEW if c.ranks == 4]
    if ranks == 2:
        cases = [replace(c, ring=min(c.ring, 2), ulysses=1 if c.ring > 1 else 2) for c in cases]
    for off in run_processes(over_nccl, ranks, cases, backend="nccl", timeout=300):
        assert not off, off
