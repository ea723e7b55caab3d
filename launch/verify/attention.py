"""Attention as `ringattn verify` checks it: each case by the norms of its results and by every element."""

from dataclasses import replace
from functools import lru_cache

import torch

from ringattn.kernels import TABLE as TABLE
from ringattn.launch.verify import oracle, rounding
from ringattn.launch.verify.cases import FEATURES, Case, Truth

TITLE = "worst relative errors against dense float64"
RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks", "element")
LIMITS = {"float64": 1e-12, "float32": 2e-6}


def truth_of(case: Case, precision: str) -> Truth:
    return of_feature(case.name, case.heads, precision)


@lru_cache(maxsize=128)
def of_feature(name: str, heads: int, precision: str) -> Truth:
    """Whatever its ranks. Limits are constants, or twice the error of the dtype, dense, on one device."""
    case, dtype = replace(next(case for case in FEATURES if case.name == name), heads=heads), getattr(torch, precision)
    given = oracle.inputs(case, dtype)
    exact = oracle.dense(case, given)
    if precision in LIMITS:
        limits = dict.fromkeys(exact, LIMITS[precision])
    else:
        single = oracle.dense(case, given, dtype)
        limits = {result: 2 * oracle.error(single[result], x, oracle.size(x)) + 1e-6 for result, x in exact.items()}
    return Truth(given, exact, rounding.allowances(case, given), {**limits, "element": 1.0})
