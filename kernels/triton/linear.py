"""Gated linear attention in Triton: the four functions of `ringattn.kernels.linear`, for any strides and lengths.

The sequence is walked in segments, about as many as a GPU can walk at a time, however long it is. The states before all
chunks exist only while `read_out` or `gradients` runs, unless they are kept from one to the other; the scores within
chunks in any case.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ringattn.kernels import Problem
from ringattn.kernels.linear import Later, Room, Scan, State, now
from ringattn.kernels.protocol import LinearKernel
from ringattn.kernels.triton import cannot_run
from ringattn.kernels.triton.blocks import launch
from ringattn.kernels.triton.launch import cdiv, power_of_2
from ringattn.kernels.triton.linear_products import apply_kernel, gradients_kernel, scores_kernel
from ringattn.kernels.triton.linear_states import CHANNEL, HEAD, NONE, join_kernel, states_kernel
from ringattn.kernels.triton.table import architecture

WIDEST_KEY, WIDEST_VALUE = 256, 512
PART = 4  # tokens; pairs within as many are multiplied out where decays are strong
PROGRAMS = 1024  # the walks that a GPU is given at a time


class Cut(NamedTuple):
    """How one kernel is cut: key channels and value channels a tile (at most), warps and pipeline stages."""

    keys: int
    values: int
    warps: int
    stages: int


class Cuts(NamedTuple):
    """One entry of the table: tokens a chunk, and the kernels; gradients and scores once more for strong decays."""

    chunk: int
    states: Cut
    scores: Cut
    apply: Cut
    gradients: Cut
    strong: Cut
    strong_scores: Cut

    @classmethod
    def alike(cls, chunk: int, cut: Cut) -> "Cuts":
        return cls(chunk, *[cut] * 6)


FAST = Cuts(
    64, Cut(64, 128, 4, 2), Cut(64, 64, 4, 1), Cut(32, 128, 4, 2), Cut(32, 64, 4, 1), Cut(32, 64, 4, 1),
    Cut(64, 64, 4, 1),
)  # fmt: skip
JOIN = Cut(16, 64, 2, 3)
SMALL = Cuts.alike(32, Cut(32, 32, 4, 1))
SINGLE = SMALL._replace(gradients=Cut(16, 32, 4, 1), strong=Cut(16, 16, 4, 1), strong_scores=Cut(16, 16, 4, 1))

# By architecture and bits of a number, as in table.py; "/wide" for heads of more than 128 channels, where they want
# another cut. sm90/16 was measured on an H200, where strong gradients and wide heads are faster with a few spills than
# cut so small that they have none; the others are only compiled, without spills.
TABLE = {
    "sm90/16": FAST,
    "sm90/16/wide": FAST._replace(gradients=Cut(64, 64, 4, 1)),
    "sm90/32": SINGLE._replace(gradients=Cut(16, 16, 4, 1)),
    "sm80/16": SMALL._replace(states=Cut(64, 64, 4, 1), strong=Cut(16, 32, 4, 1)),
    "sm80/32": SINGLE,
    "sm100/16": SINGLE._replace(states=Cut(16, 32, 4, 1)),
    "sm100/32": SINGLE._replace(states=Cut(32, 16, 4, 1), apply=Cut(16, 32, 4, 1)),
    "gfx942/16": SMALL,
    "gfx942/32": SINGLE,
    "cpu/16": Cuts.alike(32, Cut(64, 64, 4, 1)),
    "cpu/32": Cuts.alike(32, Cut(64, 64, 4, 1)),
}


def entry(key: str, width: int) -> Cuts:
    """The table's, for heads of this many channels."""
    return TABLE.get(f"{key}/wide", TABLE[key]) if width > 128 else TABLE[key]


class Segments(NamedTuple):
    """What a scan saves, float32: the state before each segment (of gradients: behind it) if it is zero before all.

    And what the gates leave of the state before them all, base 2, and the strongest decay of a channel in each chunk.
    """

    before: Tensor  # [B, S, H, K, V]
    passed: Tensor  # [B, S, H, G]
    strongest: Tensor  # [B, N, H, tiles of channels]; of a channel's own gates only


def scan_states(k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None) -> Scan:
    """What the tokens leave behind, from a state of zero."""
    return Call(k, v, g, begin).scan(k, v, 1.0, reverse=False)


def scan_gradients(q: Tensor, dout: Tensor, g: Tensor | None, begin: Tensor | None, scale: float) -> Scan:
    """The gradient for the state before the first token, if that for the state behind the last one is zero."""
    return Call(q, dout, g, begin).scan(q, dout, scale, reverse=True)


def room(k: Tensor, v: Tensor) -> Room:
    """For the states before all chunks, [B, N, H, K, V]."""
    return Call(k, v, None, None).room()


