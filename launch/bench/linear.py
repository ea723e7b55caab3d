"""One GPU: our linear attention beside flash-linear-attention's, in one run on the same inputs.

Gated linear attention (GLA), and by the delta rule Gated DeltaNet (gdn) and Kimi Delta Attention (kda).

`triton` is the kernels alone, `op` the public function, and `states` the same with one state a document, in cases that
have documents. A row is a pass: forward; backward; both. `tokens_per_us` counts tokens of all heads; `over_fla` is its
time over ours. The cases `errors_*` hold the result and every gradient against float64, as |found - exact| / |exact|.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import ringattn as ra
from ringattn.conf.schema import nearest
from ringattn.kernels import chunkwise, linear
from ringattn.kernels.linear import TABLE
from ringattn.launch.bench import table
from ringattn.launch.bench.kernels import DTYPES, attempt, distance, median_ms, peak_gib, with_ratios
from ringattn.launch.words import option
from ringattn.spec import Docs

NAMES = ("out", "dq", "dk", "dv", "dg", "dbeta")


@dataclass(frozen=True)
class Case:
    """What is measured. `gates`: soft are a layer's, logsigmoid(x) / 16; hard ones lack the 16; extreme ones forget.

    With `beta` it is the delta rule: q and k have length 1. `key_heads` are as many as `heads` unless given.
    """

    tokens: int
    batch: int = 1
    heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    gate: str = "channel"  # channel, head, none
    gates: str = "soft"
    errors: bool = False
    beta: bool = False
    key_heads: int | None = None
    documents: int = 0  # packed documents of random lengths; 0: one sequence


CASES = {
    "32k": Case(32768),
    "131k": Case(131072),
    "batch8_2k_k256_v512": Case(2048, batch=8, heads=4, key_dim=256, value_dim=512),
    "32k_hard": Case(32768, gates="hard"),
    "32k_extreme": Case(32768, gates="extreme"),
    "32k_head": Case(32768, gate="head"),
    "32k_none": Case(32768, gate="none"),
    "gdn_32k": Case(32768, gate="head", beta=True),
    "gdn_32k_groups": Case(32768, gate="head", beta=True, heads=32, key_heads=16),
    "kda_32k": Case(32768, beta=True),
    "gdn_32k_8docs": Case(32768, gate="head", beta=True, documents=8),
    "gdn_32k_30docs": Case(32768, gate="head", beta=True, documents=30),
    "kda_32k_30docs": Case(32768, beta=True, documents=30),
    "32k_30docs": Case(32768, documents=30),
    "errors_soft": Case(2000, errors=True),
    "errors_hard": Case(2000, gates="hard", errors=True),
    "errors_extreme": Case(2000, gates="extreme", errors=True),
    "errors_gdn": Case(2000, gate="head", beta=True, errors=True),
    "errors_gdn_groups": Case(2000, gate="head", beta=True, heads=32, key_heads=16, errors=True),
    "errors_kda": Case(2000, beta=True, errors=True),
    "errors_kda_hard": Case(2000, gates="hard", beta=True, errors=True),
}


@dataclass
class Options:
    cases: list[str] = option(list(CASES), "which cases; or how their names begin")
    impls: list[str] | None = option(None, "which contestants (triton,op,states,fla; on a CPU chunkwise,op,states)")
    tokens: int | None = option(None, "another length for every case")
    device: str | None = option(None, "cuda or cpu (the GPU if there is one)", among=("cuda", "cpu"))
    dtype: str | None = option(None, "bfloat16 on a GPU, float32 on a CPU", among=DTYPES)
    gate_dtype: str | None = option(None, "as dtype", among=DTYPES)
    cuts: list[str] = option(
        [], "the triton kernels cut otherwise too: gradients=32x64x8x1 (keys x values x warps x stages)"
    )
    rep: int = option(200, "milliseconds of repetitions for each median")

    def __post_init__(self) -> None:
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = self.dtype or ("bfloat16" if self.device == "cuda" else "float32")
        self.gate_dtype = self.gate_dtype or self.dtype
        cuda = self.device == "cuda"
        self.impls = self.impls or (["triton", "op", "states", "fla"] if cuda else ["chunkwise", "op", "states"])
        for name in self.impls:
            if name not in CONTESTANTS:
                raise ValueError(f"impls={name}: no such contestant{nearest(name, CONTESTANTS)}")
        for text in self.cuts:
            with recut(text):
                pass
        for word in self.cases:
            if not chosen([word]):
                raise ValueError(f"cases={word}: no such case{nearest(word, CASES)} (there are {', '.join(CASES)})")


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    dout: Tensor
    docs: Docs | None = None

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """Copies that gradients are taken for: q, k, v, g, beta."""
        return tuple(
            x if x is None else x.detach().requires_grad_() for x in (self.q, self.k, self.v, self.g, self.beta)
        )

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


Pass = Callable[[], tuple[Any, ...]]


def run(options: Options) -> list[dict[str, Any]]:
    """Every chosen case, printed as it is done."""
    rows: list[dict[str, Any]] = []
    for name in chosen(options.cases):
        case = CASES[name]
        case = replace(case, tokens=options.tokens or case.tokens)
        given = inputs(case, options)
        measure = errors if case.errors else times
        new = [{"case": name, "gate_dtype": options.gate_dtype, **row} for row in measure(given, options)]
        rows += new
        print(table(new, list(dict.fromkeys(key for row in new for key in row))) + "\n", flush=True)
    return rows


def chosen(words: list[str]) -> list[str]:
    """The cases of these names; a word that is none stands for all that begin with it."""
    return [n for n in CASES if any(n == w or (w not in CASES and n.startswith(w)) for w in words)]


def times(given: Inputs, options: Options) -> list[dict[str, Any]]:
    """Time and peak memory of each contestant, forward, backward and both together."""
    tokens = given.q.shape[0] * given.q.shape[1]

    def measured(name: str) -> list[dict[str, Any]]:
        forward, backward = CONTESTANTS[name](given)
        found = []
        for what, function in (("forward", forward), ("backward", backward), ("both", lambda: (forward(), backward()))):
            memory, ms = peak_gib(function), median_ms(function, options)  # type: ignore[arg-type]
            found.append({"impl": name, "pass": what, "ms": ms, "tokens_per_us": tokens / ms / 1e3, "peak_gib": memory})
        return found

    return with_ratios(with_ratios(contest(options, measured), "triton"), "op")


def contest(options: Options, measured: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of every contestant, and of the triton kernels with every cut that is to be tried."""
    rows = [row for name in options.impls or () for row in attempt(name, measured)]
    for text in options.cuts:
        with recut(text):
            rows += [{**row, "impl": text} for row in attempt("triton", measured)]
    return rows


