"""One GPU: attention by our kernels, beside FlashAttention-4 and FlexAttention as their users call them, in turns.

`auto` and the names of our kernels are `ra.attention(kernel=NAME)`; `fa4` and `flex` are the libraries alone. Calls
alternate, so all have the same clock; `over_NAME` is the median of NAME's time over ours. Useful work is what the mask
lets through: 4 D H flops of a pair forward, 2.5 times that backward. Of short calls the host takes all of the time.
With rule=gated, delta or kimi it is linear attention, beside flash-linear-attention (`fla`); its figure is tokens a
microsecond. A decode is timed by `bench inference ranks=1`.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringattn as ra
from ringattn import kernels
from ringattn.conf.keys import nearest
from ringattn.kernels.linear import TABLE as LINEAR
from ringattn.launch.bench import Row, timing
from ringattn.launch.bench.masks import WORDS, Case, asked_by, case_of
from ringattn.launch.bench.ring import FLOPS
from ringattn.launch.bench.timing import RULE, Passes
from ringattn.launch.words import option
from ringattn.masks.bands import bounds_at, families

COLUMNS = ["tokens", "mask", "impl", "mode", "ms", "tflops", "tokens_per_us", "peak_gib"]
DEFAULT = {
    (True, "cuda"): ["auto", "triton", "flex", "cudnn", "flash", "fa4"],
    (True, "cpu"): ["auto", "sdpa_cpu", "tiled"],
    (False, "cuda"): ["auto", "triton", "fla"],
    (False, "cpu"): ["auto", "chunkwise"],
}  # of softmax or linear attention, and a device


@dataclass
class Options:
    tokens: list[int] = option([8192, 32768], "lengths")
    mask: list[str] = option(["causal"], WORDS)
    rule: str = RULE
    impls: list[str] | None = option(None, "which contestants: auto, flex, fla, names of kernels")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    backward: bool = option(True, "time forward and backward as well")
    rounds: int = option(20, "rounds, in each of which every contestant runs once", least=1)

    def __post_init__(self) -> None:
        for mask in self.mask:
            asked_by(mask, max(self.tokens))
        softmax = self.rule == "softmax"
        self.impls = self.impls or DEFAULT[softmax, self.device]
        names = ["auto", *(kernel.name for kernel in (kernels.TABLE if softmax else LINEAR))]
        names += ["flex"] if softmax else ["fla"]
        for name in self.impls:
            if name not in names:
                raise ValueError(
                    f"impls={name}: no such contestant{nearest(name, names)}; there are {', '.join(names)}"
                )


def run(options: Options) -> Iterator[Row]:
    about = {"suite": "kernels", "rule": options.rule, "heads": options.heads, "kv_heads": options.kv_heads}
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        for row in rows_of(case, options):
            yield {**about, "head_dim": options.head_dim, "tokens": case.tokens, "mask": mask, **row}


def rows_of(case: Case, options: Options) -> Iterator[Row]:
    """A row a contestant and mode: the median over the rounds, its figure, and its peak memory."""
    contestants = {name: calls for name in options.impls or () if (calls := entered(name, case, options))}
    for mode in FLOPS if options.backward else ["forward"]:
        calls = {name: each[mode] for name, each in contestants.items()}
        times = timing.in_turns(calls, options.rounds, options.device)
        for name, measured in times.items():
            ms = statistics.median(measured)
            row: Row = {"impl": name, "mode": mode, "ms": ms, "peak_gib": peak_gib(calls[name], options.device)}
            if options.rule == "softmax":
                row["tflops"] = FLOPS[mode] * case.pairs * options.heads * options.head_dim / ms / 1e9
            else:
                row["tokens_per_us"] = case.tokens / ms / 1e3
            for other in times if name not in PEERS else ():
                if other != name:
                    row[f"over_{other}"] = statistics.median(x / y for x, y in zip(times[other], measured, strict=True))
            yield row


def entered(name: str, case: Case, options: Options) -> Passes | None:
    """The passes of a contestant; if it refuses, or a peer's own code fails, the reason is printed instead."""
    try:
        calls = PEERS[name](case, options) if name in PEERS else ours(name, case, options)
        calls["forward+backward" if options.backward else "forward"]()
        return calls
    except NotImplementedError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except Exception as error:
        if name not in PEERS:
            raise
        print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return None


