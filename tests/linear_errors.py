"""How far linear attention over ranks is off the recurrence, for the tests of its ranks, states and GPUs."""

from typing import Any

from torch import Tensor

from ringattn.launch.verify import oracle
from tests.cases import errors as errors_of
from tests.linear_oracle import Lengths, case_of


def errors(
    mesh: Any, given: dict[str, Any], expected: dict[str, Tensor], lengths: Lengths | None, layout: str = "auto",
    scan: str = "auto", kernel: str = "auto",
) -> tuple[dict[str, float], Tensor]:  # fmt: skip
    """This rank's relative errors of out, end and gradients; and its share of the initial state's gradient."""
    case = case_of(given, lengths, layout=layout, words={"scan": scan})
    results = oracle.run(case, mesh, {n: x for n, x in given.items() if x is not None}, kernel)
    return errors_of(case, mesh, results, expected), results["dstate"]


def worst(results: list[Any], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of any rank, and the error of the sum of the shares."""
    by_name = {n: max(errors[n] for errors, _ in results) for n in results[0][0]}
    total, exact = sum(share.double() for _, share in results), expected["dstate"]
    return {**by_name, "dstate": oracle.error(total, exact.to(total.device))}