@contextmanager
def recut(text: str) -> Iterator[None]:
    """The triton kernels with one of them cut as `text`, gradients=32x64x8x1: keys, values, warps, stages."""
    from ringattn.kernels.triton.linear import TABLE as CUTS
    from ringattn.kernels.triton.linear import Cut, Cuts

    kernel, _, sizes = text.partition("=")
    numbers = sizes.split("x")
    if kernel not in Cuts._fields[1:] or len(numbers) != 4 or not all(n.isdecimal() for n in numbers):
        kinds = ", ".join(Cuts._fields[1:])
        raise ValueError(f"cuts={text}: say one of {kinds} and keys x values x warps x stages, like states=64x128x4x2")
    before = dict(CUTS)
    CUTS.update({key: cuts._replace(**{kernel: Cut(*map(int, numbers))}) for key, cuts in before.items()})  # type: ignore[arg-type]
    try:
        yield
    finally:
        CUTS.update(before)


def errors(given: Inputs, options: Options) -> list[dict[str, Any]]:
    """Distance from float64 of out and of every gradient, on the same inputs for all."""
    exact: dict[str, Any] = {name: x if x is None else x.double() for name, x in vars(given).items()}
    forward, backward = passes(chunkwise, Inputs(**exact))
    truth = dict(zip(NAMES, (*forward(), *backward()), strict=True))

    def measured(name: str) -> list[dict[str, Any]]:
        forward, backward = CONTESTANTS[name](given)
        found = dict(zip(NAMES, (*forward(), *backward()), strict=True))
        return [{"impl": name, **{f"error_{n}": distance(found[n], truth[n]) for n in NAMES if truth[n] is not None}}]

    rows = contest(options, measured)
    for base in [row for row in rows if row["impl"] == "fla"]:
        for row in rows:
            row |= {f"of_fla_{n}": row[f"error_{n}"] / base[f"error_{n}"] for n in NAMES if f"error_{n}" in base}
    return rows


