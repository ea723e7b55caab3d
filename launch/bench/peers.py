"""Who runs in `ringattn bench kernels`: our own table of kernels, and the peers as their users call them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringattn as ra
from ringattn import kernels
from ringattn.kernels.attention.libraries.rectangles import heads_first
from ringattn.kernels.intervals import Intervals
from ringattn.launch.bench.contest import Passes, differentiated
from ringattn.torch.attention.steps import problem_of


@dataclass(frozen=True)
class Inputs:
    """One attention call with its gradient: tensors as [B, T, H, D], and the mask as intervals and as a name."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    where: Intervals
    mask: str  # causal, full, window, docs, square
    window: int | None = None
    starts: np.ndarray | None = None  # where documents start, and the total

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def check(name: str, given: Inputs, own_masks: bool = False) -> None:
    """A NotImplementedError where a kernel refuses; with `own_masks` not for a mask that is no rectangles for us."""
    reason = kernels.BY_NAME[name].refuses(
        problem_of(given.q, given.k, given.v, None, given.where.rectangles is not None)
    )
    if reason is not None and not (own_masks and "rectangles" in reason):
        raise NotImplementedError(reason)


def of_table(name: str) -> Callable[[Inputs], Passes]:
    """A kernel of our own table, called as a ring step calls it, results in the dtype of q."""

    def passes(given: Inputs) -> Passes:
        check(name, given)
        kernel, tensors = kernels.BY_NAME[name].load(), (given.q, given.k, given.v, given.where)

        def forward() -> Any:
            return kernel.attend(*tensors, scale=given.scale, out_dtype=given.q.dtype)

        partial = forward()

        def backward() -> Any:
            return kernel.attend_backward(*tensors, given.dout, partial.lse, None, out=partial.out, scale=given.scale)

        return {"forward": forward, "backward": backward}

    return passes


def auto(given: Inputs) -> Passes:
    """`ra.attention` as its users call it; of a ring's step the kernels that it takes. Prints which they are."""
    if given.q.shape[1] != given.k.shape[1]:
        raise NotImplementedError("a decode takes a cache: bench decode times it")
    q, k, v = leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    if given.mask == "square":
        problem = replace(problem_of(q, k, v, None, True), rows=q.shape[1] * q.shape[2])
        names = [kernels.select(problem, backward=x).name for x in (False, True)]
        print(f"auto: {', '.join(names)}")
        forward, backward = (of_table(name)(given) for name in names)
        return {"forward": forward["forward"], "backward": backward["backward"]}
    spec = ra.AttentionSpec(causal=given.mask != "full", window=given.window)
    docs = None if given.starts is None else ra.Docs.from_lengths(np.diff(given.starts).tolist())
    plan = ra.plan(seq_len=q.shape[1], heads=(q.shape[2], k.shape[2]), head_dim=q.shape[3], spec=spec, docs=docs)
    plan.calls.clear()  # of other cases
    passes = differentiated(lambda: ra.attention(q, k, v, plan, spec=spec, docs=docs), leaves, given.dout)
    (call,) = plan.calls.values()
    print(f"auto: {call.recipe.forward.kernel.name}, {call.recipe.backward.kernel.name}")
    return {**passes, "forward": torch.no_grad()(passes["forward"])}


@lru_cache(maxsize=1)
def compiled_flex() -> Callable[..., Any]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # or a backward cannot be timed twice
    return torch.compile(flex_attention, dynamic=False)


def flex(given: Inputs) -> Passes:
    """FlexAttention under torch.compile, with its own block mask, differentiated by autograd."""
    from torch.nn.attention.flex_attention import create_block_mask

    if not given.q.is_cuda:
        raise NotImplementedError("FlexAttention is compared on GPUs only")
    q, k, v = (heads_first(x).detach().contiguous().requires_grad_() for x in (given.q, given.k, given.v))
    T, S = q.shape[2], k.shape[2]
    window = given.window or T
    docs = None
    if given.starts is not None:
        docs = torch.from_numpy(np.searchsorted(given.starts, np.arange(T), side="right")).to(q.device)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def windowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    def packed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (docs[i] == docs[j])  # type: ignore[index]

    def square(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) | (2 * i >= T)

    rule = {"causal": causal, "window": windowed, "docs": packed, "square": square}.get(given.mask)
    mask = None if rule is None else create_block_mask(rule, None, None, T, S, device=q.device)
    attention, dout = compiled_flex(), heads_first(given.dout).contiguous()

    def forward() -> Any:
        return attention(q, k, v, block_mask=mask, scale=given.scale, enable_gqa=True)

    passes = differentiated(forward, (q, k, v), dout)
    return passes if T > 1 else {**passes, "forward": torch.no_grad()(forward)}


