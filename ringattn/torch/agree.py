"""What every rank must say alike before anything is sent, and the error that names who did not."""

import json
import zlib
from typing import Any

from torch import Tensor

from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs


def describe(
    plan: Plan, spec: AttentionSpec | None, tensors: dict[str, Tensor | None], docs: Docs | None
) -> dict[str, str]:
    """One call as words that are equal on all ranks: the plan's choices, the spec, shapes, dtypes, documents."""
    words = {
        "plan": str(plan),
        "route": f"{plan.route} {plan.together} {plan.backward} {plan.groups}",
        "spec": str(spec),
    }
    for name, x in tensors.items():
        words[name] = "None" if x is None else f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    words["docs"] = "None" if docs is None else f"{docs} #{zlib.crc32(docs.starts.tobytes()):08x}"
    return words


def agree(plan: Plan, words: dict[str, str], problem: str | None = None) -> None:
    """Raise on all ranks alike if one of them has a problem, or if their words differ; says which ranks and fields.

    Where words travel cheaply (gloo, threads) every call is checked; elsewhere the first one of each kind.
    """
    ring, ulysses = plan.ring_axis, plan.ulysses_axis
    if ring.size * ulysses.size == 1:
        if problem:
            raise ValueError(problem)
        return
    text = json.dumps(words)
    if not problem and text in plan.agreed and not watched(plan):
        return
    said = ulysses.exchange_words(ring.exchange_words((text, problem)))
    everyone = {(r, u): said[u][r] for u in range(len(said)) for r in range(len(said[u]))}
    complain({place: why for place, (_, why) in everyone.items() if why}, len(everyone))
    compare({place: json.loads(one) for place, (one, _) in everyone.items()})
    plan.agreed.add(text)


def watched(plan: Plan) -> bool:
    """Whether every call is compared between ranks, because words cost little there."""
    ring, ulysses = plan.ring_axis, plan.ulysses_axis
    return bool(ring.size * ulysses.size > 1 and ring.cheap_words and ulysses.cheap_words)


def complain(problems: dict[tuple[int, int], str], count: int) -> None:
    """The first rank's problem, for everybody; with the ranks' names if it is not everybody's."""
    if problems:
        why = next(iter(problems.values()))
        where = "" if len(problems) == count else f" (on {ranks(problems)})"
        raise ValueError(why + where)


def compare(everyone: dict[tuple[int, int], dict[str, str]]) -> None:
    first = next(iter(everyone))
    lines = []
    for name, expected in everyone[first].items():
        others: dict[str, list[tuple[int, int]]] = {}
        for place, words in everyone.items():
            if words.get(name) != expected:
                others.setdefault(words.get(name, "nothing"), []).append(place)
        for found, places in others.items():
            lines.append(f"{name}: {ranks([first])} has {expected}, {ranks(places)} has {found}")
    if lines:
        raise ValueError("the ranks do not make the same call: " + "; ".join(lines))


def ranks(places: Any) -> str:
    return ", ".join(f"ring rank {r}" + (f" ulysses rank {u}" if u else "") for r, u in places)
