"""The segments of the sequence that ranks hold, the order in which a state passes them, and how it travels.

In the balanced layout maps of segments go to the ranks that continue their documents. Where segments are equally long,
the fastest of three ways is used, by predicted time:

    gather     every rank gets every segment's map of the state, and composes those before its own
    ring       the state travels from rank to rank, and each carries it across its own segment
    pipeline   like ring, with the state cut along the value dim, so that many ranks work at once
"""

from functools import lru_cache
from typing import NamedTuple

from ringattn.layouts.layout import MAKERS, Shard
from ringattn.masks.spec import raise_if
from ringattn.plans.plan import Plan

Place = tuple[int, int, int]  # ring rank, Ulysses rank, which of its segments

WAYS = ("gather", "ring", "pipeline")
BEFORE = -(2**30)  # the start of the first document: before all tokens of any segment
MAX_GATHERED_BYTES = 2**28  # the most bytes that the maps of all ranks may take on each rank


def segments_problem(plan: Plan) -> str | None:
    """Why a state cannot pass the segments of this plan, if it cannot."""
    if on_one_rank(plan):
        return None
    if plan.tokens.by_document:
        return (
            "this plan cuts each document over all ranks (for_docs), so a state would have to pass them all for every "
            "document; use the plan without for_docs"
        )
    if plan.tokens.segments or plan.tokens.many:
        return None
    return (
        f"layout={plan.layout!r} deals out neighbouring tokens to different ranks, so a state would have to travel "
        "after every token; use layout='zigzag' or 'contiguous'"
    )


@lru_cache(maxsize=64)
def passes(plan: Plan) -> int:
    """How often the sequence passes the ring: once, or there and back as in zigzag; 0 if in another order."""
    if on_one_rank(plan):
        return 1
    ranks = [r for r, _, _ in order(plan)]
    there, each = sorted(ranks), len(ranks) // plan.ring
    back = each % 2 == 0 and ranks == there[::2] + there[::2][::-1]
    return 1 if ranks == there else 2 if back else 0


def ways(plan: Plan) -> tuple[str, ...]:
    """How states may travel: around the ring only if they pass its ranks in turn."""
    return ("auto",) if uneven(plan) else WAYS if passes(plan) else ("gather",)


def layouts(ring: int, ulysses: int) -> dict[str, tuple[str, ...]]:
    """The layouts that linear attention takes over these ranks, and the ways of states in each."""
    plans = [Plan(1, ring, ulysses, layout=name) for name in (MAKERS if ring > 1 else ("contiguous",))]
    return {plan.layout: ways(plan) for plan in plans if not segments_problem(plan)}


def segments(plan: Plan) -> int:
    """How many segments a rank holds, at most; an even number of Ulysses ranks parts the two of a zigzag shard."""
    raise_if(segments_problem(plan))
    return 1 if on_one_rank(plan) else max(map(len, pieces(plan)))


def on_one_rank(plan: Plan) -> bool:
    """Whether one rank holds the sequence in its own order. Asks for no lengths: in a graph they may be symbolic."""
    return plan.docs is None and plan.ring * plan.ulysses == 1


def uneven(plan: Plan) -> bool:
    """Whether segments are of any length, and ranks hold more of them or fewer: the balanced layout."""
    return not on_one_rank(plan) and plan.tokens.many


@lru_cache(maxsize=64)
def pieces(plan: Plan) -> list[Shard]:
    """The segments of every rank, Ulysses ranks inside of ring ranks, in the order in which they lie there."""
    layout, places = plan.tokens, [(r, u) for r in range(plan.ring) for u in range(plan.ulysses)]
    if layout.many:
        return [layout.held(r, u) for r, u in places]
    return [tuple(tokens for (tokens,) in layout.parts(r, u, layout.segments)) for r, u in places]


@lru_cache(maxsize=64)
def order(plan: Plan) -> list[Place]:
    """Every segment of every rank, in the order of the sequence."""
    starts = ((r.start, (*divmod(rank, plan.ulysses), p)) for rank, each in enumerate(pieces(plan))
              for p, r in enumerate(each))  # fmt: skip
    return [place for _, place in sorted(starts)]


class Way(NamedTuple):
    """How states travel; the value dim is cut into `pieces`."""

    name: str
    pieces: int = 1


@lru_cache(maxsize=256)
def choose(plan: Plan, requested: str, columns: int, value_dim: int, factor: int = 1) -> Way:
    """The requested way, or for "auto" the fastest by predicted time until the last rank has its state.

    A column of a state has `columns` bytes; the factor of a map has `factor` such columns beside those of a state.
    """
    if not passes(plan):
        return Way("gather")
    link, ranks = plan.link, plan.ring * plan.ulysses
    maps = passes(plan) * columns * (factor + value_dim)  # bytes of a rank's maps

    def seconds(way: Way) -> float:
        if way.name == "gather":
            return float(link.seconds((ranks - 1) * maps, 1, ranks))
        hop = float(link.seconds(columns * value_dim / way.pieces, 1, way.pieces))
        return passes(plan) * (plan.ring - 1 + way.pieces - 1) * hop

    cuts = [n for n in (2, 4, 8, 16, 32) if value_dim % n == 0] or [1]
    options = [Way("gather"), Way("ring"), *(Way("pipeline", n) for n in cuts)]
    if requested != "auto":
        options = [way for way in options if way.name == requested]
    elif ranks * maps > MAX_GATHERED_BYTES:
        options = options[1:]
    return min(options, key=seconds)
