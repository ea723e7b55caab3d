"""FlashAttention-4's calls without it: its modules with dense functions, so that what calls them runs anywhere."""

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEVER = float("-inf")


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, return_lse: bool, softcap: float | None = None,
    mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None, out: Tensor | None = None,
    lse: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    packed = "cu_seqlens_q" in options
    if out is None or lse is None:
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        lse = torch.zeros((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]))
    for rows, keys, mask in problems(q, k, aux_tensors, options):
        s = scores(q[rows], k[keys], mask, softmax_scale, softcap)
        p = torch.nan_to_num(s.softmax(-1))
        out[rows] = torch.einsum("hts,shd->thd", p, repeated(v[keys], q)).to(q.dtype)
        place(lse, rows, packed).copy_(s.logsumexp(-1))
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float,
    softcap: float = 0.0, mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: Any = None,
    dlse: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    packed = "cu_seqlens_q" in options
    # Sequences must cover all rows, unless memory for results is given; as there, no row in two.
    dq, dk, dv = (torch.full_like(x, torch.nan) if y is None else y for x, y in ((q, dq), (k, dk), (v, dv)))
    if packed:
        for each in zip(*[p[:2] for p in problems(q, k, aux_tensors, options)], strict=True):
            assert all(a.stop <= b.start for a, b in pairwise(each)), "a sequence lies behind those before it"
    for rows, keys, mask in problems(q, k, aux_tensors, options):
        s = scores(q[rows], k[keys], mask, softmax_scale, softcap)
        p = torch.nan_to_num((s - place(lse, rows, packed)[..., None]).exp())
        delta = (out[rows].double() * dout[rows].double()).sum(-1).T
        if dlse is not None:
            delta = delta - place(dlse, rows, packed)
        ds = p * (torch.einsum("thd,shd->hts", dout[rows].double(), repeated(v[keys], q)) - delta[..., None])
        if softcap:
            ds = ds * (1 - torch.nan_to_num(s / softcap, neginf=0) ** 2)
        heads = k.shape[-2], -1
        dq[rows] = softmax_scale * torch.einsum("hts,shd->thd", ds, repeated(k[keys], q)).to(q.dtype)
        dk[keys] = softmax_scale * torch.einsum("hts,thd->shd", ds, q[rows].double()).unflatten(1, heads).sum(2).to(
            q.dtype
        )
        dv[keys] = torch.einsum("hts,thd->shd", p, dout[rows].double()).unflatten(1, heads).sum(2).to(q.dtype)
    return dq, dk, dv


def problems(q: Tensor, k: Tensor, bounds: Any, options: dict[str, Any]) -> Iterator[tuple[Any, Any, Tensor]]:
    """The queries, the keys and the mask of each batch row, or of each sequence."""
    sequences = []
    for x in "qk":
        starts = options[f"cu_seqlens_{x}"].tolist() if f"cu_seqlens_{x}" in options else []
        lengths = (
            options[f"seqused_{x}"].tolist() if f"seqused_{x}" in options else [b - a for a, b in pairwise(starts)]
        )
        at = [slice(a, a + n) for a, n in zip(starts, lengths, strict=False)]
        sequences.append(at or range(len(q)))
    for row, keys in zip(*sequences, strict=True):
        T, S = q[row].shape[0], k[keys].shape[0]
        s, last = torch.arange(S)[None], torch.arange(T)[:, None] + S - T
        seen = s >= 0
        if bounds is not None:
            seen = (bounds[0][row, :T, None] <= s) & (s < bounds[1][row, :T, None])
        if options.get("causal") or "window_size_right" in options:
            seen = seen & (s <= last)
        if "window_size_left" in options:
            seen = seen & (s >= last - options["window_size_left"])
        yield row, keys, seen


def scores(q: Tensor, k: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    s = torch.einsum("thd,shd->hts", q.double(), repeated(k, q)) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    return s.masked_fill(~mask, NEVER)


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.double().repeat_interleave(q.shape[-2] // x.shape[-2], 1)


def place(lse: Tensor, rows: Any, packed: bool) -> Tensor:
    return lse[:, rows] if packed else lse[rows]


def modules() -> dict[str, ModuleType]:
    names = "cutlass", "cutlass.cute", "flash_attn", "flash_attn.cute", "flash_attn.cute.utils"
    made = {name: ModuleType(name) for name in (*names, "flash_attn.cute.block_sparsity", "flash_attn.cute.interface")}
    made["cutlass"].cute = made["cutlass.cute"]  # type: ignore[attr-defined]
    made["flash_attn.cute"].utils = made["flash_attn.cute.utils"]  # type: ignore[attr-defined]
    made["cutlass.cute"].jit = lambda function: function  # type: ignore[attr-defined]
    made["cutlass.cute"].TensorSSA = Any  # type: ignore[attr-defined]
    made["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = BlockSparseTensorsTorch  # type: ignore[attr-defined]
    interface: Any = made["flash_attn.cute.interface"]
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    return made
