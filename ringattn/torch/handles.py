"""A compiled graph holds tensors, numbers and strings: a plan goes into an op as its text, and documents as starts.

A call without a plan is one device's, whose lengths are the tensors'. While a graph is traced they may be symbols: then
no plan is made, and the op finds it when it runs.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.comms.axis import one_rank
from ringattn.planning import Plan, Transport, of_text
from ringattn.spec import Docs

HELD: dict[str, Plan] = {}  # those that compiled graphs were made with, by their text

TELLS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile calls the function while it traces, and keeps the result.

    Arguments must be plain ints: `plain(n)` is one where n may be a symbol.
    torch.compiler.assume_constant_result says the same and imports torch's compiler for it, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@lru_cache(maxsize=256)
def kept_plan(seq_len: int, key_len: int) -> Plan:
    return Plan(seq_len, key_len=key_len, axes=one_rank())


class Alone:
    """What stands for one device's plan while a graph is traced: lengths may be symbols there.

    Where the graph breaks after all it comes into plain Python, and answers the rest as the plan does.
    """

    ring = ulysses = 1
    layout, swaps, transport = "contiguous", False, Transport()
    heads = head_dim = value_dim = None

    def __init__(self, seq_len: int, key_len: int):
        self.seq_len = self.local_len = seq_len
        self.keys = self if key_len == seq_len else Alone(key_len, key_len)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("seq_len", "keys"):  # it is being copied
            raise AttributeError(name)
        return getattr(kept_plan(self.seq_len, self.keys.seq_len), name)


def whole_on_one(q: Tensor, k: Tensor) -> Any:
    """The plan of one device that holds all of these tokens."""
    return (Alone if torch.compiler.is_compiling() else kept_plan)(q.shape[1], k.shape[1])


def text_of(plan: Any) -> str:
    """The plan's text, for an op; "" for that of one device, which it finds by the tensors' lengths."""
    if not torch.compiler.is_compiling():
        return str(plan.text)
    if exporting() and not isinstance(plan, Alone):
        raise ValueError(
            "torch.export with a plan: what is exported would hold ranks of this process; export the module without a "
            "plan, for one device"
        )
    return "" if isinstance(plan, Alone) else str(held(plan.text))


def exporting() -> bool:
    """Whether torch.export traces. torch 2.11 says so of torch.compile too, and only its flag tells them apart."""
    return torch.compiler.is_exporting() if TELLS else torch.compiler._is_exporting_flag


def plain(n: int) -> int:
    """The number, and of one that is a symbol while a graph is traced its value: ranges are made of values."""
    return range(n).stop


def plan_of(text: str, seq_len: int, key_len: int) -> Plan:
    """The plan with this text; for "" that of one device, of tensors this long."""
    return kept_plan(seq_len, key_len) if text == "" else of_text(text)


def spread(text: str) -> Any:
    """The plan while a graph is traced, for what does not depend on lengths: ring, ulysses, layout."""
    return Alone(0, 0) if text == "" else of_text(text)


@constant
def held(text: str) -> str:
    """A text that a compiled graph holds as a constant; from here on its plan lives as long as the process."""
    HELD[text] = of_text(text)
    return text


def starts_of(docs: Docs | None) -> Tensor | None:
    """Where documents start, for an op: in memory of its own, whatever the default device."""
    return None if docs is None else torch.from_numpy(docs.starts.copy())


def docs_of(starts: Tensor | None, length: int) -> Docs | None:
    """The documents whose starts came into an op."""
    if starts is None:
        return None
    host = starts.numpy(force=True)
    return kept_docs(host.tobytes(), host.shape, length)


@lru_cache(maxsize=64)
def kept_docs(starts: bytes, shape: tuple[int, ...], length: int) -> Docs:
    """The same documents for the same starts: what is known of them is looked up by them, and soonest by themselves."""
    return Docs.known(np.frombuffer(starts, np.int64).reshape(shape), length)
