"""A plan: how one sequence length is spread over the ranks, chosen once, printed, and used by every call.

Plans compare equal whatever their process groups are; in JAX, where they are keys of cached programs, only over the
same devices.
"""

import sys
from collections.abc import Iterator
from dataclasses import field, replace
from functools import cached_property, partial
from importlib import import_module
from json import dumps
from typing import Any

from ringattn.layouts.layout import MAKERS, Layout
from ringattn.masks.spec import AttentionSpec, Docs, raise_if
from ringattn.masks.values import Value, fields
from ringattn.plans.cost import Shape, heads_of_group, may_group, of_heads
from ringattn.plans.machine import Link, Machine, assumed
from ringattn.plans.ranks import NOT_HERE, Ranks
from ringattn.plans.sizes import Transport, groups_problem, heads_of, heads_problem, size_of

STRATEGIES = ("ring", "gather", "ulysses")
GRAPHS = "auto"  # the default of `graphs`
MAX_GROUPS = 4
MESSAGES_A_GROUP, WORK_A_GROUP = 12, 0.0052  # the cost of one more: latencies, part of attention's time (2 H200s)
MAX_PLANS = 256  # of whose calls it is known that all ranks agreed on them
LARGEST_POSITION = 2**31 - 1  # JAX's positions are int32


