"""A compiled graph holds tensors, numbers and strings: ops take a plan as its text, and documents as their starts.

Where each batch has its own plan, for its documents, ops take its handle, a number, and the text that all these share.

A call without a plan is for one device, and its lengths are those of the tensors. They may be symbolic while a graph is
traced: then no plan is made until the op runs.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from json import dumps, loads
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.masks.values import fields
from ringattn.plans import machine
from ringattn.plans.plan import Plan
from ringattn.plans.ranks import LIVE, one_rank
from ringattn.plans.transport import Transport

HELD: dict[str, Plan] = {}  # the plans that compiled graphs use, by their text
LAID_OUT: "WeakValueDictionary[int, Plan]" = WeakValueDictionary()  # the plans of documents, by their handle
HANDLES = count()
NAMED = tuple(name for name in fields(Plan) if name not in ("transport", "machine", "axes", "report", "docs"))

TELLS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile calls the function while it traces, and holds the result as a constant.

    torch.compiler.assume_constant_result does the same, but imports torch's compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def name(plan: Any) -> None:
    """Give a new plan its names in compiled graphs.

    text      all of it, of which `of_text` makes it again
    choices   the text of what plans for other documents share
    handle    a number, if it lays out documents
    """
    names = vars(plan)
    if plan.docs is None:
        names |= {"text": described(plan, plan.seq_len), "handle": None}
        names["choices"] = plan.text
        return
    docs = dumps((plan.docs.encoded.tolist(), plan.docs.length))
    handle = next(HANDLES)
    names |= {"text": described(plan, plan.seq_len) + docs, "choices": described(plan, 1), "handle": np.array([handle])}
    LAID_OUT[handle] = plan


def described(plan: Plan, seq_len: int) -> str:
    """The lines of all but the documents."""
    values = {name: getattr(plan, name) for name in NAMED} | {"seq_len": seq_len}
    if plan.work is not None:
        values["work"] = plan.work.causal, plan.work.window, plan.work.chunk, plan.work.first
    choices = dumps([list(values.values()), list(vars(plan.transport).values())])
    return f"{plan.axes.number}\n{choices}\n{plan.machine.text}\n"


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
    if exporting() and not isinstance(plan, Alone):
        raise ValueError(
            "torch.export with a plan is not supported: the exported program would hold ranks of this process; export "
            "the module without a plan, for one device"
        )
    return "" if isinstance(plan, Alone) else str(held(plan.text))


def text_and_handle(plan: Any) -> tuple[str, Tensor | None]:
    """The plan for an op whose graph serves all batches: of a plan for documents, the text of what they share."""
    if plan.docs is None or not torch.compiler.is_compiling():
        return text_of(plan), None
    return held(plan.choices), torch.from_numpy(plan.handle.copy())


def exporting() -> bool:
    """Whether torch.export traces. In torch 2.11 is_exporting is True under torch.compile too, so use its flag."""
    return torch.compiler.is_exporting() if TELLS else torch.compiler._is_exporting_flag


def plain(n: int) -> int:
    """The number as a plain int; of a symbolic one, its value: ranges need values."""
    return range(n).stop


def plan_of(text: str, seq_len: int, key_len: int, handle: Tensor | None = None) -> Plan:
    """The plan with this text, or this handle; for "" that of one device, for tensors of these lengths."""
    if handle is not None:
        return of_handle(text, int(handle))
    return kept_plan(seq_len, key_len) if text == "" else of_text(text)


def spread(text: str) -> Any:
    """The plan while a graph is traced, for attributes that do not depend on lengths: ring, ulysses, layout."""
    return Alone(0, 0) if text == "" else of_text(text)


def of_text(text: str) -> Plan:
    """The plan with this text, while its axes live."""
    number, _, rest = text.partition("\n")
    axes = LIVE.get(int(number))
    if axes is None:
        raise RuntimeError("the ranks that this compiled graph was made for are gone: compile again with a new plan")
    if text not in axes.plans:
        choices, described, docs = rest.split("\n")
        values, transport = loads(choices)
        given = dict(zip(NAMED, values, strict=True))
        if docs:
            numbers, length = loads(docs)
            given["docs"] = decoded(np.array(numbers, np.int64), length)
        if given["work"] is not None:
            causal, window, *more = given["work"]
            given["work"] = AttentionSpec(causal, tuple(window) if isinstance(window, list) else window, *more)
        how = Transport(*transport)
        keep(axes.plans, text, Plan(**given, transport=how, machine=machine.of_text(described), axes=axes))
    plan: Plan = axes.plans[text]
    return plan


def of_handle(text: str, handle: int) -> Plan:
    """The plan with these `choices` and this handle, which a graph takes as a number, so that it serves every batch.

    It exchanges all heads at once: in how many groups would follow from its length, and a graph's backward depends on
    that number.
    """
    axes = of_text(text).axes
    if handle not in axes.plans:
        plan = LAID_OUT.get(handle)
        if plan is None:
            raise RuntimeError("the plan of this batch is gone: hold it until backward is done")
        if plan.ulysses > 1 and plan.transport.groups is None:
            made = plan.replace(transport=plan.transport.replace(groups=1))
            vars(made)["tokens"] = plan.tokens  # not dealt out again
            plan = made
        keep(axes.plans, handle, plan)
    live: Plan = axes.plans[handle]
    return live


def keep(plans: dict[Any, Plan], key: str | int, plan: Plan) -> None:
    """As many as batches can be on their way to backward; each may lay out other documents."""
    if len(plans) == 256:
        del plans[next(iter(plans))]
    plans[key] = plan


@constant
def held(text: str) -> str:
    """A text that a compiled graph holds as a constant; keeps its plan alive until the process ends."""
    HELD[text] = of_text(text)
    return text


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
    """The cached documents of these numbers. Caches are keyed by documents, and the same object is found fastest."""
    return decoded(np.frombuffer(starts, np.int64).reshape(shape), length)


def decoded(numbers: np.ndarray, length: int) -> Docs:
    """The documents with this `encoded`; the numbers may not change later."""
    if numbers.ndim == 2:
        return Docs(numbers, length)
    parts: list[Any] = []
    for _ in Docs.PARTS:
        dims, rest = int(numbers[0]), numbers[1:]
        shape, rest = rest[:dims], rest[dims:]
        size = int(shape.prod()) if dims else 0
        parts.append(rest[:size].reshape(shape).copy() if dims else None)
        numbers = rest[size:]
    return Docs(parts[0], length, *parts[1:])
