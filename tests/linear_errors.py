"""How far linear attention over ranks is off the recurrence, for the tests of its ranks, states and GPUs."""

from typing import Any

from torch import Tensor

from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Truth
from ringattn.launch.verify.linear_oracle import Case, Lengths


def errors(
    mesh: Any, given: dict[str, Any], expected: dict[str, Tensor], lengths: Lengths | None, layout: str = "auto",
    scan: str = "auto", kernel: str = "auto",
) -> tuple[dict[str, float], Tensor]:  # fmt: skip
    """This rank's relative errors of out, end and gradients; and its share of the initial state's gradient."""
    case = Case("", layout=layout, strategy=scan, lengths=lengths, seq_len=given["q"].shape[1])
    results = oracle.run(case, mesh, given, kernel)
    return oracle.errors(case, mesh, results, expected), results["dstate"]


def worst(results: list[Any], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of any rank, and the error of the sum of the shares."""
    by_name = {n: max(errors[n] for errors, _ in results) for n in results[0][0]}
    total = sum(share.double() for _, share in results)
    return {**by_name, **oracle.compared({"dstate": total}, Truth({}, expected, {}, {}))}
