"""One GPU: our linear attention beside flash-linear-attention's, in turns on the same inputs.

Gated linear attention (GLA), and by the delta rule Gated DeltaNet (gdn) and Kimi Delta Attention (kda).

`triton` is the kernels alone, `op` the public function, and `states` the same with one state a document, in cases that
have documents. A row is a pass: forward; backward; both. `tokens_per_us` counts tokens of all heads; `over_fla` is its
time over ours. The cases `errors_*` hold the result and every gradient against float64, as |found - exact| / |exact|.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import ringattn as ra
from ringattn.kernels.linear import TABLE, chunkwise, of_rule
from ringattn.kernels.linear.maps import Inputs
from ringattn.launch.bench import Row, contest
from ringattn.launch.bench.contest import DTYPES, Passes
from ringattn.launch.words import option
from ringattn.masks.spec import Docs

GPU_IMPLS, CPU_IMPLS = ["triton", "op", "states", "fla"], ["chunkwise", "op", "states"]
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
    rounds: int = contest.ROUNDS

    def __post_init__(self) -> None:
        contest.settle(self, CASES, CONTESTANTS)
        self.gate_dtype = self.gate_dtype or self.dtype
        self.impls = self.impls or (GPU_IMPLS if self.device == "cuda" else CPU_IMPLS)


class Given(NamedTuple):
    """The inputs of a case, and the gradient that comes back."""

    x: Inputs
    dout: Tensor
    docs: Docs | None

    @property
    def leaves(self) -> list[Any]:
        """Copies that gradients are taken for: q, k, v, g, beta."""
        return [t if t is None else t.detach().requires_grad_() for t in self.x[:5]]


def run(options: Options) -> Iterator[Row]:
    """Every chosen case, printed as it is done."""
    about = {"gate_dtype": options.gate_dtype}
    return contest.each(
        contest.sized(options, CASES), lambda case: (off if case.errors else times)(case, options), lambda case: about
    )


def times(case: Case, options: Options) -> list[Row]:
    """Time and peak memory of each contestant, forward, backward and both together."""
    given, tokens = inputs(case, options), case.batch * case.tokens / 1e3
    amounts = dict.fromkeys(("forward", "backward", "both"), tokens)
    return contest.timed(options.impls or (), lambda name: CONTESTANTS[name](given), options, "tokens_per_us", amounts)


def off(case: Case, options: Options) -> list[Row]:
    """Distance from float64 of out and of every gradient, on the same inputs for all."""
    given = inputs(case, options)

    def results(passes: Passes) -> dict[str, Any]:
        return dict(zip(NAMES, (passes["forward"](), *passes["backward"]()), strict=True))

    exact: list[Any] = [t.double() if torch.is_tensor(t) else t for t in given.x]
    truth = results(of_kernel(chunkwise, Given(Inputs(*exact), given.dout.double(), None)))
    return contest.off(options.impls, lambda name: results(CONTESTANTS[name](given)), truth, "fla", "of_fla")


def inputs(case: Case, options: Options) -> Given:
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
        ends = rng.choice(inside, case.documents - 1, replace=False)
        docs = Docs.from_lengths(np.diff([0, *np.sort(ends), case.tokens]).tolist())
    return Given(Inputs(q.to(dtype), k.to(dtype), v, g, beta, None, case.key_dim**-0.5), dout, docs)


def of_kernel(kernels: Any, given: Given) -> Passes:
    """Forward, and backward from what the forward saved, as one device runs the four functions of a kernel."""
    if given.docs is not None:
        raise NotImplementedError("the kernels alone are timed without documents")
    x, dout, scan = given.x, given.dout, kernels.scan_states(given.x, maps=False)

    def backward() -> Any:
        return kernels.gradients(x, scan, None, kernels.scan_gradients(x, dout, maps=False), dout, None)[:5]

    return {"forward": lambda: kernels.read_out(x, kernels.scan_states(x, maps=False), None)[0], "backward": backward}


def of_table(name: str) -> Callable[[Given], Passes]:
    kernel = next(kernel for kernel in TABLE if kernel.name == name)
    return lambda given: of_kernel(of_rule(kernel.load(), given.x.beta is not None), given)


def op(given: Given, **options: Any) -> Passes:
    """`ra.linear_attention` as its users call it, differentiated by autograd."""
    q, k, v, g, beta = leaves = given.leaves

    def forward() -> Any:
        out = ra.linear_attention(q, k, v, g, beta=beta, scale=given.x.scale, docs=given.docs, check=False, **options)
        return out[0] if options else out

    return contest.differentiated(forward, leaves, given.dout)


def states(given: Given) -> Passes:
    """The same from one state a document to one a document."""
    if given.docs is None:
        raise NotImplementedError("states of documents need a case with documents")
    x, count = given.x, given.docs.starts.shape[1] - 1
    start = torch.zeros(count, x.v.shape[2], x.k.shape[3], x.v.shape[3], device=x.v.device)
    return op(given, initial_state=start, return_state="documents")


def fla(given: Given) -> Passes:
    """flash-linear-attention as its users call it, differentiated by autograd."""
    q, k, v, g, beta = leaves = given.leaves
    if given.docs is not None:
        raise NotImplementedError("compared without documents")
    if g is None or (g.dim() < 4 and beta is None):
        raise NotImplementedError("chunk_gla takes one gate a key channel, and the delta rule a gate")
    if beta is None:
        from fla.ops.gla import chunk_gla as attend
    elif g.dim() < 4:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as attend
    else:
        from fla.ops.kda import chunk_kda as attend
    more = {} if beta is None else {"beta": beta}
    return contest.differentiated(lambda: attend(q, k, v, g, scale=given.x.scale, **more)[0], leaves, given.dout)


CONTESTANTS: dict[str, Callable[[Given], Passes]] = {
    "triton": of_table("triton"),
    "chunkwise": of_table("chunkwise"),
    "op": op,
    "states": states,
    "fla": fla,
}
