"""A plan: how one sequence length is spread over the ranks, chosen once, printed, and used by every call.

Frozen and hashable. It knows the axes it runs on only as objects with a size and a rank. Plans are equal whatever their
process groups; in JAX only over the same devices, since programs are kept by their plans.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ringattn.cost import HARDWARE, Cost, Hardware, Shape, exchanged, groups_of, kv_heads_of_a_rank, predict, seen_pairs
from ringattn.layout import LAYOUTS, Layout
from ringattn.spec import AttentionSpec, Docs, whole

STRATEGIES = ("ring", "gather", "ulysses")
ROUTES = ("direct", "relay", "levels")
TRAVELLERS = ("keys", "queries")
DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES = {
    "seq_len": "a whole number of tokens, at least 1",
    "key_len": "a whole number of tokens, at least 1",
    "ring": "how many ranks the ring has, at least 1",
    "ulysses": "how many ranks heads are spread over, at least 1",
    "hosts": "on how many hosts the ring lies, at least 1 (None: as found)",
    "together": "how many blocks a step may bring, at least 1 (None: auto)",
    "groups": "in how many groups heads are exchanged, at least 1 (None: auto)",
    "head_dim": "the size of a head, a whole number, at least 1",
    "value_dim": "the size of a value, a whole number, at least 1 (None: head_dim)",
}
MOST = 2**53  # a float holds every whole number up to it
LAST = 2**31 - 1  # JAX's positions are int32
NEEDED = ("seq_len", "ring", "ulysses", "hosts")  # the others may be None

# Plans that are alive, by number: a compiled graph holds numbers and tensors, no objects.
LIVE: "WeakValueDictionary[int, Plan]" = WeakValueDictionary()
numbers = itertools.count()


@dataclass(frozen=True)
class Plan:
    """`seq_len` tokens over ring x ulysses ranks. The strategy says how keys meet queries along the ring axis."""

    seq_len: int
    ring: int = 1
    ulysses: int = 1
    strategy: str = "ring"
    layout: str = "contiguous"
    kernel: str = "auto"
    route: str = "direct"
    hosts: int = 1  # on how many hosts the ring lies, for the route over levels
    together: int | None = None  # how many blocks a step of the direct route may bring; None: as many as are small
    backward: str = "keys"  # what travels in the backward pass of the direct route: keys or queries
    groups: int | None = None  # of heads, one after the other through Ulysses and gather; None: as many as are worth it
    key_len: int | None = None
    heads: tuple[int, int] | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    framework: str = "torch"
    axes: tuple[Any, Any] | None = field(default=None, compare=False, repr=False)  # (ring, ulysses)
    device: str = field(default="cpu", compare=False, repr=False)
    report: tuple[str, ...] = field(default=(), compare=False, repr=False)
    place: tuple[Any, ...] = field(init=False, default=(), repr=False)  # in JAX what the axes are made of
    agreed: set[Any] = field(default_factory=set, init=False, compare=False, repr=False)  # kinds of calls, by all ranks
    right: set[Any] = field(default_factory=set, init=False, compare=False, repr=False)  # calls with docs, right here
    handle: int = field(init=False, default=-1, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in SIZES:
            object.__setattr__(self, name, size_of(name, getattr(self, name)))
        object.__setattr__(self, "heads", heads_of(self.heads))
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r}: choose one of auto, {', '.join(STRATEGIES)}")
        if self.strategy == "ulysses" and self.ring > 1:
            raise ValueError(
                f"strategy='ulysses' means a ring axis of size 1, and the mesh has ring={self.ring}; use "
                f"init_mesh(ulysses={self.ring * self.ulysses}), or strategy='ring' for the hybrid of both"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: choose one of auto, {', '.join(LAYOUTS)}")
        if self.route not in ROUTES:
            raise ValueError(f"route={self.route!r}: choose one of auto, {', '.join(ROUTES)}")
        if self.ring % self.hosts:
            raise ValueError(
                f"hosts={self.hosts} for ring={self.ring}: as many ranks lie on each host; say one that divides it"
            )
        if self.route == "levels" and self.hosts < 2:
            raise ValueError(
                f"route='levels' needs a ring on several hosts, and ring={self.ring} lies on one; use route='direct' "
                "or 'relay'"
            )
        if self.backward not in TRAVELLERS:
            raise ValueError(f"backward={self.backward!r}: choose one of auto, {', '.join(TRAVELLERS)}")
        if self.backward == "queries" and self.route != "direct":
            raise ValueError(f"backward='queries' goes with route='direct'; with route={self.route!r} keys travel")
        if self.groups not in (None, 1) and self.ulysses == 1 and self.strategy != "gather":
            raise ValueError(
                f"groups={self.groups!r} cuts what Ulysses and gather exchange, and strategy={self.strategy!r} over "
                "ulysses=1 does neither; leave it out"
            )
        if self.heads is not None:
            check_heads(*self.heads, ulysses=self.ulysses, ring=self.ring)
            problem = groups_problem(self.groups, self.heads[1], self.ulysses)
            if problem:
                raise ValueError(problem)
        if self.framework == "jax":
            self._check_positions()
        if self.framework == "jax" and self.axes is not None:
            object.__setattr__(self, "place", (self.device, *(tuple(vars(axis).items()) for axis in self.axes)))
        object.__setattr__(self, "handle", next(numbers))
        LIVE[self.handle] = self

    def _check_positions(self) -> None:
        """Positions, and those up to a stripe behind them, are int32."""
        most = LAST - self.ring + 1
        for name, length in (("seq_len", self.seq_len), ("key_len", self.key_len or 1)):
            padded = Layout(self.layout, length, self.ring, self.ulysses).padded_length
            if padded > most:
                raise ValueError(
                    f"{name}={length}: JAX counts positions in 32 bits, at most {most} tokens, and with padding these "
                    f"are {padded}"
                )

    def __copy__(self) -> "Plan":
        """An equal plan with a handle of its own, on the same axes."""
        return replace(self)

    def __deepcopy__(self, memo: Any) -> "Plan":
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Handles are a process's own, and axes are where they were made: a plan for one rank is made again."""
        if self.axes is not None and (self.ring * self.ulysses > 1 or self.framework == "jax"):
            raise TypeError(
                f"a plan on a mesh cannot be pickled ({self}): make the plan on every rank, with ringattn.plan"
            )
        return partial(Plan, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}), ()

    @cached_property
    def tokens(self) -> Layout:
        """Where the queries' tokens are."""
        return Layout(self.layout, self.seq_len, self.ring, self.ulysses)

    @cached_property
    def keys(self) -> "Plan":
        """The plan by which keys and values are sharded: this one, unless they are another sequence."""
        return self if self.key_len in (None, self.seq_len) else self.for_length(self.key_len)

    @cached_property
    def local_len(self) -> int:
        """How many tokens a rank holds, padding included."""
        return self.tokens.shard_len // self.ulysses

    @cached_property
    def padded(self) -> bool:
        """Whether some rank holds padding."""
        return self.tokens.padded_length != self.seq_len

    @property
    def ring_axis(self) -> Any:
        return self._axis(0, self.ring)

    @property
    def ulysses_axis(self) -> Any:
        return self._axis(1, self.ulysses)

    def _axis(self, which: int, size: int) -> Any:
        if self.axes is None:
            raise ValueError(f"this plan for {size} ranks has no mesh to run on; make it with ringattn.plan(mesh, ...)")
        return self.axes[which]

    def shape(self, itemsize: int) -> Shape | None:
        """A call of this plan with numbers of so many bytes, if its heads are known."""
        if self.heads is None or self.head_dim is None:
            return None
        value_dim = self.value_dim or self.head_dim
        return Shape(self.seq_len, self.keys.seq_len, *self.heads, self.head_dim, value_dim, itemsize)

    @property
    def swaps(self) -> bool:
        """Whether a call exchanges heads (Ulysses) or gathers keys, so that it can go group of heads by group."""
        return self.ulysses > 1 or (self.strategy == "gather" and self.ring > 1)

    def exchanged(self, shape: Shape) -> int:
        """The bytes a rank sends forward that no step hides."""
        return exchanged(shape, self.ring, self.ulysses, self.strategy, (self.local_len, self.keys.local_len))

    def groups_for(self, shape: Shape) -> int:
        """In how many groups of heads a call's exchanges go."""
        if self.groups is not None:
            return self.groups
        kv_heads = kv_heads_of_a_rank(shape.kv_heads, self.ulysses)
        ranks, hardware = self.ring * self.ulysses, hardware_of(self.device)
        return groups_of(shape, self.exchanged(shape), ranks, kv_heads, hardware)

    def blocks_at_once(self, nbytes: int) -> int:
        """How many blocks of that many bytes a step of the direct route brings."""
        return self.together or hardware_of(self.device).blocks_at_once(nbytes)

    def for_length(self, seq_len: int, key_len: int | None = None) -> "Plan":
        """The same choices for another length."""
        return replace(self, seq_len=seq_len, key_len=key_len)

    def local_slice(self, ulysses_rank: int) -> slice:
        """Which part of its ring shard a Ulysses rank holds."""
        return slice(ulysses_rank * self.local_len, (ulysses_rank + 1) * self.local_len)

    # What needs a framework lives in ringattn.torch and ringattn.jax, under the same names.

    def shard(self, x: Any, dim: int = 1) -> Any:
        """This rank's tokens of `x`, whose dim `dim` is the whole sequence; padded with zeros if need be.

        Where that is all of it the memory may be that of `x`.
        """
        return self._sharding.shard(x, self, dim)

    def unshard(self, x: Any, dim: int = 1) -> Any:
        """The whole sequence from every rank's part: the inverse of `shard`, padding removed; differentiable."""
        return self._sharding.unshard(x, self, dim)

    def positions(self) -> Any:
        """The global positions of this rank's tokens, for RoPE; those from `seq_len` on are padding."""
        return self._sharding.positions(self)

    @property
    def _sharding(self) -> Any:
        from importlib import import_module

        return import_module(f"ringattn.{self.framework}.sharding")

    def explain(self) -> str:
        """The candidates with their predicted times, why this one was taken, and which kernel runs."""
        return "\n".join([str(self), *self.report])

    def __str__(self) -> str:
        keys = f" (keys {self.key_len})" if self.key_len not in (None, self.seq_len) else ""
        if self.ring * self.ulysses == 1:
            return f"{self.seq_len} tokens{keys} on one device: kernel {self.kernel}"
        return (
            f"{self.seq_len} tokens{keys} over ring={self.ring} x ulysses={self.ulysses}: strategy {self.strategy}, "
            f"layout {self.layout}, kernel {self.kernel}, {self.local_len} tokens a rank"
        )


