"""Random calls for `ringattn verify random=N`: attention, caches and linear attention, drawn from a number.

Call i of a run is drawn from seed + i alone, so a failure is repeated by one line. Shapes, masks, documents, layouts,
meshes, routes, dtypes and magnitudes are drawn together: what breaks is mostly a combination that is on no list. Every
element of every result is held to what rounding allows it (`rounding.py`).
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringattn as ra
from ringattn import kernels
from ringattn.kernels.linear import TABLE as linear_table
from ringattn.launch.verify import linear_oracle, oracle, rounding
from ringattn.launch.verify.cases import Case, Truth
from ringattn.layouts.layout import LAYOUTS
from ringattn.masks.spec import AttentionSpec
from ringattn.plans.segments import layouts

TITLE = "worst errors of an element over what rounding allows it"
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")  # float32 twice as often
RANKS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 8)
Step = tuple[str, Any, dict[str, Any]]  # what is done with a cache, with how many tokens, and how


@dataclass(frozen=True, eq=False)
class Call:
    """One call over ring x ulysses ranks: a case, the size of its numbers, and how it is spread and run."""

    seed: int
    case: Any  # cases.Case, linear_oracle.Case
    dtype: torch.dtype
    kernel: str
    powers: dict[str, float]  # of 10, for each input
    choices: dict[str, Any] = field(default_factory=dict)
    grads: tuple[str, ...] = ("dout", "dlse")  # which gradients come back
    wild: tuple[str, ...] = ()  # inputs of which every token has another magnitude
    steps: tuple[Step, ...] = ()  # of a cache
    block: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of linear attention's inputs

    @property
    def ring(self) -> int:
        return self.case.ring

    @property
    def ulysses(self) -> int:
        return self.case.ulysses

    @property
    def tokens(self) -> list[Any]:
        """Of each step of a cache: which tokens [B, n] it appends and asks for."""
        lengths, every = np.zeros(self.case.batch, int), []
        for do, n, _ in self.steps:
            every.append(lengths[:, None] + np.arange(0 if do == "back" else n))
            lengths = np.array(n) if do == "back" else lengths + n
        return every

    def mine(self, name: str, whole: Tensor, padding: float) -> Tensor:
        """What the steps of a cache give of `whole`; tokens that are taken back are there twice."""
        return whole[np.arange(self.case.batch)[:, None], np.concatenate(self.tokens, 1)]

    @property
    def kind(self) -> str:
        return "linear" if isinstance(self.case, linear_oracle.Case) else "cache" if self.steps else "attention"

    @property
    def table_row(self) -> str:
        return f"{self.kind:<11}{str(self.dtype).removeprefix('torch.'):<10}"

    def __str__(self) -> str:
        shown = {**vars(self), "dtype": str(self.dtype).removeprefix("torch."), "kind": self.kind}
        shown["powers"] = {n: round(x, 1) for n, x in self.powers.items() if x}
        return ", ".join(f"{n}={x}" for n, x in shown.items() if n != "seed" and x not in ((), {}, 0))


@lru_cache(maxsize=4096)
def draw(seed: int, ranks: int | None, dtype: str | None, kernel: str, device: str) -> Call:
    """The call of this number; ranks and dtype are drawn unless given, the kernel where it is auto."""
    r = random.Random(seed)
    count, kind = r.choice(RANKS), r.choice(kinds_of(kernel))
    count = ranks or count
    ulysses = r.choice([u for u in range(1, count + 1) if count % u == 0])
    drawn_dtype = r.choice(DTYPES)
    chosen: Any = getattr(torch, dtype or drawn_dtype)
    named = "tiled" if r.random() < 0.2 and device == "cpu" and kind != "linear" else "auto"
    made = {"attention": attention, "cache": cached, "linear": linear}[kind]
    return made(r, seed, count // ulysses, ulysses, chosen, named if kernel == "auto" else kernel, device)


def kinds_of(kernel: str) -> tuple[str, ...]:
    """What this kernel computes, how often each."""
    softmax, gated = ("attention",) * 6 + ("cache",) * 2, ("linear",) * 2
    if kernel == "auto":
        return softmax + gated
    return softmax * (kernel in {k.name for k in kernels.TABLE}) + gated * (kernel in {k.name for k in linear_table})


def attention(
    r: random.Random, seed: int, ring: int, ulysses: int, dtype: torch.dtype, kernel: str, device: str
) -> Call:
    """Any mask, documents, layout, strategy and route."""
    sizes = sizes_of(r, ulysses, device)
    cross = r.random() < 0.2
    documents, packed = r.random() < 0.5, {}  # causal over two sequences has a meaning where both are packed
    spec = spec_of(r, full=(cross and not documents) or r.random() < 0.2)
    if documents:
        rows = r.choice([1, sizes["batch"]])
        count = r.randint(1, 9)
        packed["lengths"] = lengths_of(r, rows, count, sizes["seq_len"])
        if cross:
            sizes["key_len"] = r.randint(1, 2 * sizes["seq_len"])
            packed["key_lengths"] = lengths_of(r, rows, count, sizes["key_len"])
    elif cross:
        sizes["key_len"] = r.randint(1, 2 * sizes["seq_len"])
    strategy = r.choice(["ring", "ring", "gather"]) if ring > 1 else "ulysses"
    layout = r.choice(LAYOUTS if cross or ring == 1 else (*LAYOUTS, "balanced"))
    case = Case("random", ring, ulysses, strategy, layout, spec, **sizes, **packed, sinks=r.random() < 0.3)
    grads = r.choice([("dout", "dlse"), ("dout", "dlse"), ("dout",), ("dlse",)])
    wild = tuple(n for n in ("q", "v", "dout", "dlse") if r.random() < 0.15 and dtype != torch.float16)
    powers, choices = powers_of(r, case, dtype, wild), choices_of(r, case)
    return Call(seed, masked(r, case), dtype, kernel, powers, choices, grads, wild)


def masked(r: random.Random, case: Case) -> Case:
    """The case, in half of those of one sequence with another mask: chunks and first keys, windows to both sides,
    prefixes and spans, trees or slices.
    """
    if case.key_len is not None or r.random() < 0.5:
        return case
    kind, T, spec = r.choice(["near", "near", "spans", "tree", "slices"]), case.seq_len, case.spec
    if kind == "near":
        window = spec.window if spec.causal else r.choice([None, (r.randint(0, 20), r.randint(0, 20))])
        chunk = r.choice([None, r.randint(1, 40)])
        first = 0 if window is None and chunk is None else r.choice([0, r.randint(1, 9)])
        return replace(case, spec=spec.replace(window=window, chunk=chunk, first=first))
    plain = replace(case, spec=spec.replace(causal=True), sinks=case.sinks)
    if kind == "slices":
        slices = []
        for start, stop in bounds_of(pieces(r, T)):  # no query may see a key twice
            seen = r.sample(bounds_of(pieces(r, T)), 1) if r.random() < 0.5 else bounds_of(pieces(r, T))[:2]
            slices += [((start, stop), keys, r.choice(["full", "causal", "inverse", "both"])) for keys in seen]
        return replace(case, slices=slices, lengths=None)
    rows = [pieces(r, T) for _ in range(r.choice([1, case.batch]))]
    if kind == "tree":
        width = min(map(len, rows))
        parents = [[r.randint(-1, i - 1) for i in range(width)] for _ in rows]
        rows = [row[:width] for row in rows]
        packed: dict[str, Any] = {"lengths": rows, "parents": parents}
    else:
        prefix = [[r.choice([0, r.randint(0, n)]) for n in row] for row in rows]
        spans = [list(between(r, *row)) for row in zip(rows, prefix, strict=True)]
        packed = {"lengths": rows, "prefix": prefix, "spans": spans}
    return replace(plain, **({n: x[0] for n, x in packed.items()} if len(rows) < case.batch else packed))


def pieces(r: random.Random, total: int) -> list[int]:
    """Lengths of one document or a few, none of them empty."""
    ends = sorted({total, *(r.randint(1, total) for _ in range(r.randint(0, 6)))})
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def bounds_of(lengths: list[int]) -> list[tuple[int, int]]:
    return [(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]


def between(r: random.Random, lengths: list[int], prefix: list[int]) -> Iterator[tuple[int, int]]:
    """A span in some of the documents, behind their prefix."""
    for (begin, end), ahead in zip(bounds_of(lengths), prefix, strict=True):
        if begin + ahead < end and r.random() < 0.6:
            start, stop = sorted(r.sample(range(begin + ahead, end + 1), 2))
            yield start, stop


def sizes_of(r: random.Random, ulysses: int, device: str) -> dict[str, Any]:
    dims = (8, 16, 32, 64) if device == "cuda" else (1, 4, 7, 8, 16, 24, 32, 64)
    kv_heads, dim = r.choice([1, 1, 2, 3, 4]), r.choice(dims)
    heads = math.lcm(kv_heads * r.choice([1, 2, 3]), ulysses)
    longest = r.choice([6, 40, 100, 200])
    return {
        "seq_len": r.randint(1, longest), "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
        "value_dim": dim if r.random() < 0.6 else r.choice(dims), "batch": r.choice([1, 1, 2, 3]),
    }  # fmt: skip


def spec_of(r: random.Random, full: bool = False) -> AttentionSpec:
    window = None if full or r.random() < 0.6 else r.choice([1, 2, 5, 17, 64, 1000])
    softcap = 10 ** r.uniform(-1, 2) if r.random() < 0.25 else None
    scale = 10 ** r.uniform(-2, 1) if r.random() < 0.25 else None
    return AttentionSpec(not full, window, softcap=softcap, scale=scale)


def lengths_of(r: random.Random, rows: int, count: int, total: int) -> Any:
    """The same number of documents in each row, some of them empty, with padding behind them in some."""
    every = []
    for _ in range(rows):
        ends = sorted(r.choice([r.randint(0, total), r.randint(0, min(total, 4))]) for _ in range(count))
        ends[-1] = total if r.random() < 0.6 else ends[-1]
        every.append([b - a for a, b in zip([0, *ends], ends, strict=False)])
    return every[0] if rows == 1 else every


def powers_of(r: random.Random, case: Case, dtype: torch.dtype, wild: tuple[str, ...] = ()) -> dict[str, float]:
    """Powers of 10 for the inputs; k's is such that scores stay where a softmax is more than its largest score."""
    far = 1.0 if dtype == torch.float16 else 10.0
    far -= 3 * bool(wild)  # what is wild goes three powers further
    scores = r.uniform(-3, 1 if dtype == torch.float16 else 2)
    q, v, dout, dlse = (r.choice([0.0, r.uniform(-far, far)]) for _ in range(4))
    scale = math.log10((case.spec.scale or case.head_dim**-0.5) * case.head_dim**0.5)
    return {"q": q, "k": scores - q - scale, "v": v, "dout": dout, "dlse": dlse, "sinks": r.choice([0.0, scores])}