def inputs(case: Case, options: Options) -> Inputs:
    generator = torch.Generator(device=options.device).manual_seed(0)
    dtype, gate_dtype = getattr(torch, options.dtype or ""), getattr(torch, options.gate_dtype or "")

    def draw(*sizes: int, heads: int = case.heads) -> Tensor:
        shape = (case.batch, case.tokens, heads, *sizes)
        return torch.randn(shape, generator=generator, device=options.device)

    q, k = (draw(case.key_dim, heads=case.key_heads or case.heads) for _ in "qk")
    v, dout = (draw(case.value_dim).to(dtype) for _ in range(2))
    if case.beta:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g = None
    if case.gate != "none":
        x = draw(case.key_dim) if case.gate == "channel" else draw()
        g = {"soft": F.logsigmoid(x) / 16, "hard": F.logsigmoid(x), "extreme": -torch.exp(3 * x)}[case.gates]
        g = g.to(gate_dtype)
    beta = draw().sigmoid() if case.beta else None
    docs = None
    if case.documents:
        rng, inside = np.random.default_rng(case.documents), np.arange(1, case.tokens)
        cuts = rng.choice(inside, case.documents - 1, replace=False)
        docs = Docs.from_lengths(np.diff([0, *np.sort(cuts), case.tokens]).tolist())
    return Inputs(q.to(dtype), k.to(dtype), v, g, beta, dout, docs)


def passes(kernels: Any, given: Inputs) -> tuple[Pass, Pass]:
    """Forward, and backward from what the forward saved, as one device runs the four functions of a kernel."""
    if given.docs is not None:
        raise NotImplementedError("the kernels alone are timed without documents")
    x = linear.Inputs(given.q, given.k, given.v, given.g, given.beta, None, given.scale)

    def forward() -> tuple[Any, ...]:
        return kernels.read_out(x, kernels.scan_states(x, maps=False), None)[:1]

    scan = kernels.scan_states(x, maps=False)

    def backward() -> tuple[Any, ...]:
        return kernels.gradients(x, scan, None, kernels.scan_gradients(x, given.dout, maps=False), given.dout, None)[:5]

    return forward, backward


def of_table(name: str) -> Callable[[Inputs], tuple[Pass, Pass]]:
    return lambda given: passes(next(kernel for kernel in TABLE if kernel.name == name).load(), given)


def op(given: Inputs) -> tuple[Pass, Pass]:
    """`ra.linear_attention` as its users call it, differentiated by autograd."""
    q, k, v, g, beta = leaves = given.leaves

    def forward() -> tuple[Any, ...]:
        return (ra.linear_attention(q, k, v, g, beta=beta, scale=given.scale, docs=given.docs, check=False),)

    return differentiated(forward, leaves, given)


def states(given: Inputs) -> tuple[Pass, Pass]:
    """The same from one state a document to one a document."""
    if given.docs is None:
        raise NotImplementedError("states of documents need a case with documents")
    q, k, v, g, beta = leaves = given.leaves
    count = given.docs.starts.shape[1] - 1
    start = torch.zeros(count, v.shape[2], k.shape[3], v.shape[3], device=v.device)  # type: ignore[union-attr]
    options: dict[str, Any] = {
        "scale": given.scale,
        "docs": given.docs,
        "initial_state": start,
        "return_state": "documents",
    }

    def forward() -> tuple[Any, ...]:
        return (ra.linear_attention(q, k, v, g, beta=beta, check=False, **options)[0],)

    return differentiated(forward, leaves, given)


def fla(given: Inputs) -> tuple[Pass, Pass]:
    """flash-linear-attention as its users call it, differentiated by autograd."""
    if given.docs is not None:
        raise NotImplementedError("compared without documents")
    if given.g is None or (given.g.dim() < 4 and given.beta is None):
        raise NotImplementedError("chunk_gla takes one gate a key channel, and the delta rule a gate")
    if given.beta is None:
        from fla.ops.gla import chunk_gla as attend
    elif given.g.dim() < 4:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as attend
    else:
        from fla.ops.kda import chunk_kda as attend
    q, k, v, g, beta = leaves = given.leaves
    more = {} if beta is None else {"beta": beta}

    def forward() -> tuple[Any, ...]:
        return (attend(q, k, v, g, scale=given.scale, **more)[0],)

    return differentiated(forward, leaves, given)


def differentiated(forward: Pass, leaves: tuple[Tensor | None, ...], given: Inputs) -> tuple[Pass, Pass]:
    """Forward, and backward by autograd: a gradient for each leaf, None where there is none."""
    (out,) = forward()

    def backward() -> tuple[Any, ...]:
        found = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], given.dout, retain_graph=True))
        return tuple(x if x is None else next(found) for x in leaves)

    return forward, backward


CONTESTANTS: dict[str, Callable[[Inputs], tuple[Pass, Pass]]] = {
    "triton": of_table("triton"),
    "chunkwise": of_table("chunkwise"),
    "op": op,
    "states": states,
    "fla": fla,
}
