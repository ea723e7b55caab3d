"""One call over ranks: attention, linear attention, or the steps of a cache, with every public argument."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import ringattn as ra
from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.masks.values import fields
from ringattn.plans.sizes import Transport

HEAD = "name", "ring", "ulysses", "strategy", "layout", "seed"


class Step(NamedTuple):
    """New tokens of a cache, which is first truncated to where they begin."""

    do: str  # decode, prefill
    begins: tuple[int, ...]  # of each row
    new: int
    words: dict[str, Any]

    @property
    def tokens(self) -> np.ndarray:
        """Which ones [B, new]."""
        return np.array(self.begins)[:, None] + np.arange(self.new)


@dataclass(frozen=True)
class Case:
    """B batch rows of T tokens, with H query heads and G key heads of D and V numbers, over ring x ulysses ranks."""

    name: str = "attention"  # or cache, linear
    ring: int = 4
    ulysses: int = 1
    strategy: str = "ring"
    layout: str = "zigzag"
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    seq_len: int = 61  # a prime: no number of ranks divides it
    key_len: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    batch: int = 2
    lengths: Any = None  # of packed documents, in all rows, or a list for each row
    key_lengths: Any = None  # of those of the keys, if keys are another sequence
    sinks: bool = False
    dealt: Any = None  # lengths of documents that the plan lays out; see laid_out
    prefix: Any = None  # of each document
    spans: Any = None
    parents: Any = None  # of the documents, as segments of trees
    slices: Any = None  # (queries, keys, kind) each
    as_docs: bool = False  # whether that mask is given as docs
    kernel: str = "auto"
    plan: dict[str, Any] = field(default_factory=dict)  # further words of ra.plan and of a Transport
    words: dict[str, Any] = field(default_factory=dict)  # of linear attention
    gate: str | None = None  # head, channel
    beta: bool = False  # the delta rule
    state: str | None = None  # before each "row" or "document"
    steps: tuple[Step, ...] = ()
    block: int = 16  # of a cache
    seed: int = 0
    dtype: str = "float32"
    powers: dict[str, float] = field(default_factory=dict)  # of 10, for each input
    grads: tuple[str, ...] = ("dout", "dlse", "dend")  # which gradients come back
    explicit: bool = False  # whether the types of JAX arrays say how the mesh cuts them

    def __str__(self) -> str:
        return f"{self.name}-{self.strategy}{self.ring}x{self.ulysses}-{self.layout}"

    @property
    def text(self) -> str:
        """All that it does not have by default."""
        chosen, default = vars(self), vars(Case())
        return ", ".join([str(self), *(f"{n}={x}" for n, x in chosen.items() if x != default[n] and n not in HEAD)])

    @property
    def sizes(self) -> dict[str, Any]:
        """Those of its mesh."""
        return {"ring": self.ring, "ulysses": self.ulysses}

    @property
    def linear(self) -> bool:
        return self.name.startswith("linear")

    @property
    def keys(self) -> int:
        return self.seq_len if self.key_len is None else self.key_len

    @property
    def docs(self) -> Docs | None:
        if self.lengths is None:
            return None
        if self.parents is not None:
            return Docs.tree(self.lengths, self.parents, pad_to=self.seq_len)
        return Docs.from_lengths(self.lengths, pad_to=self.seq_len, prefix=self.prefix, spans=self.spans)

    @property
    def mask(self) -> Mask | None:
        if self.slices is None:
            return None
        queries, keys, kinds = zip(*self.slices, strict=True)
        return Mask.from_slices(queries, keys, kinds, self.seq_len)

    @property
    def key_docs(self) -> Docs | None:
        return None if self.key_lengths is None else Docs.from_lengths(self.key_lengths, pad_to=self.keys)

    @property
    def laid_out(self) -> Docs | None:
        """The documents that the plan lays out; in the balanced layout all that are alike in every row."""
        if self.dealt is not None:
            return Docs.from_lengths(self.dealt, pad_to=self.seq_len)
        docs = self.mask or self.docs
        return docs.first if self.layout == "balanced" and docs is not None else None

    @property
    def outputs(self) -> tuple[str, str]:
        return ("out", "end") if self.linear else ("out", "lse")

    @property
    def by_document(self) -> bool:
        """Whether linear attention returns a state of each document."""
        return self.state == "document" or self.words.get("return_state") == "documents"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The inputs of its call, which get gradients."""
        rule = ("g",) * (self.gate is not None) + ("beta",) * self.beta + ("state",) * (self.state is not None)
        return ("q", "k", "v", *(rule if self.linear else ("sinks",) * self.sinks))

    def plan_on(self, mesh: Any, kernel: str = "auto", **choices: Any) -> Any:
        """Its plan; of `choices`, what a Transport has goes into one."""
        words: dict[str, Any] = {"layout": self.layout, **self.plan, **choices}
        how = {name: words.pop(name) for name in fields(Transport) if name in words}
        if not self.linear:
            words |= {"strategy": self.strategy, "spec": self.spec, "kernel": kernel}
        plan = ra.plan(mesh, seq_len=self.seq_len, key_len=self.key_len, transport=Transport(**how), **words)
        return plan if self.laid_out is None else plan.for_docs(self.laid_out)

    def call(self, plan: Any, x: dict[str, Any], kernel: str = "auto") -> tuple[Any, Any]:
        """The call itself, on tensors of torch or JAX; attention's plan has the kernel."""
        if self.linear:
            words = {"kernel": kernel, "return_state": True, **self.words}
            return ra.linear_attention(x["q"], x["k"], x["v"], x.get("g"), plan, beta=x.get("beta"), docs=self.docs,
                                       initial_state=x.get("state"), **words)  # fmt: skip
        masked = {"docs": self.mask} if self.as_docs else {"docs": self.docs, "mask": self.mask}
        return ra.attention(x["q"], x["k"], x["v"], plan, spec=self.spec, key_docs=self.key_docs,
                            sinks=x.get("sinks"), return_lse=True, **masked)  # fmt: skip

    def pieces(
        self, plan: Any, given: dict[str, Any], array: Any = lambda x: x, jit: Any = lambda f: f
    ) -> Iterator[Any]:
        """What the steps of a cache give, on tensors of torch or JAX, where a call returns a new cache too."""
        cache: Any = ra.KVCache.allocate(
            plan, batch=self.batch, max_len=self.seq_len, kv_heads=self.kv_heads, head_dim=self.head_dim,
            value_dim=self.value_dim, dtype=given["q"].dtype, window=self.spec.behind, block=self.block,
            room=max(step.new for step in self.steps),
        )  # fmt: skip
        also: Any = {"spec": self.spec, "sinks": array(given["sinks"]) if self.sinks else None}
        lengths = self.steps[0].begins
        for step in self.steps:
            if step.begins != lengths:
                cache = cache.truncate(list(step.begins)) or cache
            lengths = tuple(n + step.new for n in step.begins)
            q, k, v = (array(given[name][np.arange(self.batch)[:, None], step.tokens]) for name in "qkv")
            if step.do == "decode":
                result = ra.decode(q, k, v, cache, **also, **step.words)
            else:
                chunk = plan.for_length(step.new)
                q, k, v = jit(lambda *x, plan=chunk: tuple(map(plan.shard, x)))(q, k, v)
                result = ra.prefill(q, k, v, chunk, cache, **also, **step.words)
            out, cache = result if isinstance(result, tuple) else (result, cache)
            yield out if step.do == "decode" else jit(chunk.unshard)(out)
