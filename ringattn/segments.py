"""The segments of the sequence that ranks hold, and the order in which a state passes them: plain Python."""

from functools import lru_cache

from ringattn.planning import Plan

Place = tuple[int, int, int]  # ring rank, Ulysses rank, which of its segments


def passes(plan: Plan) -> int:
    """How often the sequence goes round the ring: in zigzag there and back."""
    return 2 if plan.layout == "zigzag" and plan.ring > 1 else 1


def segments(plan: Plan) -> int:
    """How many segments a rank holds; an even number of Ulysses ranks parts the two of a zigzag shard."""
    return 2 if passes(plan) == 2 and plan.ulysses % 2 else 1


@lru_cache(maxsize=64)
def order(plan: Plan) -> list[Place]:
    """Every segment of every rank, as they follow each other in the sequence."""
    P = segments(plan)
    length = plan.local_len // P
    starts: dict[Place, int] = {}
    for r in range(plan.ring):
        shard = plan.tokens.shard(r)
        for u in range(plan.ulysses):
            for p in range(P):
                at, whole = (u * P + p) * length, len(shard[0])
                starts[r, u, p] = shard[0].start + at if at < whole else shard[1].start + at - whole
    return sorted(starts, key=lambda place: starts[place])
