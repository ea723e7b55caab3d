"""One GPU: attention by our kernels, beside FlashAttention-4 as its users call it, in turns.

`auto` and the names of our kernels are `ra.attention(kernel=NAME)`; `fa4` is the library alone. Calls alternate, so all
have the same clock; `over_NAME` is the median of NAME's time over ours. Useful work is what the mask lets through:
4 D H flops of a pair forward, 2.5 times that backward. Of short calls the host takes all of the time. A decode is timed
by `bench inference ranks=1`, linear attention by `bench ring ranks=1 rule=gated`.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

import ringattn as ra
from ringattn import kernels
from ringattn.launch.bench import Row, timing
from ringattn.launch.bench.masks import WORDS, Case, case_of
from ringattn.launch.bench.timing import FLOPS, Heads, Passes
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "impl", "mode", "ms", "tflops"]
DEFAULT = {"cuda": ["auto", "triton", "cudnn", "fa4"], "cpu": ["auto", "sdpa_cpu", "tiled"]}
NAMES = ("auto", *(kernel.name for kernel in kernels.TABLE))


@dataclass
class Options(Heads):
    tokens: list[int] = option([8192, 32768], "lengths")
    mask: list[str] = option(["causal"], WORDS)
    impls: list[str] | None = option(None, "which contestants", among=NAMES)


def run(options: Options) -> Iterator[Row]:
    """A row a mask, length, contestant and mode: the median over the rounds, and its figure."""
    about = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim")}
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        names = options.impls or DEFAULT[options.device]
        contestants = {name: calls for name in names if (calls := entered(name, case, options))}
        for mode in FLOPS:
            calls = {name: each[mode] for name, each in contestants.items()}
            times = timing.in_turns(calls, options.repeats, options.device)
            for name, measured in times.items():
                ms = statistics.median(measured)
                row: Row = {**about, "tokens": tokens, "mask": mask, "impl": name, "mode": mode, "ms": ms}
                row["tflops"] = FLOPS[mode] * case.pairs * options.heads * options.head_dim / ms / 1e9
                for other in [x for x in times if x != name != "fa4"]:
                    row[f"over_{other}"] = statistics.median(x / y for x, y in zip(times[other], measured, strict=True))
                yield row


def entered(name: str, case: Case, options: Options) -> Passes | None:
    """The passes of a contestant; if it refuses, or FlashAttention-4 itself fails, the reason is printed instead."""
    try:
        if name == "fa4":
            calls = fa4(case, options)
        else:
            plan = ra.plan(seq_len=case.tokens, kernel=name, **options.sizes, **case.asked)
            calls = timing.passes_of(options, plan, case.asked)
        calls["forward+backward"]()
        return calls
    except Exception as error:
        if name != "fa4" and not isinstance(error, NotImplementedError):
            raise
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return None


def fa4(case: Case, options: Options) -> Passes:
    """FlashAttention-4, with its own window and its own packed documents."""
    spec, docs = case.asked["spec"], case.asked.get("docs")
    if spec.chunk or spec.first:
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
