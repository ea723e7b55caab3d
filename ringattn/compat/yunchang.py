"""The modules of yunchang, by their names and signatures: `from ringattn.compat.yunchang import ...`.

`set_seq_parallel_pg` arranges the ranks, Ulysses ranks next to each other or (`use_ulysses_low=False`) ring ranks.
Either way ring rank r has the tokens that `ring_impl_type` names, cut contiguously among its Ulysses ranks:

    basic    block r of the sequence
    zigzag   blocks r and 2 * ring - 1 - r of 2 * ring
    strip    every ring-th token, from r on

`EXTRACT_FUNC_DICT[ring_impl_type]` cuts a whole sequence so. Windows, `softcap` and fewer key heads than Ulysses ranks
are exact. The kernel is chosen for the device: `attn_type`, `use_sync`, `use_pack_qkv`, `deterministic` and
`return_attn_probs` change nothing, and the modules return out alone. The functions of a ring are in
`ringattn.compat.ring_flash_attn`.
"""

from collections.abc import Callable
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn.comms.mesh import init_mesh, split
from ringattn.compat.ring_flash_attn import Options, of_batch
from ringattn.layouts.layout import Layout, positions_of

LAYOUTS = {"basic": "contiguous", "zigzag": "zigzag", "strip": "striped"}


class AttnType(Enum):
    """Kinds of exact kernels. Which one runs is chosen for the device."""

    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH = "torch"

    @classmethod
    def from_string(cls, s: str) -> "AttnType":
        return cls(s)


# how set_seq_parallel_pg arranged the ranks
PROCESS_GROUP = SimpleNamespace(mesh=None, ulysses_low=True, RING_PG=None, ULYSSES_PG=None)


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Spread sequences over ring x Ulysses ranks that follow each other; all ranks call it, for modules made later."""
    ranks = sp_ulysses_degree * sp_ring_degree
    if ranks < 1 or world_size % ranks:
        raise ValueError(
            f"sp_ulysses_degree={sp_ulysses_degree} x sp_ring_degree={sp_ring_degree} ranks share a sequence; their "
            f"number must divide world_size={world_size}"
        )
    if dist.is_initialized() and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank={rank}, world_size={world_size}: this is rank {dist.get_rank()} of {dist.get_world_size()} that "
            "were started; pass those of torch.distributed"
        )
    sizes = {"ring": sp_ring_degree, "ulysses": sp_ulysses_degree}
    order = sizes if use_ulysses_low else dict(reversed(sizes.items()))
    PROCESS_GROUP.mesh = mesh = split(init_mesh(data=world_size // ranks, sequence=ranks), "sequence", order)
    PROCESS_GROUP.ulysses_low = use_ulysses_low
    PROCESS_GROUP.RING_PG, PROCESS_GROUP.ULYSSES_PG = mesh.get_group("ring"), mesh.get_group("ulysses")


class UlyssesAttention(nn.Module):
    """Attention over the ranks of a process group that exchange heads for tokens; rank r has block r."""

    def __init__(
        self, sequence_process_group: Any = None, scatter_idx: int = 2, gather_idx: int = 1, use_sync: bool = False,
        attn_type: Any = AttnType.FA,
    ):  # fmt: skip
        super().__init__()
        AttnType(attn_type)
        if (scatter_idx, gather_idx) != (2, 1):
            raise ValueError("leave out scatter_idx and gather_idx: tensors are [batch, tokens, heads, head dim]")
        self.group, self.attention = sequence_process_group, of_batch("contiguous", axis="ulysses")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, *args: Any,
    ) -> Tensor:  # fmt: skip
        """Out [B, t, H, D] of this rank's tokens, from theirs."""
        given = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, group=self.group, softcap=softcap)
        return self.attention(query, key, value, given)


class LongContextAttention(UlyssesAttention):
    """Attention over a ring of groups of Ulysses ranks: those of `set_seq_parallel_pg`, or of a mesh."""

    def __init__(
        self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic", use_pack_qkv: bool = False,
        use_sync: bool = False, attn_type: Any = AttnType.FA, attn_processor: Any = None, *, mesh: Any = None,
    ):  # fmt: skip
        mesh = PROCESS_GROUP.mesh if mesh is None else mesh
        if mesh is None:
            raise ValueError("call set_seq_parallel_pg before LongContextAttention, or give it mesh=")
        if attn_processor is not None:
            raise ValueError("attn_processor: attention is exact here, neither sparse nor quantized; leave it out")
        super().__init__(mesh, scatter_idx, gather_idx, use_sync, attn_type)
        self.attention = of_batch(layout_of(ring_impl_type))


AsyncLongContextAttention = LongContextAttention  # a plan overlaps what Ulysses ranks exchange by itself


def layout_of(ring_impl_type: str) -> str:
    if ring_impl_type not in LAYOUTS:
        raise ValueError(f"ring_impl_type={ring_impl_type!r}: use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[ring_impl_type]


def extract_local(
    name: str, value: Tensor, rank: int, world_size: int, rd: int | None = None, ud: int | None = None, dim: int = 1,
    **others: Any,
) -> Tensor:  # fmt: skip
    """One rank's tokens of a whole sequence, differentiable; ring size `rd` and Ulysses size `ud`."""
    rd = world_size // (ud or 1) if rd is None else rd
    ud = world_size // rd if ud is None else ud
    layout = Layout(layout_of(name), value.shape[dim], rd, ud)
    if layout.padded_length != layout.length:
        raise ValueError(f"{layout.length} tokens over ring={rd} x ulysses={ud}: pad them to {layout.padded_length}")
    place = rank % (rd * ud)
    r, u = divmod(place, ud) if PROCESS_GROUP.ulysses_low else (place % rd, place // rd)
    return value.index_select(dim, torch.from_numpy(positions_of(layout.held(r, u))).to(value.device))


EXTRACT_FUNC_DICT: dict[str, Callable[..., Tensor]] = {name: partial(extract_local, name) for name in LAYOUTS}
basic_extract_local, zigzag_extract_local, stripe_extract_local = EXTRACT_FUNC_DICT.values()
