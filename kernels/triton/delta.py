"""The delta rule in Triton: the four functions of `ringattn.kernels.linear`; without beta, those of linear.py serve.

The map of all tokens costs more than the states: its factor has K columns, beside the V columns of a state. So with
maps=False the scans compute nothing, and the later functions what they need. A long sequence is still cut into segments
if the heads alone do not fill a GPU.

The backward pass computes each chunk's products again, but the states before all chunks only if they are not kept.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ringattn.kernels.linear import Deferred, Gradients, Inputs, Map, Scan, ShapeAndDtype, of_keys, resolve
from ringattn.kernels.protocol import LinearKernel
from ringattn.kernels.triton import linear
from ringattn.kernels.triton.blocks import launch
from ringattn.kernels.triton.delta_products import gradients_kernel, prepare_kernel, solve_kernel, values_kernel
from ringattn.kernels.triton.delta_states import join_kernel, walk_kernel
from ringattn.kernels.triton.launch import cdiv, power_of_2
from ringattn.kernels.triton.linear import CHANNEL, PART, Cut

PROGRAMS = 264  # about how many programs of `walk_kernel` run at the same time
SHORTEST = 8  # chunks of a segment: to join more segments costs more than it saves


class Cuts(NamedTuple):
    """One entry of the table: tokens of a chunk, and each kernel's sizes; `strong` ones are of chunks with strong
    decays. `walk` and `join` hold all key channels; `join.keys` are the rows of a factor that are multiplied at once.
    """

    chunk: int
    solve: Cut
    channel_solve: Cut
    prepare: Cut
    walk: Cut
    join: Cut
    values: Cut
    apply: Cut
    gradients: Cut
    strong: Cut

    @classmethod
    def alike(cls, chunk: int, cut: Cut) -> "Cuts":
        return cls(chunk, *[cut] * 9)


FAST = Cuts(
    64, Cut(64, 64, 4, 1, 168), Cut(64, 64, 4, 1), Cut(64, 64, 4, 2), Cut(256, 64, 4, 2), Cut(64, 16, 4, 1),
    Cut(64, 128, 4, 2), Cut(32, 128, 4, 2), Cut(64, 64, 8, 1), Cut(16, 32, 4, 1),
)  # fmt: skip
WIDE = FAST._replace(walk=Cut(256, 32, 8, 1), join=Cut(32, 16, 8, 1))
SMALL = Cuts.alike(32, Cut(32, 32, 4, 1))._replace(
    walk=Cut(256, 32, 8, 1), join=Cut(16, 16, 8, 1), gradients=Cut(16, 32, 4, 1), strong=Cut(16, 16, 4, 1)
)
SINGLE = Cuts.alike(32, Cut(16, 16, 4, 1))._replace(join=Cut(16, 16, 8, 1))

# By architecture and bits of the dtype, as in linear.py. sm90/16 was measured on an H200, the others only compiled.
TABLE = {
    "sm90/16": FAST,
    "sm90/16/wide": WIDE,
    "sm90/32": SINGLE,
    "sm80/16": SMALL,
    "sm80/32": SINGLE,
    "sm100/16": SMALL,
    "sm100/32": SINGLE,
    "gfx942/16": SMALL,
    "gfx942/32": SINGLE,
    "cpu/16": Cuts.alike(32, Cut(64, 64, 4, 1)),
    "cpu/32": Cuts.alike(32, Cut(64, 64, 4, 1)),
}


class Prepared(NamedTuple):
    """What each chunk is apart from its state, in the words of delta_products.py; x and y for gradients only."""

    a: Tensor  # [B, N, H, C, C]
    x: Tensor  # [B, N, H, C, C]
    w: Tensor  # [B, T, H, K]
    u: Tensor  # [B, T, H, V]: m takes its place once the states are known
    y: Tensor  # [B, T, H, K]
    kept: Tensor  # [B, T, H, K]
    across: Tensor  # [B, N, H, G]: a factor
    strongest: Tensor  # [B, N, H]: the strongest decay in each chunk, in base 2; for gates per channel only


class Saved(NamedTuple):
    """What a scan saves for the later passes."""

    prepared: Prepared
    ends: Tensor | None  # [B, S, H, K, V + K]: the maps of the segments; None if there is one, whose map is not needed


def scan_states(x: Inputs, maps: bool = True) -> Scan:
    """The map of the state by all tokens."""
    if x.beta is None:
        return linear.scan_states(x, maps)
    if not maps:
        return Scan(None)
    call = Call(x)
    prepared = call.prepare()
    ends = call.ends(prepared, None)
    return Scan(call.map_of(ends, reverse=False), Saved(prepared, ends))


def scan_gradients(x: Inputs, dout: Tensor, maps: bool = True) -> Scan:
    """The map from the gradient for the state behind the last token to that for the state before the first one."""
    if x.beta is None:
        return linear.scan_gradients(x, dout, maps)
    if not maps:
        return Scan(None)
    call = Call(x)
    prepared = call.prepare(gradients=True)
    ends = call.ends(prepared, dout)
    return Scan(call.map_of(ends, reverse=True), Saved(prepared, ends))


def states_shape(k: Tensor, v: Tensor) -> ShapeAndDtype:
    """The shape and dtype of the states before all chunks, [B, N, H, K, V]; the same with and without beta."""
    return linear.states_shape(k, v)


def read_out(x: Inputs, scan: Scan, start: Deferred, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, V] in q's dtype, the state behind the last token): the products within each chunk, plus q times
    the state before it.
    """
    if x.beta is None:
        return linear.read_out(x, scan, start, kept)
    call = Call(x)
    saved = call.saved(scan, None)
    states, end = call.states_of(saved, None, resolve(start), kept, write=True)
    p = saved.prepared
    return call.apply(x.q, p.u, p.a, states, x.scale, reverse=False).to(x.q.dtype), end


