"""The ranks of a plan, with all that is cached for as long as they live."""

from collections.abc import Iterator
from functools import cache, cached_property
from itertools import count
from typing import Any

from ringattn.comms.axis import Solo


class Ranks:
    """The ranks of a plan: framework, kind of device and the two axes.

    here    False if the plan is only computed, for ranks that do not exist
    cuts    the axes of a JAX mesh that cut the batch and the heads, if the user named them
    """

    def __init__(
        self, ring: Any, ulysses: Any, framework: str = "torch", device: str = "cpu", here: bool = True,
        cuts: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
    ):  # fmt: skip
        self.ring, self.ulysses, self.cuts = ring, ulysses, cuts
        self.framework, self.device, self.here = framework, device, here
        self.calls: dict[Any, Any] = {}  # bound calls, by their key
        self.agreed: dict[Any, set[Any]] = {}  # by plan: the kinds of calls that all ranks agreed on
        self.alike = True  # whether all ranks select the same kernels, as of their last comparison of calls
        self.kept: dict[str, Any] = {}  # caches of the framework's side
        self.plans: dict[int, Any] = {}  # the plans of documents that compiled graphs use, by their handle
        self.number = next(NUMBERS)  # by which compiled graphs tell them apart

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """What makes ranks of two plans differ in JAX, where it keys programs: their axes."""
        axes = [tuple(vars(axis).items()) for axis in self] if self.framework == "jax" and self.here else []
        return (self.framework, *([self.device, self.cuts] if axes else []), *axes)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Ranks) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ring, self.ulysses))

    def __reduce__(self) -> Any:
        """Pickles plans of one rank, and plans of ranks that are not here."""
        return (one_rank, (self.device,)) if self.here else (Ranks, (None, None, self.framework, self.device, False))


NUMBERS = count()
NOT_HERE = Ranks(None, None, here=False)


@cache
def one_rank(device: str = "cpu") -> Ranks:
    """The ranks of plans of one rank: the same object for all plans of one device."""
    return Ranks(Solo("ring"), Solo("ulysses"), device=device)
