"""A compiled graph holds tensors, numbers and strings: ops take a plan as its text, and documents as their starts.

Where each batch has its own plan, for its documents, ops take its handle, a number, and the text that all these share.

A call without a plan is for one device, and its lengths are those of the tensors. They may be symbolic while a graph is
traced: then no plan is made until the op runs.
"""

from functools import lru_cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ringattn.masks.spec import Docs
from ringattn.masks.values import fields
from ringattn.plans.plan import Plan
from ringattn.plans.ranks import one_rank
from ringattn.plans.sizes import Transport

PLANS: "WeakValueDictionary[str, Plan]" = WeakValueDictionary()  # by their text
LAID_OUT: "WeakValueDictionary[int, Plan]" = WeakValueDictionary()  # the plans of documents, by their handle
COMPILED: dict[str, Plan] = {}  # those that compiled graphs use
HANDLES = count()


def name(plan: Any) -> None:
    """Give a new plan its names in compiled graphs.

    text      of all of it, by which `of_text` finds it, or its equal
    others    a plan of the choices that it shares with plans for other documents
    handle    a number, if it lays out documents
    """
    names = vars(plan)
    text, names["handle"] = described(plan), None
    if plan.docs is not None:
        handle, choices = next(HANDLES), described(plan, seq_len=1, key_len=None)
        LAID_OUT[handle] = plan
        names["handle"] = np.array([handle])
        names["others"] = PLANS.get(choices) or plan.replace(seq_len=1, key_len=None, docs=None)
        text += plan.docs.encoded.tobytes().hex()
    names["text"] = text
    equal = PLANS.setdefault(text, plan)
    if equal is not plan:
        names["equal"] = equal  # which so lives as long as this one


def described(plan: Plan, **changes: Any) -> str:
    """All but the documents, in one line of words: compilers write it into comments."""
    values = {name: getattr(plan, name) for name in fields(plan) if name not in ("machine", "axes", "report", "docs")}
    return f"{plan.axes.number} {values | changes} {plan.machine.text} "


@lru_cache(maxsize=256)
def kept_plan(seq_len: int, key_len: int) -> Plan:
    return Plan(seq_len, key_len=key_len, axes=one_rank())


class Alone:
    """Stands for the plan of one device while a graph is traced, where lengths may be symbolic.

    After a graph break it is used in plain Python, and takes all other attributes from the plan.
    """

    ring = ulysses = 1
    layout, swaps, transport = "contiguous", False, Transport()
    heads = head_dim = value_dim = docs = work = None

    def __init__(self, seq_len: int, key_len: int):
        self.seq_len = self.local_len = seq_len
        self.keys = self if key_len == seq_len else Alone(key_len, key_len)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("seq_len", "keys"):  # while it is copied
            raise AttributeError(name)
        return getattr(kept_plan(self.seq_len, self.keys.seq_len), name)


def whole_on_one(q: Tensor, k: Tensor) -> Any:
    """The plan of one device that holds all of these tokens."""
    return (Alone if torch.compiler.is_compiling() else kept_plan)(q.shape[1], k.shape[1])


def text_of(plan: Any) -> str:
    """The plan's text, for an op; "" for one device, whose plan follows from the tensors' lengths."""
    if not torch.compiler.is_compiling():
        return str(plan.text)
    return "" if isinstance(plan, Alone) else str(compiled(plan.text))


def text_and_handle(plan: Any) -> tuple[str, Tensor | None]:
    """The plan for an op whose graph serves all batches: of a plan for documents, the text of what they share."""
    if plan.docs is None or not torch.compiler.is_compiling():
        return text_of(plan), None
    return str(compiled(plan.others.text)), torch.from_numpy(plan.handle.copy())


def plan_of(text: str, seq_len: int, key_len: int, handle: Tensor | None = None) -> Plan:
    """The plan with this text, or this handle; for "" that of one device, for tensors of these lengths."""
    if handle is not None:
        return of_handle(text, int(handle))
    return kept_plan(seq_len, key_len) if text == "" else of_text(text)


def spread(text: str) -> Any:
    """The plan while a graph is traced, for attributes that do not depend on lengths: ring, ulysses, layout."""
    return Alone(0, 0) if text == "" else of_text(text)


def of_text(text: str) -> Plan:
    """The plan with this text."""
    plan = PLANS.get(text)
    if plan is None:
        raise RuntimeError("the plan that this compiled graph was made for is gone: compile again with a new plan")
    return plan


def of_handle(text: str, handle: int) -> Plan:
    """The plan with this handle, which a graph takes as a number, so that it serves every batch; `text`: as `others`.

    It exchanges all heads at once: in how many groups would follow from its length, and a graph's backward depends on
    that number. As many are kept as batches can be on their way to backward.
    """
    plans = of_text(text).axes.plans
    if handle not in plans:
        plan = LAID_OUT.get(handle)
        if plan is None:
            raise RuntimeError("the plan of this batch is gone: hold it until backward is done")
        if plan.ulysses > 1 and plan.transport.groups is None:
            made = plan.replace(transport=plan.transport.replace(groups=1))
            vars(made)["tokens"] = plan.tokens  # not dealt out again
            plan = made
        if len(plans) == 256:
            del plans[next(iter(plans))]
        plans[handle] = plan
    live: Plan = plans[handle]
    return live


def compiled(text: str) -> str:
    """A text that a compiled graph holds as a constant; keeps its plan alive until the process ends."""
    COMPILED[text] = of_text(text)
    return text


# torch.compile calls it while it traces, as by torch.compiler.assume_constant_result, whose import takes a second.
compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def starts_of(docs: Docs | None) -> Tensor | None:
    """Documents as a tensor for an op: a copy, on the CPU whatever the default device is."""
    return None if docs is None else torch.from_numpy(docs.encoded.copy())


def docs_of(starts: Tensor | None, length: int) -> Docs | None:
    """The documents that an op received as a tensor."""
    if starts is None:
        return None
    host = starts.numpy(force=True)
    return kept_docs(host.tobytes(), host.shape, length)


@lru_cache(maxsize=64)
def kept_docs(starts: bytes, shape: tuple[int, ...], length: int) -> Docs:
    """The documents with this `encoded`. Caches are keyed by documents, and the same object is found fastest."""
    numbers = np.frombuffer(starts, np.int64).reshape(shape)
    if numbers.ndim == 2:
        return Docs(numbers, length)
    parts: list[Any] = []
    for _ in Docs.PARTS:
        dims, rest = int(numbers[0]), numbers[1:]
        sizes, rest = rest[:dims], rest[dims:]
        size = int(sizes.prod()) if dims else 0
        parts.append(rest[:size].reshape(sizes).copy() if dims else None)
        numbers = rest[size:]
    return Docs(parts[0], length, *parts[1:])
