"""A compiled graph holds tensors and numbers: a plan goes into an op as its number, and documents as their starts.

A call without a plan is one device's, whose lengths are the tensors'. While a graph is traced they may be symbols: then
no plan is made, and the op finds it when it runs.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Solo
from ringattn.planning import LIVE, Plan
from ringattn.spec import Docs

HELD: dict[int, Plan] = {}  # those that compiled graphs were made with, by number


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph holds what the function gives as a constant. Its arguments may be no symbols: a hash is none.

    torch.compiler.assume_constant_result says the same and imports torch's compiler for it, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@lru_cache(maxsize=256)
def kept_plan(seq_len: int, key_len: int) -> Plan:
    return Plan(seq_len, key_len=key_len, axes=(Solo("ring"), Solo("ulysses")))


class Alone:
    """What stands for one device's plan while a graph is traced: lengths may be symbols there."""

    ring = ulysses = 1
    layout, swaps = "contiguous", False
    heads = head_dim = value_dim = groups = None

    def __init__(self, seq_len: int, key_len: int):
        self.seq_len = self.local_len = seq_len
        self.keys = self if key_len == seq_len else Alone(key_len, key_len)


def whole_on_one(q: Tensor, k: Tensor) -> Any:
    """The plan of one device that holds all of these tokens."""
    return (Alone if torch.compiler.is_compiling() else kept_plan)(q.shape[1], k.shape[1])


def handle_of(plan: Any) -> int:
    """The plan's number, for an op; -1 for that of one device, which it finds by the tensors' lengths."""
    if not torch.compiler.is_compiling():
        return int(plan.handle)
    return -1 if isinstance(plan, Alone) else int(held(hash(plan.handle)))


def numbered(plan: int, seq_len: int, key_len: int) -> Plan:
    return kept_plan(seq_len, key_len) if plan == -1 else LIVE[plan]


def spread(plan: int) -> Any:
    """What can be asked of it where lengths may be symbols: over which ranks, and how."""
    return Alone(0, 0) if plan == -1 else LIVE[plan]


@constant
def held(plan: int) -> int:
    """A number that a compiled graph holds as a constant; from here on the plan lives as long as the process.

    What the plan works out once is worked out here: Python 3.11 takes a lock for that, which is not traced.
    """
    HELD[plan] = live = LIVE[plan]
    _ = live.local_len, live.keys.local_len
    return plan


def docs_of(starts: Tensor | None, length: int) -> Docs | None:
    return None if starts is None else Docs(starts.numpy(force=True), length)
