"""Who runs in `ringattn bench kernels`: our own tables of kernels, and the peers as their users call them.

A contestant turns inputs into its passes. What it cannot run it refuses with a NotImplementedError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ringattn as ra
from ringattn import kernels
from ringattn.kernels.attention.libraries.rectangles import heads_first
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.kernels.linear import TABLE, of_rule
from ringattn.kernels.linear.maps import Inputs as LinearInputs
from ringattn.launch.bench.masks import Case
from ringattn.launch.bench.timing import draws, linear_draws
from ringattn.masks.bands import bounds_at, families
from ringattn.torch.attention.steps import problem_of

Passes = dict[str, Callable[[], Any]]  # forward, backward
OURS = ("auto", "triton", "decode", "tiled", "chunkwise")  # whose errors are no news but bugs


@dataclass(frozen=True)
class Inputs:
    """One call with its gradient: leaves are [B, T, H, D], of linear attention q, k, v, gates and beta."""

    leaves: tuple[Any, ...]
    dout: Tensor
    case: Case
    where: Intervals | None = None  # the mask for kernels alone, if it is one family

    @property
    def scale(self) -> float:
        return float(self.leaves[0].shape[-1] ** -0.5)

    @property
    def spec(self) -> Any:
        return self.case.asked["spec"]

    @property
    def docs(self) -> Any:
        return self.case.asked.get("docs")

    def copies(self) -> list[Any]:
        """Leaves of their own, for which gradients are taken."""
        return [x if x is None else x.detach().clone().requires_grad_() for x in self.leaves]


def inputs(case: Case, options: Any) -> Inputs:
    """Random tensors of the case, its intervals on host and device, and its rectangles."""
    torch.manual_seed(0)
    *leaves, dout = draws(options, case.tokens, "qkvo")
    bands, where = families(case.asked["spec"], case.tokens, docs=case.asked.get("docs")), None
    if len(bands) == 1:
        begin, end = (x.astype(np.int32) for x in bounds_at(bands[0], np.arange(case.tokens)))
        device = [torch.from_numpy(x).to(options.device) for x in (begin, end)]
        where = Intervals(device[0], device[1], rectangles_of(begin, end), (begin, end), made={})
    return Inputs(tuple(leaves), dout, case, where)


def linear_inputs(case: Case, options: Any) -> Inputs:
    torch.manual_seed(0)
    leaves, dout = linear_draws(options, case.tokens)
    return Inputs(tuple(x if x is None else x.detach() for x in leaves), dout, case)


def check(name: str, given: Inputs, own_masks: bool = False) -> None:
    """A NotImplementedError where a kernel refuses; with `own_masks` not for a mask that is no rectangles for us."""
    if given.where is None:
        raise NotImplementedError("this mask takes several calls of a kernel")
    q, k, v = given.leaves
    reason = kernels.BY_NAME[name].refuses(problem_of(q, k, v, None, given.where.rectangles is not None))
    if reason is not None and not (own_masks and "rectangles" in reason):
        raise NotImplementedError(reason)


def of_table(name: str) -> Callable[[Inputs], Passes]:
    """A kernel of our own table, called as a ring step calls it, results in the dtype of q."""

    def passes(given: Inputs) -> Passes:
        check(name, given)
        kernel, tensors, dtype = kernels.BY_NAME[name].load(), (*given.leaves, given.where), given.dout.dtype

        def forward() -> Any:
            return kernel.attend(*tensors, scale=given.scale, out_dtype=dtype)

        partial = forward()

        def backward() -> Any:
            return kernel.attend_backward(*tensors, given.dout, partial.lse, None, out=partial.out, scale=given.scale)

        return {"forward": forward, "backward": backward}

    return passes


def differentiated(forward: Callable[[], Tensor], leaves: Sequence[Any], dout: Tensor) -> Passes:
    """Forward, and backward by autograd."""
    out, given = forward(), [x for x in leaves if x is not None]
    return {
        "forward": torch.no_grad()(forward),
        "backward": lambda: torch.autograd.grad(out, given, dout, retain_graph=True),
    }


def auto(given: Inputs) -> Passes:
    """`ra.attention` as its users call it."""
    q, k, v = leaves = given.copies()
    sizes = {"heads": (q.shape[2], k.shape[2]), "head_dim": q.shape[3]}
    plan = ra.plan(seq_len=q.shape[1], **sizes, **given.case.asked)
    return differentiated(lambda: ra.attention(q, k, v, plan, **given.case.asked), leaves, given.dout)


@lru_cache(maxsize=1)
def compiled_flex() -> Callable[..., Any]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # or a backward cannot be timed twice
    return torch.compile(flex_attention, dynamic=False)


def flex(given: Inputs) -> Passes:
    """FlexAttention under torch.compile, with the intervals of the case as its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    if not given.dout.is_cuda or given.where is None:
        raise NotImplementedError("FlexAttention is compared on GPUs only, by masks of one interval a query")
    q, k, v = (heads_first(x).detach().contiguous().requires_grad_() for x in given.leaves)
    begin, end = given.where.begin[0], given.where.end[0]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (begin[i] <= j) & (j < end[i])

    mask = create_block_mask(seen, None, None, q.shape[2], k.shape[2], device=q.device)
    attention, dout = compiled_flex(), heads_first(given.dout).contiguous()
    how = {"block_mask": mask, "scale": given.scale, "enable_gqa": True}
    return differentiated(lambda: attention(q, k, v, **how), (q, k, v), dout)


