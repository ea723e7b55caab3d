"""What a plan is given: sizes, which are refused with the remedy if they cannot be, and how blocks travel."""

from typing import Any

from ringattn.comms.axis import TRANSPORTS
from ringattn.masks.numeric import MAX_SIZE, of_choice, raise_if, whole
from ringattn.masks.values import Value
from ringattn.plans.cost import heads_of_group, may_group

DTYPES = ("float16", "bfloat16", "float32", "float64")
ROUTES = ("direct", "relay", "levels")
GRADS = ("input", "float32")


def size_of(name: str, value: Any) -> Any:
    """The size as an int, also from numpy's ints; None where that means to choose."""
    if value is None and name not in ("seq_len", "ring", "ulysses"):
        return None
    size = whole(value)
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{name}={value!r}: give a whole number from 1 to {MAX_SIZE}")
    return size


def heads_of(heads: Any) -> tuple[int, int] | None:
    """(query heads, key heads) from a pair, from one number for both, or None."""
    if heads is None:
        return None
    pair = heads if isinstance(heads, (tuple, list)) else (heads, heads)
    query, key = map(whole, pair) if len(pair) == 2 else (None, None)
    if query is None or key is None:
        raise ValueError(f"heads={heads!r}: (query heads, key heads), or one number for both")
    return query, key


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch, JAX or numpy, or of a string; a ValueError if attention does not support it."""
    bare = dtype if isinstance(dtype, type) else getattr(dtype, "dtype", dtype)  # jnp.float32 is no dtype but has one
    name = getattr(bare, "__name__", None) or getattr(bare, "name", None) or str(bare).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    return str(name)


def heads_problem(heads: int, kv_heads: int, *, ulysses: int, ring: int = 1) -> str | None:
    """Key heads divide query heads, and the Ulysses size divides query heads (key heads are repeated if necessary)."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        return f"{kv_heads} key heads do not divide {heads} query heads"
    if heads % ulysses == 0:
        return None
    best = max(u for u in range(1, ulysses + 1) if heads % u == 0 and (ring * ulysses) % u == 0)
    return f"ulysses={ulysses} does not divide {heads} query heads; use ulysses={best}, ring={ring * ulysses // best}"


def groups_problem(groups: int | None, heads: tuple[int, int], ulysses: int, ring: int) -> str | None:
    """Every group has equally many heads of each rank."""
    if groups is None:  # of heads that a compiler may trace
        return None
    query, key = heads_of_group(*heads, ulysses, 1)
    if isinstance(groups, int) and groups > 0 and may_group(groups, query, key, ring):
        return None
    which = f"{query} query heads" if key == ring == 1 else f"{key} key heads"
    return f"groups={groups!r} does not divide the {which} of a rank; leave it out, or use groups=1"


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
        for name, choices in {"route": ROUTES, "by": TRANSPORTS[1:], "grads": GRADS}.items():
            raise_if(of_choice(name, getattr(self, name), ("auto", *choices)))
