"""Whether all ranks make the same call, compared before anything is sent; the error names the ranks that differ."""

import zlib
from typing import Any, NoReturn

import torch
from torch import Tensor

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.plan import Plan
from ringattn.torch import same_data
from ringattn.torch.same_data import Place, named

MAX_KINDS = 1024  # of calls that a plan remembers

Words = dict[str, str]


def describe(
    plan: Plan, spec: AttentionSpec | None, tensors: dict[str, Tensor | None], docs: Docs | None,
    key_docs: Docs | None = None, **more: Any,
) -> Words:  # fmt: skip
    """The words of a call, equal on all ranks: the plan's choices, the spec, shapes, documents, and `more`."""
    how = plan.transport
    words = {name: str(value) for name, value in more.items()} | {
        "plan": str(plan),
        "route": f"{how.route} {how.hosts} {how.together} {how.groups}",
        "transport.grads": how.grads,
        "machine": plan.machine.label,
        "spec": str(spec),
        "plan.work": str(plan.work),
    }
    for name, x in tensors.items():
        words[name] = "None" if x is None else f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    for name, packed in (("docs", docs), ("key_docs", key_docs), ("plan.docs", plan.docs)):
        words[name] = "None" if packed is None else f"{packed} #{zlib.crc32(packed.encoded.tobytes()):08x}"
    return words


def agree(plan: Plan, words: Words, problem: str | None = None, has: str | None = None) -> None:
    """Raise the same error on all ranks if one has a problem or if their words differ; it names the ranks and fields.

    Where words are cheap to exchange (gloo, threads) every call is compared. Elsewhere only the first call of each kind
    is; calls that differ only in their documents are of one kind. After that, a rank raises its problems alone, since
    the others do not wait for them, and documents that differ between ranks are not noticed. `has` is what the kernels
    that this rank selects follow from; it may differ.
    """
    alone, kind = plan.ring * plan.ulysses == 1, kind_of(words)
    if problem and (alone or plan.agreed):
        raise ValueError(problem)
    if alone or kind in plan.agreed:
        return
    try:
        mine = {"words": words, "problem": problem, "taken": same_data.taken(plan), "has": has}
        everyone = exchanged(plan, mine)
    except (RuntimeError, OSError) as error:
        if problem:
            raise ValueError(problem) from error
        raise
    complain({place: entry["problem"] for place, entry in everyone.items() if entry["problem"]}, len(everyone))
    same_data.judge({place: entry["taken"] for place, entry in everyone.items()})  # may be why words differ
    compare({place: entry["words"] for place, entry in everyone.items()})
    if has is not None:
        plan.axes.alike = all(entry["has"] == has for entry in everyone.values())
    remember(plan, kind)


def refuse(problem: str, plan: Any) -> NoReturn:
    """Raise the problem on all ranks of the plan, although only some of them may have noticed it."""
    if isinstance(plan, Plan) and plan.framework == "torch" and plan.axes.here:
        agree(plan, {}, problem)
    raise ValueError(problem)


def exchanged(plan: Plan, mine: Any) -> dict[Place, Any]:
    """The small Python values of all ranks, each with its place: the axes of other ranks may have other sizes."""
    values: list[Any] = [[plan.ring_axis.rank, plan.ulysses_axis.rank, mine]]
    for axis in (plan.ring_axis, plan.ulysses_axis):
        values = [value for part in axis.exchange_words(values) for value in part]
    return {(r, u): value for r, u, value in values}


def compare_data(plan: Plan) -> None:
    """Count a step of training. Where ranks do not compare every call, they compare the data of some steps."""
    if torch.compiler.is_compiling() or plan.ring * plan.ulysses == 1:
        return
    seen = same_data.seen_of(plan)
    capturing = plan.device == "cuda" and torch.cuda.is_current_stream_capturing()  # which cannot wait for the device
    due = seen.due and not (watched(plan) or capturing)
    seen.steps += 1
    if due:
        same_data.judge(exchanged(plan, same_data.taken(plan)))


def kind_of(words: Words) -> tuple[Any, ...]:
    """A call's words with only the presence of documents, since every batch has other documents."""
    return tuple(
        (name, word == "None" if name in ("docs", "key_docs", "plan.docs") else word) for name, word in words.items()
    )


def remember(plan: Plan, kind: Any) -> None:
    """Do not compare calls of this kind again, if comparing costs more than this look-up.

    All ranks clear their set at the same call, since all must compare the same calls.
    """
    if watched(plan):
        return
    if len(plan.agreed) >= MAX_KINDS:
        plan.agreed.clear()
    plan.agreed.add(kind)


def watched(plan: Plan) -> bool:
    """Whether every call is compared between ranks, because exchanging words is cheap."""
    ring, ulysses = plan.ring_axis, plan.ulysses_axis
    return bool(ring.size * ulysses.size > 1 and ring.cheap_words and ulysses.cheap_words)


def complain(problems: dict[Place, str], count: int) -> None:
    """Raise the first rank's problem on all ranks, naming the ranks that have it unless all do."""
    if problems:
        why = next(iter(problems.values()))
        where = "" if len(problems) == count else f" (on {named(list(problems))})"
        raise ValueError(why + where)


def compare(everyone: dict[Place, Words]) -> None:
    first = next(iter(everyone))
    lines = []
    for name in dict.fromkeys(name for words in everyone.values() for name in words):
        expected = everyone[first].get(name, "nothing")
        others: dict[str, list[Place]] = {}
        for place, words in everyone.items():
            if words.get(name, "nothing") != expected:
                others.setdefault(words.get(name, "nothing"), []).append(place)
        if others:
            all_found = [f"{named(places)} has {value}" for value, places in others.items()]
            lines.append(", ".join([f"{name}: {named([first])} has {expected}", *all_found]))
    if lines:
        raise ValueError("the ranks do not make the same call: " + "; ".join(lines))