def gradients(x: Inputs, scan: Scan | Tensor, start: Deferred, rscan: Scan, dout: Tensor, dend: Deferred) -> Gradients:
    """The gradients in the dtypes and shapes of their inputs, and that for the start state; `dend` is the gradient for
    the end state.
    """
    if x.beta is None:
        return linear.gradients(x, scan, start, rscan, dout, dend)
    call = Call(x)
    saved = call.saved(rscan, dout)
    states = scan
    if not isinstance(states, Tensor):
        own = Saved(saved.prepared, call.ends(saved.prepared, None) if call.S > 1 else None)
        states, _ = call.states_of(own, None, resolve(start))
    dstates, dstart = call.states_of(saved, dout, resolve(dend))
    dv = call.values(saved.prepared, dout, states, dstates)
    dq, dk, dg, dbeta = call.of_inputs(saved.prepared, dout, dv, states, dstates)
    G = x.k.shape[2]
    return of_keys(dq, G, 2), of_keys(dk, G, 2), dv.to(x.v.dtype), dg, dbeta, dstart


class Call(linear.Call):
    """What all launches of one call share."""

    def __init__(self, x: Inputs) -> None:
        super().__init__(x.k, x.v, x.g, x.begin)
        assert x.beta is not None
        self.x, self.beta = x, x.beta.contiguous()
        bits = 8 * x.k.element_size()
        key = f"{self.arch}/{bits}"
        self.delta = TABLE.get(f"{key}/wide", TABLE[key]) if max(self.K, self.V) > 128 else TABLE[key]
        assert self.delta.chunk == self.cuts.chunk
        self.cuts = self.cuts._replace(apply=self.delta.apply)
        self.channels = {"BLOCK_K": max(16, power_of_2(self.K))}
        self.shape = {"K": self.K, "V": self.V, "CHUNK": self.cuts.chunk, "GATE": self.gate.value}
        self.numbers = {"PRECISION": self.precision, "DTYPE": tl.bfloat16 if self.narrow else tl.float32}
        self.group = self.H // x.k.shape[2]
        columns = self.tiles(self.delta.walk)[1]
        most = min(PROGRAMS // (self.B * self.H * columns), cdiv(self.N, SHORTEST))
        self.length = cdiv(self.N, max(1, most))  # chunks of a segment
        self.S = cdiv(self.N, self.length)

    @property
    def narrow(self) -> bool:
        """Whether what is stored between kernels is bfloat16."""
        return self.inner == torch.bfloat16

    @property
    def careful(self) -> str:
        """The precision of small products of float32."""
        return "ieee" if self.precision == "ieee" else "tf32x3"

    def both(self, cut: Cut, strong: Cut) -> list[tuple[bool, Cut]]:
        """The gentle launch is needed for float32 too: it finds which chunks are strong."""
        return [(False, cut), (True, strong)][: 2 if self.gate == CHANNEL else 1]

    def prepare(self, gradients: bool = False) -> Prepared:
        """Launches `solve_kernel` and `prepare_kernel`."""
        B, T, H, K, V, N, C, x = self.B, self.T, self.H, self.K, self.V, self.N, self.cuts.chunk, self.x
        found = Prepared(
            a=self.empty(B, N, H, C, C, dtype=self.inner),
            x=self.empty(B, N, H, C, C, dtype=self.inner),
            w=self.empty(B, T, H, K, dtype=self.inner),
            u=self.empty(B, T, H, V, dtype=self.inner),
            y=self.empty(B, T, H, K if gradients else 0, dtype=self.inner),
            kept=self.empty(B, T, H, K, dtype=self.inner),
            across=self.empty(B, N, H, K if self.gate == CHANNEL else 1),
            strongest=self.empty(B, N, H),
        )  # fmt: skip
        channel = self.delta.channel_solve
        for strong, cut in self.both(channel if self.gate == CHANNEL else self.delta.solve, channel):
            self.launch(
                solve_kernel, self.chunks, cut, (x.q, x.k), (self.beta, found.strongest, found.a, found.x), x.scale,
                GROUP=self.group, PART=PART, STRONG=strong, CAREFUL="bf16x3" if self.narrow else self.careful,
            )  # fmt: skip
        self.launch(
            prepare_kernel, self.chunks, self.delta.prepare, (x.q, x.k, x.v), (self.beta, *found[:-1]), x.scale,
            GROUP=self.group, GRADIENTS=gradients,
        )  # fmt: skip
        return found

    def saved(self, scan: Scan, dout: Tensor | None) -> Saved:
        """What the scan saved, or what it would have, as far as it is needed; with dout, a scan of gradients."""
        if scan.saved is not None:
            found: Saved = scan.saved
            return found
        prepared = self.prepare(gradients=dout is not None)
        return Saved(prepared, self.ends(prepared, dout) if self.S > 1 else None)

    def walk_chunks(self, p: Prepared, dout: Tensor | None, *others: Tensor, tiles: int, **flags: Any) -> None:
        """Launches `walk_kernel`: forward, or in reverse with dout."""
        u, read, write, y = (p.u, p.w, p.kept, p.u) if dout is None else (dout, p.kept, p.w, p.y)
        cut = self.delta.walk
        launch(
            walk_kernel, (self.B * self.S * self.H * tiles,), (u, read, write, y, p.across, *others),
            (u.stride(), self.T, self.N, self.H, self.length, self.S), cut,
            **self.shape, **self.channels, **self.numbers, BLOCK_V=self.tile(cut)[1], REVERSE=dout is not None, **flags,
        )  # fmt: skip

    def ends(self, p: Prepared, dout: Tensor | None) -> Tensor:
        """The map of each segment, [B, S, H, K, V + K]: the state behind it from zero, and its factor."""
        found = self.empty(self.B, self.S, self.H, self.K, self.V + self.K)
        block_v = self.tile(self.delta.walk)[1]
        tiles = cdiv(self.V, block_v) + cdiv(self.K, block_v)
        self.walk_chunks(p, dout, found, found, found, tiles=tiles, STORE=False, WRITE=False)
        return found

    def join(self, ends: Tensor, first: Tensor | None, found: Tensor, reverse: bool, whole: bool) -> Tensor:
        """Launches `join_kernel`."""
        cut, held = self.delta.join, self.channels["BLOCK_K"]
        block_v = self.tile(cut)[1]
        tiles = cdiv(self.V, block_v) + (cdiv(self.K, block_v) if whole else 0)
        launch(
            join_kernel, (self.B * self.H, tiles), (ends, ends if first is None else first.contiguous(), found),
            (self.S, self.H), cut,
            K=self.K, V=self.V, **self.channels, BLOCK_V=block_v, ROWS=min(cut.keys, held), FIRST=first is not None,
            MAP=whole, REVERSE=reverse, PRECISION=self.careful,
        )  # fmt: skip
        return found

    def map_of(self, ends: Tensor, reverse: bool) -> Map:
        """The map of all segments."""
        found = self.join(ends, None, self.empty(self.B, self.H, self.K, self.V + self.K), reverse, whole=True)
        return Map(found[..., self.V :], found[..., : self.V])

    def states_of(
        self, saved: Saved, dout: Tensor | None, first: Tensor | None, kept: Tensor | None = None, write: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The state before (with dout: behind) each chunk, and the one behind (before) all, starting from `first`."""
        if saved.ends is not None and self.S > 1:
            before = self.empty(self.B, self.S, self.H, self.K, self.V)
            self.join(saved.ends, first, before, dout is not None, whole=False)
        elif first is None:
            before = torch.zeros(self.B, self.H, self.K, self.V, device=self.device)
        else:
            before = first.float().contiguous()
        sizes, dtype = self.states_shape()
        found = self.empty(*sizes, dtype=dtype) if kept is None else kept
        end = self.empty(self.B, self.H, self.K, self.V)
        tiles = self.tiles(self.delta.walk)[1]
        self.walk_chunks(saved.prepared, dout, before, found, end, tiles=tiles, STORE=True, WRITE=write)
        return found, end

    def values(self, p: Prepared, dout: Tensor, states: Tensor, dstates: Tensor) -> Tensor:
        """dv; and m in the place of u."""
        cut, dv = self.delta.values, self.empty(*dout.shape, dtype=self.inner)
        block_k, block_v = self.tile(cut)
        launch(
            values_kernel, (self.chunks * self.tiles(cut)[1],),
            (dout, p.a, p.x, p.w, p.u, p.kept, states, dstates, dv),
            (dout.stride(), self.T, self.N, self.H), cut,
            **self.shape, **self.numbers, BLOCK_K=block_k, BLOCK_V=block_v,
        )  # fmt: skip
        return dv

    def of_inputs(
        self, p: Prepared, dout: Tensor, dv: Tensor, states: Tensor, dstates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(dq, dk, dg, dbeta), dq and dk of each value head."""
        x, g, rows = self.x, self.g, (self.B, self.T, self.H)
        dq, dk = (self.empty(*rows, self.K, dtype=self.dtype) for _ in range(2))
        every = self.exact and self.gate == CHANNEL  # float32: all chunks as strong ones
        launches = self.both(self.delta.gradients, self.delta.strong)[1 if every else 0 :]
        parts = max(self.tiles(cut)[0] for _, cut in launches)  # of dbeta: one for each tile of channels, summed below
        dbeta = self.empty(*rows, parts) if len(launches) == 1 else torch.zeros(*rows, parts, device=self.device)
        dg = dq
        if g is not None:
            dg = self.empty(*rows, self.K, dtype=g.dtype) if self.gate == CHANNEL else self.empty(*rows, parts)
        for strong, cut in launches:
            self.launch(
                gradients_kernel, self.chunks * self.tiles(cut)[0], cut, (x.q, x.k, dout),
                (self.beta, p.strongest, p.u, dv, states, dstates, dq, dk, dg, dbeta), x.scale,
                GROUP=self.group, PART=PART, STRONG=strong, EVERY=every, PARTS=parts,
            )  # fmt: skip
        summed = None if g is None else dg if g.dim() == 4 else dg.sum(-1).to(g.dtype)
        return dq, dk, summed, dbeta.sum(-1).to(self.beta.dtype)


KERNEL = LinearKernel(scan_states, read_out, scan_gradients, gradients, states_shape, linear.refuses)
