"""One call over ranks, with every public argument, and calls drawn from a number, all arguments together.

It is attention, linear attention, or the steps of a cache. Call i of a run is drawn from seed + i alone, so a failure
is repeated by one line. What breaks is mostly a combination that is on no list, so nothing is left out because it may
be refused: refusals are counted by their reasons.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import ringattn as ra
from ringattn import kernels
from ringattn.kernels.linear import TABLE as linear_table
from ringattn.layouts.layout import LAYOUTS, MAKERS
from ringattn.masks.slices import KINDS, Mask
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.masks.values import fields
from ringattn.plans.plan import STRATEGIES
from ringattn.plans.segments import WAYS, layouts
from ringattn.plans.sizes import GRADS, ROUTES, Transport

Words = dict[str, Any]
HEAD = "name", "ring", "ulysses", "strategy", "layout", "seed"  # what a description begins with
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")  # float32 twice as often
RANKS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 8)
CALLS = ("attention",) * 6 + ("cache", "linear") * 2
MASKS = ("plain", "plain", "packed", "packed", "spans", "tree", "slices", "keys", "keys", "cross")
FOR_DOCS = [name for name, maker in MAKERS.items() if maker.each_document or maker.by_work]


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
    def linear(self) -> bool:
        return self.name.startswith("linear")

    @property
    def keys(self) -> int:
        return self.seq_len if self.key_len is None else self.key_len

    @property
    def docs(self) -> Docs | None:
        """Those of the queries, or the mask of its slices."""
        if self.slices is not None:
            queries, keys, kinds = zip(*self.slices, strict=True)
            return Mask.from_slices(queries, keys, kinds, self.seq_len)
        if self.lengths is None:
            return None
        if self.parents is not None:
            return Docs.tree(self.lengths, self.parents, pad_to=self.seq_len)
        return Docs.from_lengths(self.lengths, pad_to=self.seq_len, prefix=self.prefix, spans=self.spans)

    @property
    def key_docs(self) -> Docs | None:
        return None if self.key_lengths is None else Docs.from_lengths(self.key_lengths, pad_to=self.keys)

    @property
    def laid_out(self) -> Docs | None:
        """The documents that the plan lays out; in the balanced layout all that are alike in every row."""
        if self.dealt is not None:
            return Docs.from_lengths(self.dealt, pad_to=self.seq_len)
        return self.docs.first if self.layout == "balanced" and self.docs is not None else None

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

    def plan_on(self, mesh: Any) -> Any:
        """Its plan; of its words, what a Transport has goes into one."""
        words: dict[str, Any] = {"layout": self.layout, **self.plan}
        how = {name: words.pop(name) for name in fields(Transport) if name in words}
        if not self.linear:
            words |= {"strategy": self.strategy, "spec": self.spec, "kernel": self.kernel}
        plan = ra.plan(mesh, seq_len=self.seq_len, key_len=self.key_len, transport=Transport(**how), **words)
        return plan if self.laid_out is None else plan.for_docs(self.laid_out)

    def call(self, plan: Any, x: dict[str, Any]) -> tuple[Any, Any]:
        """The call itself, on tensors of torch or JAX."""
        if self.linear:
            words = {"kernel": self.kernel, "return_state": True, **self.words}
            return ra.linear_attention(x["q"], x["k"], x["v"], x.get("g"), plan, beta=x.get("beta"), docs=self.docs,
                                       initial_state=x.get("state"), **words)  # fmt: skip
        masked: dict[str, Any] = {"mask" if self.slices is not None and not self.as_docs else "docs": self.docs}
        return ra.attention(x["q"], x["k"], x["v"], plan, spec=self.spec, key_docs=self.key_docs,
                            sinks=x.get("sinks"), return_lse=True, **masked)  # fmt: skip

    def pieces(self, plan: Any, given: dict[str, Any]) -> Iterator[Any]:
        """What the steps of a cache give, on tensors of torch or JAX, where a call returns a new cache too."""
        cache: Any = ra.KVCache.allocate(
            plan, batch=self.batch, max_len=self.seq_len, kv_heads=self.kv_heads, head_dim=self.head_dim,
            value_dim=self.value_dim, dtype=given["q"].dtype, window=self.spec.behind, block=self.block,
            room=max(step.new for step in self.steps),
        )  # fmt: skip
        also: Any = {"spec": self.spec, "sinks": given["sinks"] if self.sinks else None}
        for step in self.steps:
            if list(step.begins) != cache.lengths.tolist():
                cache = cache.truncate(list(step.begins)) or cache
            q, k, v = (given[name][np.arange(self.batch)[:, None], step.tokens] for name in "qkv")
            if step.do == "decode":
                result = ra.decode(q, k, v, cache, **also, **step.words)
            else:
                chunk = plan.for_length(step.new)
                q, k, v = map(chunk.shard, (q, k, v))
                result = ra.prefill(q, k, v, chunk, cache, **also, **step.words)
            out, cache = result if isinstance(result, tuple) else (result, cache)
            yield out if step.do == "decode" else chunk.unshard(out)


def bounds(lengths: Any) -> list[tuple[int, int]]:
    return list(pairwise([0, *np.cumsum(lengths, dtype=int).tolist()]))


def draw(seed: int, ranks: int | None, dtype: str | None, kernel: str, device: str) -> Case:
    """The call of this number; ranks and dtype are drawn unless given, the kernel where it is auto."""
    r = random.Random(seed)
    tables = {kind: linear_table if kind == "linear" else kernels.TABLE for kind in CALLS}
    computed = [kind for kind in CALLS if kernel in ("auto", *(k.name for k in tables[kind]))]
    count, kind = ranks or r.choice(RANKS), r.choice(computed)
    ulysses = r.choice([u for u in range(1, count + 1) if count % u == 0])
    dims = (16, 32, 64) if device == "cuda" else (1, 4, 7, 8, 16, 24, 32, 64)
    G, dim, longest = r.choice([1, 1, 2, 3, 4]), r.choice(dims), r.choice([6, 40, 100, 200])
    words: Words = {
        "name": kind, "ring": count // ulysses, "ulysses": ulysses, "seed": seed, "dtype": dtype or r.choice(DTYPES),
        "seq_len": r.randint(1, longest), "batch": r.choice([1, 1, 2, 3]), "kv_heads": G, "head_dim": dim,
        "value_dim": dim if r.random() < 0.6 else r.choice(dims), "sinks": r.random() < 0.3, "kernel": kernel,
        "layout": r.choice(["auto", *(LAYOUTS if device == "jax" else MAKERS)]),
    }  # fmt: skip
    words["heads"] = G * r.choice([1, 2, 3]) if kind == "linear" else math.lcm(G * r.choice([1, 2, 3]), ulysses)
    if kernel == "auto" and device != "jax" and r.random() < 0.2:
        words["kernel"] = r.choice([k.name for k in tables[kind] if device not in k.skipped_on])
    {"attention": attention, "cache": cached, "linear": linear}[kind](r, words, device)
    return Case(**words, explicit=device == "jax" and r.random() < 0.5)


def attention(r: random.Random, words: Words, device: str) -> None:
    """Any mask, documents, layout, strategy and route."""
    kind, ring, unit, T = r.choice(MASKS), words["ring"], 2 * words["ring"] * words["ulysses"], words["seq_len"]
    words["strategy"] = r.choice(["auto", "ring", "ring", *STRATEGIES[: 2 if ring > 1 else 3]])
    cut = kind not in ("keys", "cross") and device != "jax" and r.random() < 0.25  # a plan of documents, any
    if cut:
        T = words["seq_len"] = unit * r.randint(1, max(1, T // unit))
        words |= {"dealt": pieces(r, T, r.randint(1, 6), unit), "layout": r.choice(FOR_DOCS)}
    if kind in ("keys", "cross"):
        words["key_len"] = r.choice([T, r.randint(1, 2 * T)])
    count = r.randint(1, 8)
    rows = [pieces(r, T, count, 1, r.random() < 0.3) for _ in range(words["batch"])]
    rows = [words["dealt"]] if cut and r.random() < 0.5 else rows[: r.choice([1, None])]
    if kind not in ("plain", "slices", "cross"):
        words["lengths"] = rows
    if kind == "keys":
        words["key_lengths"] = [pieces(r, words["key_len"], len(row), 1, r.random() < 0.3) for row in rows]
    if kind == "tree":
        words["parents"] = [[r.randint(-1, i - 1) for i in range(len(row))] for row in rows]
    if kind == "spans":
        words["prefix"] = [[r.choice([0, r.randint(0, n)]) for n in row] for row in rows]
        words["spans"] = [
            [tuple(sorted(r.sample(range(a + n, b + 1), 2))) for (a, b), n in zip(bounds(row), ahead, strict=True)
             if a + n < b and r.random() < 0.6] for row, ahead in zip(rows, words["prefix"], strict=True)
        ]  # fmt: skip
    if kind == "slices":  # no query may see a key twice
        words["slices"] = [
            (queries, keys, r.choice(KINDS)) for queries in bounds(pieces(r, T, r.randint(1, 6)))
            for keys in bounds(pieces(r, T, r.randint(1, 4)))
            if queries[0] < queries[1] and keys[0] < keys[1] and r.random() < 0.7
        ] or [((0, T), (0, T), "causal")]  # fmt: skip
        words["as_docs"] = r.random() < 0.5
    causal = kind in ("spans", "tree", "slices") or (kind != "cross" and r.random() < 0.7)
    words["spec"] = spec_of(r, causal, 0.1 if kind == "cross" else 1.0)
    words["grads"] = r.choice([("dout", "dlse"), ("dout", "dlse"), ("dout",), ("dlse",)])
    words["powers"] = powers_of(r, words)
    words["plan"] = {} if device == "jax" else travels(r, words)
    if r.random() < 0.2:
        words["plan"] |= {"heads": (words["heads"], words["kv_heads"]), "head_dim": words["head_dim"]}
    if r.random() < 0.1:
        words["plan"]["deterministic"] = True


def pieces(r: random.Random, total: int, count: int, unit: int = 1, padded: bool = False) -> list[int]:
    """Lengths of documents, some of them empty, perhaps with padding behind them."""
    most = total // unit
    ends = sorted(unit * r.choice([r.randint(0, most), r.randint(0, min(4, most))]) for _ in range(count))
    ends[-1] = ends[-1] if padded else total
    return [b - a for a, b in pairwise([0, *ends])]


def spec_of(r: random.Random, causal: bool, near: float = 1.0) -> AttentionSpec:
    """Windows and the like in so many of them."""
    sides = r.randint(0, 20), r.randint(0, 20)
    window = r.choice([None, r.choice([1, 2, 5, 17, 64, 1000]) if causal else sides]) if r.random() < near else None
    chunk = r.randint(1, 40) if r.random() < 0.2 * near else None
    first = r.randint(1, 9) if (window is not None or chunk is not None) and r.random() < 0.3 else 0
    softcap = 10 ** r.uniform(-1, 2) if r.random() < 0.25 else None
    scale = 10 ** r.uniform(-2, 1) if r.random() < 0.25 else None
    return AttentionSpec(causal, window, chunk=chunk, first=first, softcap=softcap, scale=scale)


def powers_of(r: random.Random, words: Words) -> dict[str, float]:
    """Powers of 10 for the inputs; k's is such that scores stay where a softmax is more than its largest score."""
    spec, dim, far = words["spec"], words["head_dim"], 1.0 if words["dtype"] == "float16" else 8.0
    q, v, d = (r.choice([0.0, r.uniform(-far, far)]) for _ in range(3))
    scores, scale = r.uniform(-3, 1), math.log10((spec.scale or dim**-0.5) * dim**0.5)
    return {"q": q, "k": scores - q - scale, "v": v, "dout": d, "dlse": v + d, "sinks": r.choice([0.0, scores])}