def cudnn(given: Inputs) -> Passes:
    """cuDNN as it is where one call does the mask, and one for each rectangle where it does not."""
    if not given.case.plain:
        return of_table("cudnn")(given)
    check("cudnn", given)
    from ringattn.kernels.attention.libraries import cudnn as vendor

    (q, k, v), options = given.leaves, (given.spec.causal, given.scale)
    out, lse = vendor.forward(q, k, v, *options)
    return {
        "forward": lambda: vendor.forward(q, k, v, *options),
        "backward": lambda: vendor.backward(given.dout, q, k, v, out, lse, *options),
    }


def fa4(given: Inputs) -> Passes:
    """FlashAttention-4, with its own window and its own packed documents."""
    check("fa4", given, own_masks=True)
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout = tensors = (*given.leaves, given.dout)
    window = given.spec.window
    options: dict[str, Any] = {"softmax_scale": given.scale, "causal": given.spec.causal and window is None}
    if given.docs is not None:  # tokens in one row, [tokens, H, D]
        q, k, v, dout = (x.flatten(0, 1) for x in tensors)
        starts = torch.from_numpy(given.docs.starts[0].astype(np.int32)).to(q.device)
        longest = int(np.diff(given.docs.starts[0]).max())
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    if window is not None:
        options |= {"window_size_left": window - 1, "window_size_right": 0}

    def forward() -> Any:
        return _flash_attn_fwd(q, k, v, return_lse=True, **options)

    out, lse = forward()[:2]
    return {"forward": forward, "backward": lambda: _flash_attn_bwd(q, k, v, out, dout, lse, **options)}


def linear_of_table(name: str) -> Callable[[Inputs], Passes]:
    """Forward, and backward from what the forward saved, as one device runs the four functions of a kernel."""

    def passes(given: Inputs) -> Passes:
        if given.docs is not None:
            raise NotImplementedError("the kernels alone are timed without documents")
        q, k, v, g, beta = given.leaves
        x, dout = LinearInputs(q, k, v, g, beta, None, given.scale), given.dout
        table = next(kernel for kernel in TABLE if kernel.name == name)
        kernel: Any = of_rule(table.load(), x.beta is not None)
        scan = kernel.scan_states(x, maps=False)

        def backward() -> Any:
            return kernel.gradients(x, scan, None, kernel.scan_gradients(x, dout, maps=False), dout, None)

        return {"forward": lambda: kernel.read_out(x, kernel.scan_states(x, maps=False), None), "backward": backward}

    return passes


def linear_auto(given: Inputs) -> Passes:
    """`ra.linear_attention` as its users call it, differentiated by autograd."""
    q, k, v, g, beta = leaves = given.copies()
    how = {"beta": beta, "scale": given.scale, "docs": given.docs, "check": False}
    return differentiated(lambda: ra.linear_attention(q, k, v, g, **how), leaves, given.dout)


def fla(given: Inputs) -> Passes:
    """flash-linear-attention as its users call it, differentiated by autograd."""
    q, k, v, g, beta = leaves = given.copies()
    if given.docs is not None:
        raise NotImplementedError("compared without documents")
    if beta is None:
        from fla.ops.gla import chunk_gla as attend
    elif g.dim() < 4:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as attend
    else:
        from fla.ops.kda import chunk_kda as attend
    more = {} if beta is None else {"beta": beta}
    return differentiated(lambda: attend(q, k, v, g, scale=given.scale, **more)[0], leaves, given.dout)


ATTENTION: dict[str, Callable[[Inputs], Passes]] = {
    "auto": auto,
    **{name: of_table(name) for name in ("triton", "sdpa_cpu", "tiled", "flash")},
    "cudnn_rectangles": of_table("cudnn"),  # as a ring step runs it: partials merged, gradients added up in float32
    "cudnn": cudnn,
    "flex": flex,
    "fa4": fa4,
}
LINEAR: dict[str, Callable[[Inputs], Passes]] = {
    "auto": linear_auto,
    "triton": linear_of_table("triton"),
    "chunkwise": linear_of_table("chunkwise"),
    "fla": fla,
}