class Plan(Value):
    """`seq_len` tokens over ring x ulysses ranks. The strategy says how keys meet queries along the ring axis."""

    seq_len: int
    ring: int = 1
    ulysses: int = 1
    strategy: str = "ring"
    layout: str = "contiguous"
    kernel: str = "auto"
    transport: Transport = Transport("direct", 1, grads="float32")  # in torch; these are never auto
    key_len: int | None = None
    heads: tuple[int, int] | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    docs: Docs | None = None  # the documents that the layout is made for: see for_docs
    work: AttentionSpec | None = None  # layout="balanced": the attention whose work is dealt out equally
    deterministic: bool = False  # only kernels whose results have the same bits in every run
    graphs: str = GRAPHS  # over GPUs in torch: "auto" captures short calls that repeat as CUDA graphs, or "off"
    saved_as: str | None = None  # in JAX: the name of attention's results for policies of jax.checkpoint
    machine: Machine = field(default=None, repr=False)  # type: ignore[assignment]  # None: the shipped one of the device
    axes: Ranks = field(default=NOT_HERE, repr=False)  # where it runs: framework, device, ring and Ulysses axis
    report: Any = field(default=None, compare=False, repr=False)  # makes lines and plain values of what was compared

    def __post_init__(self) -> None:
        for name in ("seq_len", "key_len", "ring", "ulysses", "head_dim", "value_dim"):
            object.__setattr__(self, name, size_of(name, getattr(self, name)))
        object.__setattr__(self, "heads", heads_of(self.heads))
        object.__setattr__(self, "machine", self.machine or assumed(self.device))
        raise_if(next(self._problems(), None))
        if self.framework == "torch" and self.axes.here and "torch" in sys.modules:
            import_module(f"ringattn.{self.framework}.handles").name(self)  # now: torch.compile traces no such thing
        _ = self.number, self.local_len, self.keys.local_len  # cached now: torch.compile refuses Python 3.11's lock

    def _problems(self) -> Iterator[str]:
        """Why there can be no such plan, if there cannot."""
        how, ring, ulysses = self.transport, self.ring, self.ulysses
        assert how.hosts is not None and how.route != "auto", how
        if self.strategy not in STRATEGIES:
            yield f"strategy={self.strategy!r}: choose one of auto, {', '.join(STRATEGIES)}"
        if self.strategy == "ulysses" and ring > 1:
            yield (
                f"strategy='ulysses' means a ring axis of size 1, and the mesh has ring={ring}; use "
                f"init_mesh(ulysses={ring * ulysses}), or strategy='ring' for the hybrid of both"
            )
        if self.graphs not in (("off", GRAPHS) if self.framework == "jax" else ("auto", "off")):
            yield f"graphs={self.graphs!r}: choose auto, in torch alone, or off"
        if self.layout not in MAKERS:
            yield f"layout={self.layout!r}: choose one of auto, {', '.join(MAKERS)}"
        laid_out = self.docs is not None or MAKERS[self.layout].by_work
        if laid_out and self.framework == "jax":
            yield (
                "for_docs is not supported in JAX, nor is layout='balanced': one program serves all documents there, "
                "and these would change it; use the plan as it is, or layout='striped'"
            )
        if laid_out and self.key_len not in (None, self.seq_len):
            yield f"key_len={self.key_len}: documents are laid out only for queries and keys of one sequence"
        if self.saved_as is not None and (self.framework != "jax" or not isinstance(self.saved_as, str)):
            yield f"saved_as={self.saved_as!r}: a name for policies of jax.checkpoint, for a JAX mesh only"
        if self.heads is not None and (problem := heads_problem(*self.heads, ulysses=ulysses, ring=ring)):
            yield problem
        if ring % how.hosts:
            yield f"hosts={how.hosts} for ring={ring}: hosts have equally many ranks; use a divisor of the ring"
        if how.route == "levels" and how.hosts < 2:
            yield f"route='levels' needs a ring on several hosts, and ring={ring} lies on one; use 'direct' or 'relay'"
        if how.groups not in (None, 1) and ulysses == 1 and self.strategy != "gather":
            yield f"groups={how.groups!r} is for Ulysses and gather, and there is only strategy={self.strategy!r}"
        if self.heads is not None and (problem := groups_problem(how.groups, self.heads, ulysses, ring)):
            yield problem
        if self.framework == "jax" and (length := max(self.seq_len, self.key_len or 1)) > LARGEST_POSITION // 2:
            yield f"{length} tokens: JAX counts positions in 32 bits, at most {LARGEST_POSITION // 2} with padding"

    def __deepcopy__(self, memo: Any = None) -> "Plan":
        return self  # a value

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        """A plan is pickled with the documents that it dealt out, but without its axes, which belong to their process.

        `for_docs` binds it to the axes of another plan. Nor is its report pickled.
        """
        given = {name: getattr(self, name) for name in fields(self)} | {"report": None}
        if self.axes.here and self.framework == "jax":
            raise TypeError(f"a plan on a JAX mesh cannot be pickled ({self}): make the plan on every rank")
        if self.axes.here and self.ring * self.ulysses > 1:
            given["axes"] = Ranks(None, None, self.framework, self.device, here=False)
        if MAKERS[self.layout].by_work and self.docs is not None:
            _ = self.tokens.dealt  # now, in a loader's worker, not later in the process that trains
        return partial(Plan, **given), (), {"tokens": self.tokens}

    def __hash__(self) -> int:
        return self.number

    @cached_property
    def number(self) -> int:
        """The hash, which every call of attention needs."""
        return hash(tuple(getattr(self, name) for name, f in fields(self).items() if f.compare))

    @property
    def framework(self) -> str:
        return self.axes.framework

    @property
    def device(self) -> str:
        return self.axes.device

    @property
    def calls(self) -> dict[Any, Any]:
        """The bound calls that are cached for the axes of this plan."""
        return self.axes.calls

    @property
    def agreed(self) -> set[Any]:
        """The kinds of calls of this plan that all ranks agreed on."""
        plans, plan = self.axes.agreed, self.without_docs
        if plan not in plans and len(plans) == MAX_PLANS:
            plans.clear()
        return plans.setdefault(plan, set())

    @cached_property
    def without_docs(self) -> "Plan":
        """The plan without the documents that it lays out, which are others in every batch."""
        return self if self.docs is None else self.replace(docs=None)

    @cached_property
    def tokens(self) -> Layout:
        """Where the queries' tokens are."""
        return Layout(self.layout, self.seq_len, self.ring, self.ulysses, self.docs, self.work)

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
        return self._here.ring

    @property
    def ulysses_axis(self) -> Any:
        return self._here.ulysses

    @property
    def place(self) -> tuple[int, int]:
        """This process's rank on the ring and on the Ulysses axis."""
        return self.ring_axis.rank, self.ulysses_axis.rank

    @property
    def _here(self) -> Ranks:
        if not self.axes.here:
            raise ValueError(
                f"this plan for {self.ring * self.ulysses} ranks has no mesh to run on; make it with "
                "ringattn.plan(mesh, ...)"
            )
        return self.axes

    @property
    def hosts(self) -> int:
        """The number of hosts that the route assumes: "direct" one, "relay" one per rank."""
        return {"direct": 1, "relay": self.ring}.get(self.transport.route, self.transport.hosts or 1)

    def shape(self, itemsize: int) -> Shape | None:
        """The shape of a call with items of `itemsize` bytes, if the plan has heads."""
        if self.heads is None or self.head_dim is None:
            return None
        value_dim = self.value_dim or self.head_dim
        return Shape(self.seq_len, self.keys.seq_len, *self.heads, self.head_dim, value_dim, itemsize)

    @property
    def swaps(self) -> bool:
        """Whether a call exchanges heads (Ulysses) or gathers keys, so that it can run in groups of heads."""
        return self.ulysses > 1 or (self.strategy == "gather" and self.ring > 1)

    def exchanged(self, shape: Shape) -> int:
        """The bytes a rank sends forward that no step hides: Ulysses' exchanges both ways, and gathered keys."""
        queries, keys = of_heads(shape, self.ulysses, (self.local_len, self.keys.local_len))
        swapped = (queries + keys) * (self.ulysses - 1) // self.ulysses
        return swapped + (self.ring - 1) * keys * (self.strategy == "gather")

    @property
    def link(self) -> Link:
        """The slowest link between its ranks."""
        return self.machine.between if (self.transport.hosts or 1) > 1 else self.machine.inside

    def groups_for(self, shape: Shape) -> int:
        """In how many groups of heads a call's exchanges run, so that one travels while another is computed.

        Each group costs launches, and smaller groups fill a GPU less well.
        """
        if self.transport.groups is not None:
            return self.transport.groups
        if self.framework == "jax" and self.device != "tpu":  # whose compiler alone overlaps one group with another
            return 1
        heads, ranks = heads_of_group(shape.heads, shape.kv_heads, self.ulysses, 1), self.ring * self.ulysses
        possible = [n for n in range(1, MAX_GROUPS + 1) if may_group(n, *heads, self.ring)]
        link = self.link if self.strategy == "gather" else self.machine.inside
        sent = self.exchanged(shape if heads[1] > 1 else replace(shape, kv_heads=0))  # one travels at once
        flops = shape.flops_a_pair * shape.seq_len * shape.key_len / 2 / ranks
        more = link.seconds(0, MESSAGES_A_GROUP) + WORK_A_GROUP * flops / self.machine.flops(shape.itemsize, ranks)
        return min(possible, key=lambda n: link.seconds(sent, senders=ranks) / n + n * more)

    def together(self, shape: Shape, back: bool) -> int:
        """As much as how many blocks a step brings: fewer in backward, unless gradients have the dtype of keys."""
        groups = self.groups_for(shape) if self.swaps else 1
        _, kv_heads = heads_of_group(shape.heads, shape.kv_heads, self.ulysses, groups)
        times = 4 if back and self.transport.grads != "input" else 1  # of keys' memory, with float32 gradients
        block = times * shape.bytes_of(self.keys.tokens.shard_len, kv_heads)
        return min(self.transport.together or max(1, int(self.machine.room // block)), self.ring // self.hosts)

    def for_length(self, seq_len: int, key_len: int | None = None) -> "Plan":
        """The same choices for another length."""
        if self.docs is not None:
            raise ValueError(f"this plan lays out {self.docs} and has their length: use plan.for_docs(docs)")
        return self.replace(seq_len=seq_len, key_len=key_len)

    def for_docs(self, docs: "Docs | Plan") -> "Plan":
        """The same choices for these documents: dealt out anew (layout="balanced"), or each cut over all ranks.

        A balanced plan gives every ring rank equally many tokens and nearly equal work, in a few ranges: short
        documents lie whole on one rank, long ones on a few. Each batch has its own plan; all ranks make the same one.

        Any other plan cuts each document over all n ranks, Ulysses ranks too, as ring-flash-attn's varlen functions and
        Transformer Engine's THD format do: rank r holds block r of it (layout="contiguous"), or of 2 * n blocks r and
        2 * n - 1 - r (layout="zigzag"). Each document has a multiple of n tokens (2 * n in zigzag), and linear
        attention refuses such a plan.

        For torch; caches refuse both plans. Pass the documents to attention too, where tokens see only their own one.
        A loader's worker can do this ahead: the result can be pickled, without process groups. `plan.for_docs(result)`
        binds it to the ranks of this plan.
        """
        if isinstance(docs, Plan) and docs.docs is not None:
            made = self.for_docs(docs.docs)
            if made != docs:
                raise ValueError(f"the documents are laid out by a plan with other choices, {docs}; this plan: {self}")
            vars(made)["tokens"] = docs.tokens  # not dealt out again
            return made
        if not isinstance(docs, Docs):
            raise ValueError(f"docs is of type {type(docs).__name__}; pass Docs.from_lengths([...])")
        key_len = None if self.keys is self else self.key_len
        return self.replace(seq_len=docs.length, key_len=key_len, docs=docs.first or docs)

    def shard(self, x: Any, dim: int = 1, *, compare: bool = True) -> Any:
        """This rank's tokens of `x`, whose dim `dim` is the whole sequence; padded with zeros if necessary.

        The result is always a copy. In torch ranks compare checksums of integers (token ids, labels), over NCCL in the
        first step alone, and raise an error if a sampler gives them different sequences. `compare=False` disables that.
        """
        return self._sharding.shard(x, self, dim, compare)

    def unshard(self, x: Any, dim: int = 1) -> Any:
        """The whole sequence from every rank's part: the inverse of `shard`, padding removed; differentiable."""
        return self._sharding.unshard(x, self, dim)

    def roll(self, x: Any, shift: int = -1, dim: int = 1, docs: Any = None, fill: Any = None) -> Any:
        """This rank's part of the whole sequence shifted by `shift` places, from its part of it; differentiable.

        Position p gets position p - shift, so shift=-1 gives every token its successor: labels, or the targets of
        multi-token prediction. Nothing wraps around or crosses documents: such positions get `fill`, by default -100
        for integers (the result of unsigned ones is signed) and 0 otherwise. In torch only the tokens that change ranks
        are sent; JAX takes the array that `shard` made, and gathers it.
        """
        return self._sharding.roll(x, self, shift, dim, docs, fill)

    def positions(self, docs: Docs | None = None) -> Any:
        """The global positions of this rank's tokens, for RoPE and position embeddings; padding repeats the last one.

        In trees, of `docs` or of those that the plan lays out, they are depths along branches: [T], or [rows, T] where
        the rows' trees differ. As all are below `seq_len`, mask a loss with `real_tokens()`.
        """
        return self._sharding.positions(self, self.docs if docs is None else docs)

    def real_tokens(self) -> Any:
        """Whether each of this rank's tokens belongs to the sequence; False for padding. The mask of a loss."""
        return self._sharding.real_positions(self)

    @property
    def _sharding(self) -> Any:
        return import_module(f"ringattn.{self.framework}.sharding")

    def explain(self, json: bool = False) -> str:
        """Why this plan was chosen, the candidates with what they take, and which kernel runs; or all as JSON."""
        lines, data = self.report() if self.report else ((), {})
        lines = [*lines, *[str(graphs) for graphs in [self.axes.kept.get("graphs")] if graphs]]
        return dumps({"plan": str(self), **data, "lines": lines}, indent=1) if json else "\n".join(lines or [str(self)])

    def __str__(self) -> str:
        keys = f" (keys {self.key_len})" if self.key_len not in (None, self.seq_len) else ""
        if self.ring * self.ulysses == 1:
            return f"{self.seq_len} tokens{keys} on one device: kernel {self.kernel}"
        return (
            f"{self.seq_len} tokens{keys} over ring={self.ring} x ulysses={self.ulysses}: strategy {self.strategy}, "
            f"layout {self.layout}{' of each document' * self.tokens.by_document}, kernel {self.kernel}, "
            f"{self.local_len} tokens a rank"
        )