def size_of(name: str, value: Any) -> Any:
    """The size as an int, from anything that is one, also numpy's ints; None where that says to choose."""
    if value is None and name not in NEEDED:
        return None
    size = whole(value)
    if size is None or size < 1:
        raise ValueError(f"{name}={value!r}: {SIZES[name]}")
    if size > MOST:
        raise ValueError(f"{name}={value!r}: at most {MOST}, up to which sizes are counted exactly")
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
    """What a dtype of torch, JAX or numpy, or a string, is called; a ValueError for what attention does not take."""
    bare = dtype if isinstance(dtype, type) else getattr(dtype, "dtype", dtype)  # jnp.float32 is no dtype but has one
    name = getattr(bare, "__name__", None) or getattr(bare, "name", None) or str(bare).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    return str(name)


def check_heads(heads: int, kv_heads: int, *, ulysses: int, ring: int = 1) -> None:
    problem = heads_problem(heads, kv_heads, ulysses=ulysses, ring=ring)
    if problem:
        raise ValueError(problem)


def heads_problem(heads: int, kv_heads: int, *, ulysses: int, ring: int = 1) -> str | None:
    """Key heads divide query heads, and the Ulysses size divides query heads (key heads are repeated if need be)."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        return f"{kv_heads} key heads do not divide {heads} query heads"
    if heads % ulysses:
        best = max(u for u in range(1, ulysses + 1) if heads % u == 0 and (ring * ulysses) % u == 0)
        return (
            f"ulysses={ulysses} does not divide {heads} query heads; use ulysses={best}, ring={ring * ulysses // best}"
        )
    return None


def groups_problem(groups: int | None, kv_heads: int, ulysses: int) -> str | None:
    """Every group has as many key heads of each rank."""
    if groups is None:
        return None
    here = kv_heads_of_a_rank(kv_heads, ulysses)
    if isinstance(groups, int) and groups > 0 and here % groups == 0:
        return None
    return (
        f"groups={groups!r} does not divide the {here} key heads that a rank attends to; leave it out, or use groups=1"
    )


class Target(NamedTuple):
    """Where a plan is for: whose speeds count, the (ring, ulysses) sizes there can be, and how they become axes."""

    device: str
    sizes: Sequence[tuple[int, int]]
    bind: Callable[[int, int], tuple[Any, Any] | None]
    framework: str = "torch"


def factored(size: int) -> list[tuple[int, int]]:
    """Every (ring, ulysses) of so many ranks."""
    return [(size // u, u) for u in range(1, size + 1) if size % u == 0]


def candidates(
    alone: Plan,
    sizes: Sequence[tuple[int, int]],
    strategy: str,
    layout: str,
    spec: AttentionSpec,
    docs: Docs | None = None,
) -> list[Plan]:
    """Every plan that `alone` can be spread into over these sizes; what varies is strategy and layout, where "auto"."""
    found = []
    for ring, ulysses in sizes:
        if len(sizes) > 1 and (
            (alone.heads is not None and alone.heads[0] % ulysses) or (strategy == "ulysses" and ring > 1)
        ):
            continue
        names = ("ulysses",) if ring == 1 else ("ring", "gather")
        layouts = ("contiguous",) if ring == 1 or not spec.causal else ("zigzag", "contiguous")
        if ring > 1 and docs is not None:
            layouts = (*layouts, "striped")  # balanced whatever the documents are
        found += [
            replace(alone, ring=ring, ulysses=ulysses, strategy=s, layout=one)
            for s in (names if strategy == "auto" else (strategy,))
            for one in (layouts if layout == "auto" else (layout,))
        ]
    if not found:
        size = sizes[0][0] * sizes[0][1]
        raise ValueError(
            f"strategy={strategy!r} over {size} ranks needs query heads that {size} divides, and there are "
            f"{alone.heads and alone.heads[0]}; use strategy='ring', 'gather' or 'auto'"
        )
    return found


def priced(
    options: list[Plan], shape: Shape, spec: AttentionSpec, hardware: Hardware, docs: Docs | None = None
) -> list[tuple[Plan, Cost]]:
    """The candidates with what they are predicted to cost, that of least time first."""
    found = []
    for plan in options:
        layouts = plan.tokens, plan.keys.tokens
        counts = seen_pairs(*layouts, spec, docs)
        found.append((plan, predict(shape, *layouts, counts, plan.strategy, hardware)))
    return sorted(found, key=lambda one: one[1].seconds)


def candidates_report(options: list[tuple[Plan, Cost]], hardware: Hardware) -> list[str]:
    """The candidates as the lines of a table."""
    return [
        f"predicted forward on {hardware.name}:",
        "  ring ulysses strategy layout      ms      exposed ms  MB sent  imbalance",
        *(
            f"  {plan.ring:>4} {plan.ulysses:>7} {plan.strategy:<8} {plan.layout:<10} {cost.seconds * 1e3:>8.3f} "
            f"{max(0.0, cost.exposed) * 1e3:>11.3f} {cost.sent / 1e6:>8.1f} {cost.imbalance:>9.2f}"
            for plan, cost in options
        ),
    ]


def route_over(hosts: int, ring: int) -> str:
    """The route for a ring on so many hosts."""
    if hosts == 1:
        return "direct"
    return "levels" if ring > hosts else "relay"


def route_report(plan: Plan, sizes: dict[str, int] | None) -> list[str]:
    """How blocks reach the ranks of a torch ring, and what travels in backward; `sizes` are a block's bytes there."""
    if plan.ring == 1 or plan.framework != "torch":
        return []
    over = f", over {plan.axes[0].by}" if plan.axes else ""
    slower = ["the predicted times do not know that links between hosts are slower"] * (
        plan.hosts > 1 and sizes is not None
    )
    if plan.strategy == "gather":
        return [
            f"gather: every rank's keys come at once{over}; in backward their gradients are scattered home",
            *slower,
        ]
    how = {"direct": "straight from their owners", "relay": "from rank to rank"}.get(plan.route, "host by host")
    mb = {name: f" ({sizes[name] / 1e6:.1f} MB a block)" if sizes else "" for name in TRAVELLERS}
    other = "queries" if plan.backward == "keys" else "keys"
    why = f", not {other}{mb[other]}" if plan.route == "direct" else ": queries go with the direct route only"
    travel = f"{plan.backward}{mb[plan.backward]} travel{why}"
    return [f"route {plan.route}: blocks come {how}{over}; in backward {travel}", *slower]


def groups_report(plan: Plan, shape: Shape | None) -> list[str]:
    """In how many groups of heads what Ulysses and gather exchange goes, if torch exchanges any."""
    if plan.framework != "torch" or not plan.swaps:
        return []
    if plan.groups is not None:
        groups, why = plan.groups, "as told"
    elif shape is not None:
        groups, why = plan.groups_for(shape), f"{plan.exchanged(shape) / 1e6:.1f} MB a rank"
    else:
        return ["heads exchanged in groups: say heads and head_dim to see how many"]
    if groups == 1:
        return [f"heads exchanged all at once ({why})"]
    return [f"heads exchanged in {groups} groups ({why}): one travels while another is attended to"]


def hardware_of(device: str) -> Hardware:
    return HARDWARE[{"cuda": "h200", "tpu": "tpu"}.get(device, "cpu")]