def travels(r: random.Random, words: Words) -> Words:
    """How keys travel: words of a Transport."""
    ring, ulysses, how = words["ring"], words["ulysses"], Words()
    if ring > 1 and words["strategy"] in ("ring", "auto"):
        how |= {"route": r.choice(["auto", *ROUTES]), "grads": r.choice(["auto", *GRADS])}
        if how["route"] == "levels" or r.random() < 0.2:
            how["hosts"] = r.choice([n for n in range(2, ring + 1) if ring % n == 0])
        if how["route"] != "relay":
            how["together"] = r.choice([None, 1, 2, 3])
    if (words["strategy"] == "gather" or ulysses > 1) and r.random() < 0.3:
        heads = max(1, math.lcm(words["kv_heads"], ulysses) // ulysses)
        how["groups"] = r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    return how


def cached(r: random.Random, words: Words, device: str) -> None:
    """A sequence that a cache is given in pieces; some are taken back and given again, and some are trees of drafts."""
    T, spec = r.randint(4, r.choice([40, 100])), spec_of(r, causal=True)
    if spec.window is not None and r.random() < 0.8:
        spec = spec.replace(first=0)  # a cache of a window refuses them
    words |= {"layout": r.choice(LAYOUTS), "seq_len": T, "spec": spec, "block": r.choice([1, 2, 4, 16, 64])}
    steps, lengths, back = list[Step](), [0] * words["batch"], spec.behind is None
    while max(lengths) < T and len(steps) < 9:
        decode = bool(steps) and r.random() < 0.6
        if steps and back and r.random() < 0.15:
            lengths = [r.randint(max(1, n - 9), n) for n in lengths]
        left = T - max(lengths)
        n = min(left, r.choice([1, 1, 2, 5, 16])) if decode or r.random() < 0.5 else r.randint(1, left)
        how: Words = {} if decode else {"move": r.choice(["auto", "queries", "keys"]), "keys": r.choice([None, 2, 7])}
        if drafts := decode and back and device != "jax" and r.random() < 0.2:
            how = {"parents": [r.randint(-1, i - 1) for i in range(n)]}
        steps.append(Step("decode" if decode else "prefill", tuple(lengths), n, how))
        lengths = lengths if drafts else [m + n for m in lengths]
    words |= {"steps": tuple(steps), "powers": powers_of(r, words), "grads": ()}


def linear(r: random.Random, words: Words, device: str) -> None:
    """Linear attention, gated or by the delta rule, with states of rows or of documents, and none."""
    words |= {"head_dim": min(32, words["head_dim"]), "value_dim": min(32, words["value_dim"]), "sinks": False}
    words |= {"gate": r.choice([None, "head", "channel"]), "beta": r.random() < 0.6}
    words["state"] = r.choice([None, "row", "row"])
    ways = layouts(words["ring"], words["ulysses"])
    if words["layout"] not in ways and r.random() < 0.9:
        words["layout"] = r.choice([name for name in ways if device != "jax" or name in LAYOUTS])
    scans = ways.get(words["layout"], WAYS) if r.random() < 0.9 else WAYS
    words["words"] = {"scan": r.choice(["auto", *scans]), "scale": r.choice([None, 0.5])}
    if r.random() < 0.3 and device != "jax":
        words["words"]["check"] = True
    if r.random() < 0.6:
        rows, count = range(r.choice([1, words["batch"]])), r.randint(1, 6)
        words["lengths"] = [pieces(r, words["seq_len"], count, 1, r.random() < 0.3) for _ in rows]
        words["state"] = r.choice([None, "row", "document", "document"])
        words["words"]["return_state"] = r.choice([True, "documents"])
    far = 0.5 if words["dtype"] == "float16" else 4.0
    v, d = (r.choice([0.0, r.uniform(-far, far)]) for _ in "vd")
    words["powers"] = {"v": v, "state": v, "dout": d, "dend": d, "g": r.uniform(-2, 1)}
    words["grads"] = r.choice([("dout", "dend"), ("dout", "dend"), ("dout",), ("dend",)])