def read_out(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, scan: Scan, start_kv: Later,
    scale: float, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out [B, T, H, V] in q's dtype: in each chunk the products within, and q against the state before it."""
    call = Call(k, v, g, begin)
    a = call.scores(q, k, scan.saved.strongest, scale)  # while the state before the first token may be on its way
    states = call.states(k, v, scan.saved, now(start_kv), 1.0, reverse=False, kept=kept)
    return call.apply(q, v, a, states, scale, reverse=False)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, scan: Scan | Tensor, start_kv: Later,
    rscan: Scan, dout: Tensor, dend_kv: Later, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dg) in the dtypes and shapes of their inputs; `dend_kv`: of the state behind the last token."""
    call, strongest = Call(k, v, g, begin), rscan.saved.strongest
    states = scan if isinstance(scan, Tensor) else call.states(k, v, scan.saved, now(start_kv), 1.0, reverse=False)
    a = call.scores(q, k, strongest, scale)  # while the gradient of the end state may be on its way
    dstates = call.states(q, dout, rscan.saved, now(dend_kv), scale, reverse=True)
    dv = call.apply(k, dout, a, dstates, 1.0, reverse=True)
    dq, dk, dg = call.gradients(q, k, v, dout, states, dstates, strongest, scale)
    return dq, dk, dv, dg


class Call:
    """One call's shape, gates and documents: what all of its launches have in common."""

    def __init__(self, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None) -> None:
        (self.B, self.T, self.H, self.K), self.V = k.shape, v.shape[-1]
        self.device, self.dtype, self.g = k.device, k.dtype, g
        self.gate = NONE if g is None else CHANNEL if g.dim() == 4 else HEAD
        arch = architecture(k.device)
        self.cuts = entry(f"{arch}/{8 * k.element_size()}", max(self.K, self.V))
        self.N = cdiv(self.T, self.cuts.chunk)
        self.chunks = self.B * self.N * self.H
        self.begin = None if begin is None else begin.to(torch.int32).contiguous()
        # A state, and scores, can pass float16's range.
        self.inner = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.exact = self.dtype == torch.float32
        self.precision = "ieee" if arch in ("cpu", "gfx942") else "tf32x3" if self.exact else "tf32"

    def tile(self, cut: Cut) -> tuple[int, int]:
        """(keys, values) a tile: the cut's, or the powers of two that hold them all; a product needs at least 16."""
        held_k, held_v = (max(16, power_of_2(x)) for x in (self.K, self.V))
        return min(cut.keys, held_k), min(cut.values, held_v)

    def tiles(self, cut: Cut) -> tuple[int, int]:
        """How many tiles hold the key channels and the value channels."""
        block_k, block_v = self.tile(cut)
        return cdiv(self.K, block_k), cdiv(self.V, block_v)

    def launch(
        self, kernel: Any, programs: int, cut: Cut, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...],
        *numbers: float, **flags: Any,
    ) -> None:  # fmt: skip
        """All kernels take the inputs, gates and documents, contiguous tensors, strides of the former, and numbers."""
        g, begin, (block_k, block_v) = self.g, self.begin, self.tile(cut)
        g_st = (0,) * 4 if g is None else (*g.stride(), 0)[:4]
        begin_st = 0 if begin is None or begin.shape[0] == 1 else begin.stride(0)
        docs = inputs[0] if begin is None else begin
        tensors = (*inputs, inputs[0] if g is None else g, docs, *others)
        strides = (*[x.stride() for x in inputs], g_st, begin_st)
        launch(
            kernel, (programs,), tensors, (*strides, self.T, self.N, self.H, *numbers), cut,
            K=self.K, V=self.V, CHUNK=self.cuts.chunk, BLOCK_K=block_k, BLOCK_V=block_v, GATE=self.gate.value,
            DOCS=begin is not None, EXACT=self.exact, PRECISION=self.precision,
            DTYPE=tl.bfloat16 if self.inner == torch.bfloat16 else tl.float32, **flags,
        )  # fmt: skip

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=self.device)

    def scan(self, x: Tensor, y: Tensor, scale: float, reverse: bool) -> Scan:
        """All segments walked at the same time from a state of zero, and joined."""
        (tiles_k, tiles_v), G = self.tiles(self.cuts.states), self.K if self.gate == CHANNEL else 1
        S = max(1, min(self.N, cdiv(PROGRAMS, self.B * self.H * tiles_k * tiles_v)))
        ends, before = (self.empty(self.B, S, self.H, self.K, self.V) for _ in range(2))
        decays, passed = (self.empty(self.B, S, self.H, G) for _ in range(2))
        strongest = self.empty(self.B, self.N, self.H, tiles_k)
        self.walk(x, y, (x, before, passed, x, ends, decays, strongest), S, scale, reverse)
        whole = State(self.empty(self.B, self.H, G), self.empty(self.B, self.H, self.K, self.V))
        launch(
            join_kernel, (self.B * self.H, cdiv(self.K, JOIN.keys), cdiv(self.V, JOIN.values)),
            (ends, decays, before, passed, whole.kv, whole.log_decay), (S, self.H), JOIN,
            K=self.K, V=self.V, BLOCK_K=JOIN.keys, BLOCK_V=JOIN.values, GATE=self.gate.value, REVERSE=reverse,
        )  # fmt: skip
        return Scan(whole, Segments(before, passed, strongest))

    def room(self) -> Room:
        """The size and dtype of what `states` finds."""
        return (self.B, self.N, self.H, self.K, self.V), self.inner

    def states(
        self, x: Tensor, y: Tensor, saved: Segments, first: Tensor | None, scale: float, reverse: bool,
        kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The state before each chunk (in reverse: behind), [B, N, H, K, V], if `first` is the one before them all."""
        sizes, dtype = self.room()
        found = self.empty(*sizes, dtype=dtype) if kept is None else kept
        begins = x if first is None else first.float().contiguous()
        others = (begins, saved.before, saved.passed, found, saved.before, saved.passed, saved.strongest)
        self.walk(x, y, others, saved.before.shape[1], scale, reverse, STORE=True, FIRST=first is not None)
        return found

    def walk(
        self, x: Tensor, y: Tensor, others: tuple[Tensor, ...], S: int, scale: float, reverse: bool,
        STORE: bool = False, FIRST: bool = False,
    ) -> None:  # fmt: skip
        """Over the chunks of every segment; tensors that this walk has no use for stand in for themselves."""
        tiles_k, tiles_v = self.tiles(self.cuts.states)
        self.launch(
            states_kernel, self.B * S * self.H * tiles_k * tiles_v, self.cuts.states, (x, y), others,
            scale, cdiv(self.N, S), S, REVERSE=reverse, STORE=STORE, FIRST=FIRST,
        )  # fmt: skip

    def both(self, cut: Cut, strong: Cut) -> list[tuple[bool, Cut]]:
        """The launches of a kernel that passes over chunks: without strong decays and, where there can be, with."""
        return [(False, cut), (True, strong)][: 2 if self.gate == CHANNEL else 1]

    def scores(self, q: Tensor, k: Tensor, strongest: Tensor, scale: float) -> Tensor:
        """scale * (q_i . decay from j to i . k_j) for the pairs j <= i of each chunk, [B, N, H, C, C]."""
        a = self.empty(self.B, self.N, self.H, self.cuts.chunk, self.cuts.chunk, dtype=self.inner)
        for strong, cut in self.both(self.cuts.scores, self.cuts.strong_scores):
            self.launch(
                scores_kernel, self.chunks, cut, (q, k), (strongest, a), scale,
                TILES=strongest.shape[-1], PART=PART, STRONG=strong,
            )  # fmt: skip
        return a

    def apply(self, x: Tensor, y: Tensor, a: Tensor, states: Tensor, scale: float, reverse: bool) -> Tensor:
        """out from q and v, or in reverse dv from k and dout, in the dtype of y."""
        cut, out = self.cuts.apply, self.empty(*y.shape, dtype=y.dtype)
        programs = self.chunks * self.tiles(cut)[1]
        self.launch(apply_kernel, programs, cut, (x, y), (a, states, out), scale, REVERSE=reverse)
        return out

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, states: Tensor, dstates: Tensor, strongest: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """(dq, dk, dg)."""
        g, dq, dk = self.g, self.empty(*q.shape, dtype=q.dtype), self.empty(*k.shape, dtype=k.dtype)
        tiles = self.tiles(self.cuts.gradients)[0]
        dg = dq
        if g is not None and self.gate == CHANNEL:
            dg = self.empty(*q.shape, dtype=g.dtype)
        elif self.gate == HEAD:  # every tile of channels has its part
            dg = self.empty(*q.shape[:3], tiles)
        for strong, cut in self.both(self.cuts.gradients, self.cuts.strong):
            self.launch(
                gradients_kernel, self.chunks * self.tiles(cut)[0], cut, (q, k, v, dout),
                (strongest, states, dstates, dq, dk, dg), scale,
                TILES=strongest.shape[-1], PART=PART, STRONG=strong,
            )  # fmt: skip
        return dq, dk, None if g is None else dg if g.dim() == 4 else dg.sum(-1).to(g.dtype)


def refuses(problem: Problem) -> str | None:
    """Why these kernels cannot serve the problem, or None when they can."""
    if (reason := cannot_run(problem)) is not None:
        return reason
    if problem.head_dim > WIDEST_KEY or problem.value_dim > WIDEST_VALUE:
        dims = f"key dim {problem.head_dim}, value dim {problem.value_dim}"
        return f"{dims}: at most {WIDEST_KEY} and {WIDEST_VALUE}"
    return None


KERNEL = LinearKernel(scan_states, read_out, scan_gradients, gradients, room, refuses)