def choices_of(r: random.Random, case: Case) -> dict[str, Any]:
    """How keys travel: further words for the plan."""
    choices: dict[str, Any] = {}
    if case.strategy == "ring" and case.ring > 1:
        hosts = [n for n in range(2, case.ring + 1) if case.ring % n == 0]
        choices["route"] = r.choice(["auto", "direct", "relay", "levels"])
        if choices["route"] == "levels":
            choices["hosts"] = r.choice(hosts)
        if choices["route"] in ("direct", "levels"):
            choices["together"] = r.choice([None, 1, 2, 3])
    if (case.strategy == "gather" or case.ulysses > 1) and r.random() < 0.3:
        here = max(1, math.lcm(case.kv_heads, case.ulysses) // case.ulysses)
        choices["groups"] = r.choice([n for n in range(1, here + 1) if here % n == 0])
    return choices


def cached(r: random.Random, seed: int, ring: int, ulysses: int, dtype: torch.dtype, kernel: str, device: str) -> Call:
    """A sequence that a cache is given in pieces, some of which are taken back and given again."""
    sizes = {**sizes_of(r, ulysses, device), "seq_len": r.choice([r.randint(4, 40), r.randint(40, 100)])}
    spec = spec_of(r)
    case = Case("random", ring, ulysses, spec=spec, **sizes, sinks=r.random() < 0.3)
    steps: list[Step] = []
    lengths = [0] * case.batch
    while max(lengths) < case.seq_len and len(steps) < 8:
        left = case.seq_len - max(lengths)
        if steps and spec.window is None and r.random() < 0.15:
            lengths = [r.randint(max(1, n - 9), n) for n in lengths]
            steps.append(("back", tuple(lengths), {}))
        elif steps and r.random() < 0.5:
            n = min(left, r.choice([1, 1, 2, 5]))
            steps.append(("decode", n, {}))
            lengths = [m + n for m in lengths]
        else:
            n = r.randint(1, left) if r.random() < 0.5 else min(left, r.randint(1, 16))
            steps.append(
                ("prefill", n, {"move": r.choice(["auto", "queries", "keys"]), "keys": r.choice([None, 2, 7])})
            )
            lengths = [m + n for m in lengths]
    block = r.choice([1, 2, 4, 16, 64])
    return Call(seed, case, dtype, kernel, powers_of(r, case, dtype), grads=(), steps=tuple(steps), block=block)


def linear(r: random.Random, seed: int, ring: int, ulysses: int, dtype: torch.dtype, kernel: str, device: str) -> Call:
    """Linear attention, gated or by the delta rule, with a state before it, perhaps of documents, which have their own
    states in half of those calls.
    """
    T = r.choice([r.randint(1, 20), r.randint(20, 90), r.randint(90, 300)])
    B, H = r.choice([1, 2]), r.choice([1, 2, 3, 4])
    dims = (16, 32, 64) if device == "cuda" else (1, 4, 8, 16, 24)
    K, V = r.choice(dims), r.choice(dims)
    gate = r.choice([None, "head", "channel"])
    lengths = None
    if r.random() < 0.5:
        rows = lengths_of(r, r.choice([1, B]), r.randint(1, 6), T)
        rows = rows if isinstance(rows[0], list) else [rows]
        lengths = tuple(tuple(row) for row in rows)
    layout, ways = r.choice([*layouts(ring, ulysses).items()])
    way = r.choice(ways)
    G, beta = r.choice([n for n in range(1, H + 1) if H % n == 0]), r.random() < 0.6
    case = linear_oracle.Case(
        "random", ring, ulysses, way, layout, gate=gate, lengths=lengths, seq_len=T, beta=beta, key_heads=G
    )
    shapes: dict[str, tuple[int, ...]] = {"q": (B, T, G, K), "k": (B, T, G, K), "v": (B, T, H, V), "dout": (B, T, H, V)}
    shapes |= {"state": (B, H, K, V), "dend": (B, H, K, V)}
    if gate:
        shapes["g"] = (B, T, H, K) if gate == "channel" else (B, T, H)
    if beta:
        shapes["beta"] = B, T, H
    far = 0.5 if dtype == torch.float16 else 4.0
    powers = {n: r.choice([0.0, r.uniform(-far, far)]) for n in shapes if n != "g"}
    powers |= {"g": r.uniform(-2, 1), "beta": 0.0}
    if beta:
        powers["k"] = 0.0
    wild = ("g",) * (gate is not None and r.random() < 0.3)
    if lengths and r.random() < 0.5:
        case = replace(case, states=True)
        shapes["state"] = shapes["dend"] = (linear_oracle.states_of(lengths, B), H, K, V)
    return Call(seed, case, dtype, kernel, powers, wild=wild, shapes=shapes)


def given_to(call: Call) -> dict[str, Any]:
    """The inputs, on every rank alike; the numbers of float16 stay in its range."""
    g = torch.Generator().manual_seed(call.seed)
    if isinstance(call.case, linear_oracle.Case):
        exact = torch.float64 if call.dtype == torch.float64 else torch.float32
        given: dict[str, Any] = {"g": None, "beta": None}
        for name, shape in call.shapes.items():
            x = torch.randn(shape, generator=g, dtype=torch.float64)
            if name == "g":
                x = torch.nn.functional.logsigmoid(x)
                if call.wild:  # some forget all
                    x = torch.where(x < -2, torch.where(x < -2.5, -torch.inf, -1e5), x)
            elif name == "beta":
                x = torch.where(x.abs() < 0.2, 1.0, (1 + x).clamp(0, 2))  # 0, 1 and 2 too
            elif name == "k" and call.case.beta:  # of length 1 or shorter
                x = x / x.norm(dim=-1, keepdim=True).clamp(min=shape[-1] ** 0.5)
            in_float32 = name in ("g", "beta", "state", "dend")
            given[name] = (x * 10 ** call.powers[name]).to(exact if in_float32 else call.dtype)
        if call.case.beta and call.seed % 4 == 0:  # longer, where no step enlarges the state: beta |k|^2 <= 2
            beta = given["beta"].unflatten(-1, (call.shapes["k"][2], -1)).amax(-1)
            longest = 0.99 * (2 / beta.double().clamp(min=0.1)).sqrt()[..., None]
            given["k"] = (given["k"].double() * longest.clamp(min=1.0)).to(call.dtype)
        return given
    given = oracle.inputs(call.case, torch.float64, call.seed)
    for name, x in given.items():
        x = x.double() * 10 ** call.powers[name]
        if name in call.wild:
            x *= 10 ** (6 * torch.rand(x.shape[:2], generator=g, dtype=torch.float64) - 3).reshape(
                *x.shape[:2], *[1] * (x.dim() - 2)
            )
        given[name] = x.float() if name == "dlse" else x.to(call.dtype)
    return {n: x for n, x in given.items() if n not in ("dout", "dlse") or n in call.grads}


@lru_cache(maxsize=64)
def truth_of(call: Call, precision: str = "") -> Truth:
    """What goes in, and what must come out of it. The call has its own dtype."""
    given, case = given_to(call), call.case
    if isinstance(case, linear_oracle.Case):
        exact = linear_oracle.dense(given, case.lengths)
        allowed = rounding.linear_allowances(given, case.lengths, exact)
    elif call.steps:
        q, k, v, sinks = (given[n].double() for n in ("q", "k", "v", "sinks"))
        out, _ = oracle.attention(case, q, k, v, sinks if case.sinks else None)
        exact, allowed = {"out": out}, rounding.allowances(case, given)
    else:
        exact, allowed = oracle.dense(case, given), rounding.allowances(case, given)
    return Truth(given, exact, allowed, defaultdict(lambda: 1.0), by_element=True)


def run(call: Call, mesh: Any, given: dict[str, Any]) -> tuple[dict[str, Any], oracle.Mine]:
    """This rank's results, and what of the truth they are."""
    plan = call.case.plan_on(mesh, call.kernel)
    if call.steps:
        return {"out": torch.cat(list(pieces_of(call, plan, given)), 1)}, call.mine
    return oracle.run(call.case, mesh, given, call.kernel, **call.choices), partial(oracle.own, plan)


def pieces_of(
    call: Call,
    plan: Any,
    given: dict[str, Any],
    array: Callable[[Any], Any] = lambda x: x,
    shard: Callable[..., Any] = lambda plan, *x: map(plan.shard, x),
    unshard: Callable[[Any, Any], Any] = lambda plan, x: plan.unshard(x),
) -> Iterator[Any]:
    """What the pieces of a cache give, on tensors of torch or JAX, where a call returns a new cache too."""
    case, spec = call.case, call.case.spec
    longest = max((n for do, n, _ in call.steps if do != "back"), default=1)
    cache: Any = ra.KVCache.allocate(
        plan, batch=case.batch, max_len=case.seq_len, kv_heads=case.kv_heads, head_dim=case.head_dim,
        value_dim=case.value_dim, dtype=given["q"].dtype, window=spec.behind, room=longest, block=call.block,
    )  # fmt: skip
    also: Any = {"spec": spec, "sinks": array(given["sinks"]) if case.sinks else None}
    for (do, n, how), at in zip(call.steps, call.tokens, strict=True):
        if do == "back":
            cache = cache.truncate(list(n)) or cache
            continue
        q, k, v = (array(given[name][np.arange(case.batch)[:, None], at]) for name in "qkv")
        if do == "decode":
            result = ra.decode(q, k, v, cache, **also, **how)
        else:
            chunk = plan.for_length(n)
            q, k, v = shard(chunk, q, k, v)
            result = ra.prefill(q, k, v, chunk, cache, **also, **how)
        out, cache = result if isinstance(result, tuple) else (result, cache)
        yield out if do == "decode" else unshard(chunk, out)