def cudnn(given: Inputs) -> Passes:
    """cuDNN as it is where one call does the mask, and one for each rectangle where it does not."""
    if given.mask not in ("causal", "full"):
        return of_table("cudnn")(given)
    check("cudnn", given)
    from ringattn.kernels.attention.libraries import cudnn as vendor

    tensors, options = (given.q, given.k, given.v), (given.mask == "causal", given.scale)
    out, lse = vendor.forward(*tensors, *options)
    return {
        "forward": lambda: vendor.forward(*tensors, *options),
        "backward": lambda: vendor.backward(given.dout, *tensors, out, lse, *options),
    }


def flash(given: Inputs) -> Passes:
    """FlashAttention-2 as built into torch, with its own window and its own packed documents."""
    check("flash", given, own_masks=True)
    if given.mask == "square":
        raise NotImplementedError("a ring's step takes two calls, which are timed for FlashAttention-4")
    q, k, v, dout = packed_docs(given)
    lengths, options = varlen(given), {"scale": given.scale, **window_words(given)}
    causal = given.mask != "full"

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, **options)

    out, lse, seed, unused, _ = forward()

    def backward() -> Any:
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, unused, **options
        )

    return {"forward": forward, "backward": backward}


def fa4(given: Inputs) -> Passes:
    """FlashAttention-4, with its own window and its own packed documents; of a ring's step its two calls."""
    check("fa4", given, own_masks=True)
    if given.mask == "square":
        return in_two_calls(fa4, given)
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout = packed_docs(given)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options: dict[str, Any] = {"softmax_scale": given.scale, "causal": given.mask in ("causal", "docs")}
    if given.starts is not None:
        options |= dict(zip(names, varlen(given), strict=True))
    options |= window_words(given)

    def forward() -> Any:
        return _flash_attn_fwd(q, k, v, return_lse=True, **options)

    out, lse = forward()[:2]
    return {"forward": forward, "backward": lambda: _flash_attn_bwd(q, k, v, out, dout, lse, **options)}


def in_two_calls(peer: Callable[[Inputs], Passes], given: Inputs) -> Passes:
    """The causal square, and the queries below it that see all keys; with the sums of gradients."""
    half = given.q.shape[1] // 2
    above = replace(given, mask="causal", **{n: getattr(given, n)[:, :half] for n in ("q", "k", "v", "dout")})
    calls = [peer(x) for x in (above, replace(given, mask="full", q=given.q[:, half:], dout=given.dout[:, half:]))]

    def backward() -> Any:
        (dq, dk, dv, *_), (dq_below, dk_all, dv_all, *_) = (call["backward"]() for call in calls)
        dk_all[:, :half] += dk
        dv_all[:, :half] += dv
        return dq, dq_below, dk_all, dv_all

    return {"forward": lambda: [call["forward"]() for call in calls], "backward": backward}


def packed_docs(given: Inputs) -> tuple[Tensor, ...]:
    """Packed documents as these libraries take them: tokens of the batch in one row, [tokens, H, D]."""
    tensors = (given.q, given.k, given.v, given.dout)
    return tensors if given.starts is None else tuple(x.flatten(0, 1) for x in tensors)


def varlen(given: Inputs) -> tuple[Any, ...]:
    if given.starts is None:
        return None, None, given.q.shape[1], given.k.shape[1]
    starts = torch.from_numpy(given.starts.astype(np.int32)).to(given.q.device)
    longest = int(np.diff(given.starts).max())
    return starts, starts, longest, longest


def window_words(given: Inputs) -> dict[str, int]:
    return {} if given.window is None else {"window_size_left": given.window - 1, "window_size_right": 0}


CONTESTANTS: dict[str, Callable[[Inputs], Passes]] = {
    "auto": auto,
    **{name: of_table(name) for name in ("triton", "decode", "sdpa_cpu", "tiled")},
    "cudnn_rectangles": of_table("cudnn"),  # as a ring step runs it: partials merged, gradients added up in float32
    "cudnn": cudnn,
    "flex": flex,
    "flash": flash,
    "fa4": fa4,
}