def peak_gib(call: Any, device: str) -> float | None:
    """What a call allocates at its peak, beyond its inputs."""
    if device != "cuda":
        return None
    timing.finish()
    memory = timing.memory_from_now("cuda")
    call()
    timing.finish()
    return memory.grown() / 2**30


def ours(kernel: str, case: Case, options: Options) -> Passes:
    """`ra.attention` or `ra.linear_attention` by this kernel."""
    if options.rule != "softmax":
        return timing.linear_passes(options, ra.plan(seq_len=case.tokens), kernel, docs=case.asked.get("docs"))
    sizes: dict[str, Any] = {"heads": (options.heads, options.kv_heads), "head_dim": options.head_dim}
    plan = ra.plan(seq_len=case.tokens, kernel=kernel, **sizes, **case.asked)
    return timing.attention_passes(options, plan, **case.asked)


def flex(case: Case, options: Options) -> Passes:
    """FlexAttention under torch.compile, with the intervals of the case as its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bands = families(case.asked["spec"], case.tokens, docs=case.asked.get("docs"))
    if options.device != "cuda" or len(bands) > 1:
        raise NotImplementedError("FlexAttention is compared on GPUs only, by masks of one interval a query")
    begin, end = (torch.from_numpy(x[0]).cuda() for x in bounds_at(bands[0], np.arange(case.tokens)))

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (begin[i] <= j) & (j < end[i])

    mask = create_block_mask(seen, None, None, case.tokens, case.tokens, device="cuda")
    *leaves, dout = (x.detach().transpose(1, 2).contiguous() for x in timing.draws(options, case.tokens, "qkvo"))
    q, k, v = (x.requires_grad_() for x in leaves)
    attend = torch.compile(flex_attention, dynamic=False)
    return timing.passes(lambda: attend(q, k, v, block_mask=mask, enable_gqa=True), (q, k, v), dout)


def fa4(case: Case, options: Options) -> Passes:
    """FlashAttention-4, with its own window and its own packed documents."""
    spec, docs = case.asked["spec"], case.asked.get("docs")
    if spec.chunk or spec.first or not (docs is None or docs.plain):
        raise NotImplementedError("FlashAttention-4 alone has causal and full masks, windows and packed documents")
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout = timing.draws(options, case.tokens, "qkvo")
    how: dict[str, Any] = {"softmax_scale": options.head_dim**-0.5, "causal": spec.causal and spec.window is None}
    if docs is not None:  # tokens in one row, [tokens, H, D]
        q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
        starts = torch.from_numpy(docs.starts[0].astype(np.int32)).to(q.device)
        longest = int(np.diff(docs.starts[0]).max())
        how |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    if spec.window is not None:
        how |= {"window_size_left": spec.window - 1, "window_size_right": 0}

    def forward() -> Any:
        return _flash_attn_fwd(q, k, v, return_lse=True, **how)

    def both() -> Any:
        out, lse = forward()[:2]
        return _flash_attn_bwd(q, k, v, out, dout, lse, **how)

    return {"forward": forward, "forward+backward": both}


def fla(case: Case, options: Options) -> Passes:
    """flash-linear-attention as its users call it."""
    if "docs" in case.asked:
        raise NotImplementedError("compared without documents")
    if options.rule == "gated":
        from fla.ops.gla import chunk_gla as attend
    elif options.rule == "delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as attend
    else:
        from fla.ops.kda import chunk_kda as attend
    (q, k, v, g, beta), dout = timing.linear_draws(options, case.tokens)
    how = {"scale": options.head_dim**-0.5, **({} if beta is None else {"beta": beta})}
    return timing.passes(lambda: attend(q, k, v, g, **how)[0], (q, k, v, g, beta), dout)


PEERS: dict[str, Any] = {"flex": flex, "fa4": fa4, "fla": fla}  # whose errors are no bugs here
