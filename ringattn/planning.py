"""A plan: how one sequence length is spread over the ranks, chosen once, printed, and used by every call.

Frozen and hashable. It knows the axes it runs on only as objects with a size and a rank.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

from ringattn.cost import HARDWARE, Cost, Hardware, Shape, exchanged, groups_of, predict, replicas, seen_pairs
from ringattn.layout import LAYOUTS, Layout
from ringattn.spec import AttentionSpec, Docs, whole

STRATEGIES = ("ring", "gather", "ulysses")
ROUTES = ("direct", "relay", "levels")
TRAVELLERS = ("keys", "queries")
TRANSPORTS = ("auto", "symmetric", "group")
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
    agreed: set[Any] = field(default_factory=set, init=False, compare=False, repr=False)  # calls all ranks made alike
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
        if self.route == "levels" and (self.hosts < 2 or self.ring % self.hosts):
            raise ValueError(
                f"route='levels' needs a ring on several hosts, with as many ranks on each; ring={self.ring} lies on "
                f"hosts={self.hosts}; use route='direct' or 'relay'"
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
        object.__setattr__(self, "handle", next(numbers))
        LIVE[self.handle] = self

    def __copy__(self) -> "Plan":
        """An equal plan with a handle of its own, on the same axes."""
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: Any) -> "Plan":
        return dataclasses.replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Handles are a process's own, and axes are where they were made: a plan for one rank is made again."""
        if self.axes is not None and self.ring * self.ulysses > 1:
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

    def groups_for(self, shape: Shape) -> int:
        """In how many groups of heads a call's exchanges go."""
        if self.groups is not None:
            return self.groups
        sent = exchanged(shape, self.ring, self.ulysses, self.strategy, (self.local_len, self.keys.local_len))
        kv_heads = kv_heads_of_a_rank(shape.kv_heads, self.ulysses)
        return groups_of(shape, sent, self.ring * self.ulysses, kv_heads, hardware_of(self.device))

    def for_length(self, seq_len: int, key_len: int | None = None) -> "Plan":
        """The same choices for another length."""
        return dataclasses.replace(self, seq_len=seq_len, key_len=key_len)

    def local_slice(self, ulysses_rank: int) -> slice:
        """Which part of its ring shard a Ulysses rank holds."""
        return slice(ulysses_rank * self.local_len, (ulysses_rank + 1) * self.local_len)

    # What needs a framework lives in ringattn.torch and ringattn.jax, under the same names.

    def shard(self, x: Any, dim: int = 1) -> Any:
        """This rank's tokens of `x`, whose dim `dim` is the whole sequence; padded with zeros if need be."""
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


def kv_heads_of_a_rank(kv_heads: int, ulysses: int) -> int:
    return kv_heads * replicas(kv_heads, ulysses) // ulysses


def groups_problem(groups: int | None, kv_heads: int, ulysses: int) -> str | None:
    """Every group has as many key heads of each rank."""
    here = kv_heads_of_a_rank(kv_heads, ulysses)
    if groups is None or (isinstance(groups, int) and groups > 0 and here % groups == 0):
        return None
    return (
        f"groups={groups!r} does not divide the {here} key heads that a rank attends to; leave it out, or use groups=1"
    )


@dataclass(frozen=True)
class Candidate:
    """One way to spread the call, and what it is predicted to cost."""

    ring: int
    ulysses: int
    strategy: str
    layout: str
    cost: Cost | None = None


def candidates(
    ranks: Sequence[tuple[int, int]],
    heads: int | None,
    strategy: str,
    layout: str,
    spec: AttentionSpec,
    docs: Docs | None = None,
) -> list[Candidate]:
    """Every combination that the given choices leave open; an explicit choice is never second-guessed."""
    found = []
    for ring, ulysses in ranks:
        if heads is not None and heads % ulysses and len(ranks) > 1:
            continue
        names = ("ulysses",) if ring == 1 and strategy == "auto" else ("ring", "gather")
        layouts = ("contiguous",) if ring == 1 or not spec.causal else ("zigzag", "contiguous")
        if ring > 1 and docs is not None:
            layouts = (*layouts, "striped")  # balanced whatever the documents are
        for s in names if strategy == "auto" else (strategy,):
            if s == "ulysses" and ring > 1 and len(ranks) > 1:
                continue
            found += [Candidate(ring, ulysses, s, one) for one in (layouts if layout == "auto" else (layout,))]
    if not found:
        size = ranks[0][0] * ranks[0][1]
        raise ValueError(
            f"strategy={strategy!r} over {size} ranks needs query heads that {size} divides, and there are {heads}; "
            "use strategy='ring', 'gather' or 'auto'"
        )
    return found


def choose(
    options: list[Candidate], shape: Shape | None, spec: AttentionSpec, hardware: Hardware, docs: Docs | None = None
) -> tuple[Candidate, list[Candidate]]:
    """The candidate of least predicted time, and all of them with their costs, best first.

    Without a shape nothing can be predicted, and the first one is taken: ring, zigzag if causal.
    """
    if shape is None:
        return options[0], options
    priced = []
    for c in options:
        layout = Layout(c.layout, shape.seq_len, c.ring, c.ulysses)
        keys = Layout(c.layout, shape.key_len, c.ring, c.ulysses)
        cost = predict(shape, layout, keys, seen_pairs(layout, keys, spec, docs), c.strategy, hardware)
        priced.append(dataclasses.replace(c, cost=cost))
    priced.sort(key=lambda c: c.cost.seconds if c.cost else 0.0)
    return priced[0], priced


def describe(options: list[Candidate], hardware: Hardware) -> list[str]:
    """The candidates as the lines of a table."""
    if options[0].cost is None:
        return ["no prediction: say heads=(query, key) and head_dim to compare candidates"]
    lines = [
        f"predicted forward on {hardware.name}:",
        "  ring ulysses strategy layout      ms      exposed ms  MB sent  imbalance",
    ]
    for c in options:
        if c.cost:
            lines.append(
                f"  {c.ring:>4} {c.ulysses:>7} {c.strategy:<8} {c.layout:<10} {c.cost.seconds * 1e3:>8.3f} "
                f"{c.cost.exposed * 1e3:>11.3f} {c.cost.sent / 1e6:>8.1f} {c.cost.imbalance:>9.2f}"
            )
    return lines


def hardware_of(device: str) -> Hardware:
    return HARDWARE[{"cuda": "h200", "tpu": "tpu"}.get(device, "cpu")]
