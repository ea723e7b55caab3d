"""Attention over ranks equals dense float64 attention: out, lse and every gradient on every rank, every case."""

import pytest
import torch

from ringattn.comms.local import run as run_ranks
from ringattn.launch import oracle
from ringattn.launch.cases import CASES, FEATURES, Case

LIMIT = 2e-6


def check(case: Case, dtype: torch.dtype, limits: dict[str, float]) -> None:
    """Run the case on threads and hold every rank's every result against the limits."""
    given = oracle.inputs(case, dtype)
    truth = oracle.dense(case, given)

    def one(mesh):
        found = oracle.run(case, mesh, given)
        return oracle.errors(case, mesh, found, truth), found.get("dsinks")

    results = run_ranks(one, ring=case.ring, ulysses=case.ulysses)
    for rank, (errors, _) in enumerate(results):
        for name, value in errors.items():
            assert value <= limits[name], f"{case} rank {rank}: {name} is off by {value:.2e} (limit {limits[name]:.2e})"
    if case.sinks:
        total = sum(share.double() for _, share in results)
        value = oracle.error(total, truth["dsinks"], float(truth["dsinks"].norm()))
        assert value <= limits["dsinks"], f"{case}: dsinks is off by {value:.2e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_float64(case):
    check(case, torch.float32, dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dsinks"), LIMIT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("causal", "all_at_once")], ids=str)
def test_low_precision_is_within_twice_the_error_of_one_device(case, dtype):
    given = oracle.inputs(case, dtype)
    truth, single = oracle.dense(case, given), oracle.dense(case, given, dtype)
    limits = {
        n: 2 * oracle.error(single[n].double(), truth[n], float(torch.nan_to_num(truth[n], neginf=0).norm())) + 1e-6
        for n in truth
    }
    check(case, dtype, limits)


@pytest.mark.parametrize("case", FEATURES, ids=lambda c: c.name)
def test_one_device_needs_no_plan(case):
    from ringattn import api

    given = oracle.inputs(case, torch.float64)
    truth = oracle.dense(case, given)
    out, lse = api.attention(
        given["q"], given["k"], given["v"], spec=case.spec, docs=case.docs, key_docs=case.key_docs,
        sinks=given["sinks"] if case.sinks else None, return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out, truth["out"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, truth["lse"], rtol=1e-12, atol=1e-12)


def test_the_same_bits_from_run_to_run():
    case = next(c for c in CASES if c.name == "all_at_once" and c.ring == 4)
    given = oracle.inputs(case, torch.float32)
    first, second = (run_ranks(lambda mesh: oracle.run(case, mesh, given), ring=4) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in a)
