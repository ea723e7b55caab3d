"""Whether all ranks make the same call and were given the same data; errors name the ranks that differ.

Calls are compared before anything is sent. A sampler that deals examples out over all ranks gives the ranks of a plan
different sequences, whose parts would be joined into one. So ranks compare checksums of what they shard whenever they
compare their calls: in every call where words are cheap to exchange (gloo, threads), elsewhere in the first one of a
kind.
"""

import threading
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.plan import Plan

MAX_CALLS, MAX_PACKED = 64, 12  # bound calls that are cached for a plan: without documents, and with
MAX_CHECKSUMS = 16  # kept between two comparisons; with more than that, the comparison is skipped
MAX_NUMBERS = 2**22  # of a tensor that a checksum reads

Place = tuple[int, int]  # ring rank, ulysses rank
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
        "graphs": plan.graphs,
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

    Where words are cheap to exchange every call is compared. Elsewhere only the first call of each kind is; calls that
    differ only in their documents are of one kind. After that, a rank raises its problems alone, since the others do
    not wait for them, and documents that differ between ranks are not noticed. `has` is what the kernels that this rank
    selects follow from; it may differ.
    """
    alone = plan.ring * plan.ulysses == 1
    every = not alone and watched(plan)
    agreed = set() if alone or every else plan.agreed
    if problem and (alone or agreed):
        raise ValueError(problem)
    if alone or (agreed and kind_of(words) in agreed):
        return
    try:
        everyone = exchanged(plan, {"words": words, "problem": problem, "data": checksums(plan), "has": has})
    except (RuntimeError, OSError) as error:
        if problem:
            raise ValueError(problem) from error
        raise
    entries = list(everyone.values())
    if problem or entries.count(entries[0]) < len(entries):
        if problems := {place: entry["problem"] for place, entry in everyone.items() if entry["problem"]}:
            where = "" if len(problems) == len(everyone) else f" (on {named(problems)})"
            raise ValueError(next(iter(problems.values())) + where)
        compare_checksums({place: entry["data"] for place, entry in everyone.items()})  # may be why words differ
        compare({place: entry["words"] for place, entry in everyone.items()})
    if has is not None:
        plan.axes.alike = all(entry["has"] == has for entry in entries)
    if not every:
        agreed.add(kind_of(words))


def refuse(problem: str, plan: Any) -> NoReturn:
    """Raise the problem on all ranks of the plan, although only some of them may have noticed it."""
    if isinstance(plan, Plan) and plan.framework == "torch" and plan.axes.here:
        agree(plan, {}, problem)
    raise ValueError(problem)


def exchanged(plan: Plan, mine: Any) -> dict[Place, Any]:
    """The small Python values of all ranks, each with its place: the axes of other ranks may have other sizes."""
    axes = plan.ring_axis, plan.ulysses_axis
    values: list[Any] = [[axes[0].rank, axes[1].rank, mine]]
    for axis in axes:
        if axis.size > 1:
            values = [value for part in axis.exchange_words(values) for value in part]
    return {(r, u): value for r, u, value in values}


def key_of(tensors: Iterable[Tensor | None], *others: Any) -> tuple[Any, ...]:
    """The key of a bound call: all of its arguments except the numbers in tensors."""
    kinds = [None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors]
    return torch._C._get_deterministic_algorithms(), others, *kinds


def remember(calls: dict[Any, Any], key: Any, call: Any) -> None:
    """Cache a call, and drop the oldest of its sort (with documents or without) if there are too many.

    Calls with documents keep two numbers per token on the device, and each batch has other documents.
    """
    packed = call.docs is not None
    same = [old for old, kept in list(calls.items()) if (kept.docs is not None) == packed]
    if len(same) >= (MAX_PACKED if packed else MAX_CALLS):
        calls.pop(same[0], None)
    calls[key] = call


def kind_of(words: Words) -> tuple[Any, ...]:
    """A call's words with only the presence of documents, since every batch has other documents."""
    return tuple((name, word == "None" if name.endswith("docs") else word) for name, word in words.items())


def watched(plan: Plan) -> bool:
    """Whether every call is compared between ranks, because exchanging words is cheap."""
    ring, ulysses = plan.ring_axis, plan.ulysses_axis
    return bool(ring.size * ulysses.size > 1 and ring.cheap_words and ulysses.cheap_words)


def compare(everyone: dict[Place, Words]) -> None:
    """Raise if ranks have different words."""
    first, lines = next(iter(everyone)), []
    for name in dict.fromkeys(name for words in everyone.values() for name in words):
        by_word: dict[str, list[Place]] = {}
        for place, words in everyone.items():
            by_word.setdefault(words.get(name, "nothing"), []).append(place)
        (expected, _), *others = by_word.items()
        if others:
            found = [f"{named(places)} has {word}" for word, places in others]
            lines.append(", ".join([f"{name}: {named([first])} has {expected}", *found]))
    if lines:
        raise ValueError("the ranks do not make the same call: " + "; ".join(lines))


def note(x: Tensor, plan: Plan) -> None:
    """Keep a checksum of a whole tensor of integers, and of documents that are laid out, if ranks will compare it.

    With the thread: what one that loads ahead shards is of no call yet.
    """
    if torch.compiler.is_compiling() or plan.ring * plan.ulysses == 1 or not plain(x):
        return
    noted: list[tuple[int, Tensor]] = plan.axes.kept.setdefault("checksums", [])
    if len(noted) <= MAX_CHECKSUMS and (watched(plan) or not plan.agreed):
        docs = 0 if plan.docs is None else zlib.crc32(plan.docs.encoded.tobytes())
        noted.append((threading.get_ident(), checksum(x) + docs))


def plain(x: Tensor) -> bool:
    """Integers with values: not traced, fake or captured."""
    return (
        type(x) is Tensor
        and not (x.is_floating_point() or x.is_complex() or x.is_meta)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def checksum(x: Tensor) -> Tensor:
    """An int64 that depends on the numbers and their places, on their device."""
    flat = x.detach().reshape(-1)
    flat = flat[:: flat.numel() // MAX_NUMBERS + 1].long()
    mixed = (flat + torch.arange(1, len(flat) + 1, device=x.device) * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    return (mixed ^ (mixed >> 32)).sum() + x.numel()


def checksums(plan: Plan) -> list[int]:
    """The checksums of this thread since the last call, which are then dropped; empty if there were too many.

    Waits for the device.
    """
    noted, thread = plan.axes.kept.get("checksums"), threading.get_ident()
    if not noted:
        return []
    mine = [int(x) for by, x in noted if by == thread]
    full = len(noted) > MAX_CHECKSUMS
    noted[:] = [] if full else [(by, x) for by, x in noted if by != thread]
    return [] if full else mine


def compare_checksums(everyone: dict[Place, list[int]]) -> None:
    """Raise if ranks sharded different tensors. Ranks with different numbers of tensors are not compared."""
    (first, expected), *others = everyone.items()
    if unlike := [place for place, mine in others if len(mine) == len(expected) and mine != expected]:
        raise ValueError(
            "the ranks of one plan were given different sequences: integers (ids, labels), or the documents that the "
            f"plan lays out, of {named(unlike)} are not those of {named([first])}; give all of them the same whole "
            "sequences, with DistributedSampler(dataset, num_replicas=DATA_RANKS, rank=DATA_RANK) (1 and 0 without a "
            "data axis), or, if they differ on purpose, pass compare=False to plan.shard or hf.prepare"
        )


def named(places: Iterable[Place]) -> str:
    return ", ".join(f"ring rank {r}" + (f" ulysses rank {u}" if u else "") for r, u in places)
