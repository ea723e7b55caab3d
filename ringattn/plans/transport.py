"""How blocks travel between ranks, as far as a caller may say it."""

from typing import Any

from ringattn.comms.axis import TRANSPORTS
from ringattn.masks.values import Value, fields
from ringattn.plans.sizes import size_of

ROUTES = ("direct", "relay", "levels")
GRADS = ("input", "float32")


class Transport(Value):
    """How blocks travel between the ranks of a torch mesh. `ringattn.plan` chooses whatever is not given.

    route      how blocks of keys reach the ranks of a ring: "direct", from their owner to each rank that sees them;
               "relay", from rank to rank; "levels", from host to host and direct within a host; auto depends on `hosts`
    hosts      the number of hosts of the ring, with consecutive ranks and equally many on each; by default detected
    together   the most that a step may bring on the direct route, in blocks; by default several if they are small. Of
               a block only what is seen counts
    groups     the number of groups of heads that Ulysses and gather exchange, one while another is computed; by default
               chosen by predicted time
    by         "symmetric" (copy engines, between GPUs that can read each other's memory) or "group" (NCCL, gloo)
    grads      the dtype in which gradients travel on a ring: that of the "input", or "float32" (float64 for float64);
               auto takes the one in which the kernel that the plan expects computes them
    """

    route: str = "auto"
    hosts: int | None = None
    together: int | None = None
    groups: int | None = None
    by: str = "auto"
    grads: str = "auto"

    def __post_init__(self) -> None:
        for name in ("hosts", "together", "groups"):
            object.__setattr__(self, name, size_of(name, getattr(self, name)))
        named = {"route": ROUTES, "by": TRANSPORTS[1:], "grads": GRADS}
        for name, choices in named.items():
            if getattr(self, name) not in ("auto", *choices):
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of auto, {', '.join(choices)}")

    @property
    def chosen(self) -> dict[str, Any]:
        """The choices that are given, by name."""
        return {name: getattr(self, name) for name, f in fields(self).items() if getattr(self, name) != f.default}
