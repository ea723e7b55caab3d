"""The suites of one device: cases by their names, contestants in turns on the same inputs, rows of what they took.

A contestant turns the inputs of a case into its passes: {"forward": call, "backward": call}, say. What it cannot run it
refuses with a NotImplementedError, which is printed.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringattn.conf.keys import nearest
from ringattn.launch.bench import Row, table
from ringattn.launch.bench.memory import held
from ringattn.launch.bench.timing import finish, in_turns
from ringattn.launch.words import option

DTYPES = ("bfloat16", "float16", "float32", "float64")
OURS = ("auto", "triton", "decode", "tiled", "chunkwise", "op", "states")  # whose errors are no news but bugs
ROUNDS: Any = option(20, "rounds, in each of which every contestant runs once", least=1)

Passes = dict[str, Callable[[], Any]]


def settle(options: Any, cases: Iterable[str], contestants: Iterable[str] = ()) -> None:
    """Fill in the device and the dtype; a ValueError for a case or a contestant that does not exist."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if hasattr(options, "dtype"):
        options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    for name in getattr(options, "impls", None) or ():
        if name not in contestants:
            raise ValueError(f"impls={name}: no such contestant{nearest(name, contestants)}")
    for word in options.cases:
        if not chosen([word], cases):
            raise ValueError(f"cases={word}: no such case{nearest(word, cases)}; there are {', '.join(cases)}")


def chosen(words: Sequence[str], cases: Iterable[str]) -> list[str]:
    """The cases of these names; a word that is no name stands for all that begin with it."""
    return [n for n in cases if any(n == w or (w not in cases and n.startswith(w)) for w in words)]


def sized(options: Any, cases: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen cases by their names, all of the length that the options ask for, if they do."""
    names = chosen(options.cases, cases)
    return {name: replace(cases[name], tokens=options.tokens or cases[name].tokens) for name in names}


def each(cases: Mapping[str, Any], rows_of: Callable[[Any], list[Row]], about: Callable[[Any], Row]) -> Iterator[Row]:
    """The rows of every case, printed when the case is done, with its name and remarks."""
    for name, case in cases.items():
        new = [{"case": name, **about(case), **row} for row in rows_of(case)]
        print(table(new, list(dict.fromkeys(key for row in new for key in row))) + "\n", flush=True)
        yield from new


def side_by_side(names: Iterable[str] | None, rows_of: Callable[[str], list[Row]]) -> list[Row]:
    """The rows of every contestant that does not refuse."""
    return [{"impl": name, **row} for name, rows in entered(names or (), rows_of).items() for row in rows]


def entered(names: Iterable[str], enter: Callable[[str], Any]) -> dict[str, Any]:
    """What every contestant gives; if one refuses, or a peer's own code fails, the reason is printed instead."""
    given = {}
    for name in names:
        try:
            given[name] = enter(name)
        except NotImplementedError as error:
            print(f"{name}: {error}")
        except Exception as error:
            if name in OURS:
                raise
            print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
    return given


def timed(
    names: Iterable[str], enter: Callable[[str], Passes], options: Any, figure: str, amounts: Mapping[str, float],
    calls: int = 1,
) -> list[Row]:  # fmt: skip
    """A row a contestant and pass of `amounts`: its time, the figure (amount over time), and its peak memory.

    Contestants' calls alternate, so all have the same clock. Times are medians over the rounds; in our rows `over_NAME`
    is the median of NAME's time over ours: above 1, ours is faster. What is timed does the same `calls` times.
    """

    def tried(name: str) -> Passes:
        passes = enter(name)
        passes["both"] = lambda: (passes["forward"](), passes["backward"]())
        for what in amounts:
            passes[what]()
        return passes

    contestants, rows = entered(names, tried), []
    times = {
        what: in_turns({n: passes[what] for n, passes in contestants.items()}, options.rounds, options.device)
        for what in amounts
    }
    for name, passes in contestants.items():
        for what, amount in amounts.items():
            own = times[what][name]
            ms = statistics.median(own) / calls
            rows.append({"impl": name, "pass": what, "ms": ms, figure: amount / ms, "peak_gib": peak_gib(passes[what])})
            for other, theirs in times[what].items() if name in OURS else ():
                if other != name:
                    ratios = [x / y for x, y in zip(theirs, own, strict=True)]
                    rows[-1][f"over_{other}"] = statistics.median(ratios)
    return rows


def off(
    names: Iterable[str] | None, results: Callable[[str], Mapping[str, Any]], truth: Mapping[str, Tensor | None],
    base: str, prefix: str,
) -> list[Row]:  # fmt: skip
    """How far each contestant's results are off float64, |result - exact| / |exact|, and that over `base`'s."""

    def errors(name: str) -> list[Row]:
        given = results(name)
        distances = {n: (given[n].double() - x).norm() / x.norm() for n, x in truth.items() if x is not None}
        return [{f"error_{n}": x.item() for n, x in distances.items()}]

    rows = side_by_side(names, errors)
    for of in [row for row in rows if row["impl"] == base]:
        for row in rows:
            row |= {f"{prefix}_{n}": row[f"error_{n}"] / of[f"error_{n}"] for n in truth if f"error_{n}" in of}
    return rows


def differentiated(forward: Callable[[], Tensor], leaves: Sequence[Tensor | None], dout: Tensor) -> Passes:
    """Forward, and backward by autograd: a gradient for each leaf, None where there is none."""
    out = forward()

    def backward() -> list[Tensor | None]:
        grads = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], dout, retain_graph=True))
        return [x if x is None else next(grads) for x in leaves]

    return {"forward": forward, "backward": backward}


def peak_gib(function: Callable[[], Any]) -> float | None:
    """What a call allocates at its peak, beyond its inputs."""
    if not torch.cuda.is_available():
        return None
    finish()
    memory = held("cuda")
    function()
    finish()
    return memory.grown() / 2**30
