"""The delta rule in Triton: the functions of a `LinearKernel`; without beta, that of gated.py serves.

The map of all tokens costs more than the states: its factor has K columns, beside the V columns of a state. So with
maps=False the scans compute nothing, and the later functions what they need. A long sequence is still cut into segments
if the heads alone do not fill a GPU. Outputs, and backward dv, are computed where the state is walked.

The backward pass computes each chunk's products again, but the states before all chunks only if they are not kept.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ringattn.kernels.linear.maps import Deferred, Gradients, Inputs, Map, Scan, of_keys, resolve
from ringattn.kernels.linear.triton import gated
from ringattn.kernels.linear.triton.delta_gradients import gradients_kernel, pairs_kernel
from ringattn.kernels.linear.triton.delta_products import prepare_kernel
from ringattn.kernels.linear.triton.delta_states import join_kernel, walk_kernel
from ringattn.kernels.linear.triton.gated import CHANNEL, PART, Config
from ringattn.kernels.protocol import LinearKernel
from ringattn.kernels.triton import cdiv, launch, power_of_2

PROGRAMS = 132  # about how many programs of `walk_kernel` run at the same time
SHORTEST = 8  # chunks of a segment: to join more segments costs more than it saves


class Configs(NamedTuple):
    """One entry of the table: tokens of a chunk, and each kernel's sizes.

    `channel_` ones are with gates per channel, and `strong_` ones those of chunks with strong decays. `ends` is the
    walk for the segments' maps, `walk` the one for outputs, and `back_ends` and `back` are in reverse. These and `join`
    hold all key channels; `join.keys` are the rows of a factor that are multiplied at once.
    """

    chunk: int
    prepare: Config
    channel_prepare: Config
    strong_prepare: Config
    ends: Config
    walk: Config
    back_ends: Config
    back: Config
    join: Config
    total: Config  # of the join of all segments into one map, which has more columns
    pairs: Config
    gradients: Config
    channel_gradients: Config
    strong_gradients: Config


TABLE: dict[str, Configs] = gated.entries("delta", Configs)


class Prepared(NamedTuple):
    """What each chunk is apart from its state, in the words of delta_products.py."""

    a: Tensor  # [B, N, H, C, C]
    x: Tensor  # [B, N, H, C, C]: for gradients only
    w: Tensor  # [B, T, H, K]
    u: Tensor  # [B, T, H, V]: m takes its place for gradients
    reader: Tensor  # [B, T, H, K]: scale q 2^b with gates per channel; q itself otherwise, of the key heads
    kept: Tensor  # [B, T, H, K]: beta k 2^e, or k itself, likewise
    rates: Tensor  # [B, N, H, 2, C]: scale 2^b and beta 2^e of each token, without gates per channel
    across: Tensor  # [B, N, H, G]: a factor
    bound: Tensor  # [B, N, H]: of the norm of each chunk's factor, as a log in base 2
    strongest: Tensor  # [B, N, H]: the strongest decay in each chunk, in base 2; for gates per channel only


class Saved(NamedTuple):
    """What a scan saves for the later passes."""

    prepared: Prepared
    ends: Tensor | None  # [B, S, H, K, V + K]: the maps of the segments; None if there is one, whose map is not needed


def scan_states(x: Inputs, maps: bool = True) -> Scan:
    return scanned(x, None) if maps else Scan(None)


def scan_gradients(x: Inputs, dout: Tensor, maps: bool = True) -> Scan:
    return scanned(x, dout) if maps else Scan(None)


def scanned(x: Inputs, dout: Tensor | None) -> Scan:
    call = DeltaLaunches(x)
    prepared = call.prepare(gradients=dout is not None)
    ends = call.ends(prepared, dout)
    return Scan(call.map_of(ends, reverse=dout is not None), Saved(prepared, ends))


def read_out(x: Inputs, scan: Scan, start: Deferred, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    call = DeltaLaunches(x)
    saved = call.saved(scan, None, start)
    out = call.empty(*x.v.shape, dtype=x.q.dtype)
    return out, call.walk_from(saved, None, resolve(start), kept, out)


def gradients(x: Inputs, scan: Scan | Tensor, start: Deferred, rscan: Scan, dout: Tensor, dend: Deferred) -> Gradients:
    call = DeltaLaunches(x)
    saved = call.saved(rscan, dout, dend)
    states = scan
    if not isinstance(states, Tensor):
        states = call.empty_states()
        call.walk_from(call.of_segments(saved.prepared, None, start), None, resolve(start), states)
    dstates, dv = call.empty_states(), call.empty(*dout.shape, dtype=call.inner)
    dstart = call.walk_from(saved, dout, resolve(dend), dstates, dv)
    dq, dk, dg, dbeta = call.of_inputs(saved.prepared, dout, dv, states, dstates)
    G = x.k.shape[2]
    return of_keys(dq, G, 2), of_keys(dk, G, 2), dv.to(x.v.dtype), dg, dbeta, dstart


class DeltaLaunches(gated.Launches):
    """What all launches of one call share."""

    def __init__(self, x: Inputs) -> None:
        super().__init__(x.k, x.v, x.g, x.begin)
        assert x.beta is not None
        self.x, self.beta = x, x.beta.contiguous()
        key, half = f"{self.arch}/{8 * x.k.element_size()}", self.dtype == torch.float16
        self.delta: Configs = gated.entry(TABLE, key, max(self.K, self.V), half)
        assert self.delta.chunk == self.configs.chunk
        self.low_precision = self.inner == torch.bfloat16  # whether what is stored between kernels is bfloat16
        if half:  # what is stored is float32: products of 10 bits would be all that errs
            self.precision = self.careful
        self.channels = {"BLOCK_K": self.whole(self.K)}
        self.shape = {"K": self.K, "V": self.V, "CHUNK": self.configs.chunk, "GATE": self.gate.value}
        self.numbers = {"PRECISION": self.precision, "DTYPE": tl.bfloat16 if self.low_precision else tl.float32}
        self.group = self.H // x.k.shape[2]
        columns = self.tiles(self.delta.walk)[1]
        most = min(PROGRAMS // (self.B * self.H * columns), cdiv(self.N, SHORTEST))
        self.length = cdiv(self.N, max(1, most))  # chunks of a segment
        self.S = cdiv(self.N, self.length)

    @property
    def careful(self) -> str:
        """The precision of small products of float32."""
        return "ieee" if self.precision == "ieee" else "tf32x3"

    def whole(self, size: int) -> int:
        """The smallest tile that holds all channels. Narrower ones of bfloat16, compiled by Triton 3.6, gave wrong
        results and read where they may not.
        """
        return max(64 if self.low_precision and self.arch != "cpu" else 16, power_of_2(size))

    def prepare(self, gradients: bool = False) -> Prepared:
        B, T, H, K, V, N, C, x = self.B, self.T, self.H, self.K, self.V, self.N, self.configs.chunk, self.x
        configs, channel = self.delta, self.gate == CHANNEL
        gentle = configs.channel_prepare if channel else configs.prepare
        prepared = Prepared(
            a=self.empty(B, N, H, C, C, dtype=self.inner),
            x=self.empty(B, N if gradients else 0, H, C, C, dtype=self.inner),
            w=self.empty(B, T, H, K, dtype=self.inner),
            u=self.empty(B, T, H, V, dtype=self.inner),
            reader=self.empty(B, T, H, K, dtype=self.inner) if channel else x.q,
            kept=self.empty(B, T, H, K, dtype=self.inner) if channel else x.k,
            rates=self.empty(B, 0 if channel else N, H, 2, C),
            across=self.empty(B, N, H, K if channel else 1),
            bound=self.empty(B, N, H),
            strongest=self.empty(B, N, H),
        )  # fmt: skip
        for strong, config in self.both(gentle, configs.strong_prepare):
            self.launch(
                prepare_kernel, self.chunks, config, (x.q, x.k, x.v),
                (self.beta, prepared.strongest, *prepared[:-1]), x.scale,
                GROUP=self.group, PART=PART, STRONG=strong, INVERSE=gradients,
                CAREFUL=self.precision if self.low_precision else self.careful,
            )  # fmt: skip
        return prepared

    def saved(self, scan: Scan, dout: Tensor | None, first: Deferred) -> Saved:
        """What the scan saved, or what it would have, as far as it is needed; with dout, a scan of gradients."""
        if scan.saved is not None:
            return scan.saved
        return self.of_segments(self.prepare(gradients=dout is not None), dout, first)

    def of_segments(self, p: Prepared, dout: Tensor | None, first: Deferred) -> Saved:
        """With what the segments' maps say of the states before them."""
        return Saved(p, self.ends(p, dout, few=True, zero=first is None) if self.S > 1 else None)

    def walk_chunks(self, config: Config, p: Prepared, dout: Tensor | None, *others: Tensor, **flags: Any) -> None:
        """Launches `walk_kernel`: forward, or in reverse with dout."""
        u = p.u if dout is None else dout
        tiles = self.tiles(config)[1] + (0 if flags["STORE"] else cdiv(self.K, self.tile(config)[1]))
        launch(
            walk_kernel, (self.B * (self.S - flags["SKIP"]) * self.H * tiles,),
            (u, p.w, p.kept, p.reader, p.a, p.x, p.rates, p.across, p.bound, *others),
            (u.stride(), p.kept.stride(), p.reader.stride(), self.T, self.N, self.H, self.length, self.S), config,
            **self.shape, **self.channels, **self.numbers, BLOCK_V=self.tile(config)[1],
            GROUP=self.H // p.kept.shape[2], REVERSE=dout is not None, **flags,
        )  # fmt: skip

    def ends(self, p: Prepared, dout: Tensor | None, few: bool = False, zero: bool = False) -> Tensor:
        """The map of each segment, [B, S, H, K, V + K]: the state behind it from zero, and its factor.

        `few`: only what the states before segments need, with `zero` from a state of zero.
        """
        maps = self.empty(self.B, self.S, self.H, self.K, self.V + self.K)
        config = self.delta.ends if dout is None else self.delta.back_ends
        flags = {"STORE": False, "KEEP": False, "OUT": False, "SKIP": int(few), "ZERO": zero}
        self.walk_chunks(config, p, dout, maps, maps, maps, maps, **flags)
        return maps

    def join(self, ends: Tensor, first: Tensor | None, joined: Tensor, reverse: bool, whole: bool) -> Tensor:
        config, rows = self.delta.total if whole else self.delta.join, self.channels["BLOCK_K"]
        block_v = self.tile(config)[1]
        tiles = cdiv(self.V, block_v) + (cdiv(self.K, block_v) if whole else 0)
        launch(
            join_kernel, (self.B * self.H, tiles), (ends, ends if first is None else first.contiguous(), joined),
            (self.S, self.H), config,
            K=self.K, V=self.V, **self.channels, BLOCK_V=block_v, ROWS=min(config.keys, rows), FIRST=first is not None,
            MAP=whole, REVERSE=reverse, PRECISION=self.careful,
        )  # fmt: skip
        return joined

    def map_of(self, ends: Tensor, reverse: bool) -> Map:
        """The map of all segments."""
        whole = self.join(ends, None, self.empty(self.B, self.H, self.K, self.V + self.K), reverse, whole=True)
        return Map(whole[..., : self.K], whole[..., self.K :])

    def walk_from(
        self, saved: Saved, dout: Tensor | None, first: Tensor | None, states: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """The state behind all chunks (with dout: before them), starting from `first`. On the way it writes the state
        before (behind) each chunk to `states`, and the outputs (dv) to `out`.
        """
        if saved.ends is not None and self.S > 1:
            before = self.empty(self.B, self.S, self.H, self.K, self.V)
            self.join(saved.ends, first, before, dout is not None, whole=False)
        elif first is None:
            before = torch.zeros(self.B, self.H, self.K, self.V, device=self.device)
        else:
            before = first.float().contiguous()
        end = self.empty(self.B, self.H, self.K, self.V)
        config = self.delta.walk if dout is None else self.delta.back
        others = before, end if states is None else states, end, end if out is None else out
        flags = {"STORE": True, "KEEP": states is not None, "OUT": out is not None, "SKIP": 0, "ZERO": False}
        self.walk_chunks(config, saved.prepared, dout, *others, **flags)
        return end

    def of_inputs(
        self, p: Prepared, dout: Tensor, dv: Tensor, states: Tensor, dstates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(dq, dk, dg, dbeta), dq and dk of each value head; m takes the place of u.

        dbeta, and dg of a gate a head, have a part for each tile of key channels, to be summed; dg one more, of pairs.
        """
        x, g, configs, rows = self.x, self.g, self.delta, (self.B, self.T, self.H)
        channel, C = self.gate == CHANNEL, self.configs.chunk
        every = self.exact and channel  # float32: all chunks as strong ones
        gentle = configs.channel_gradients if channel else configs.gradients
        launches = self.both(gentle, configs.strong_gradients)[1 if every else 0 :]
        parts = max(self.tiles(config)[0] for _, config in launches)
        dq, dk = (self.empty(*rows, self.K, dtype=self.dtype) for _ in range(2))
        da, dr = (
            self.empty(self.B, self.N, self.H, C, C, dtype=torch.float32 if channel else self.inner) for _ in range(2)
        )
        own = self.empty(self.B, self.N, self.H, C)
        dbeta = self.empty(*rows, parts) if len(launches) == 1 else torch.zeros(*rows, parts, device=self.device)
        dg = dq
        if g is not None:
            dg = self.empty(*rows, self.K, dtype=g.dtype) if channel else self.empty(*rows, parts + 1)
        self.launch(
            pairs_kernel, self.chunks, configs.pairs, (x.q, x.k, dout),
            (self.beta, p.w, p.u, dv, states, da, dr, own, dg), x.scale, GROUP=self.group, PARTS=parts + 1,
        )  # fmt: skip
        for strong, config in launches:
            self.launch(
                gradients_kernel, self.chunks * self.tiles(config)[0], config, (x.q, x.k, dout),
                (self.beta, p.strongest, p.u, dv, states, dstates, da, dr, own, dq, dk, dg, dbeta), x.scale,
                GROUP=self.group, PART=PART, STRONG=strong, EVERY=every, PARTS=parts, PARTS_G=parts + 1,
            )  # fmt: skip
        summed = None if g is None else dg if g.dim() == 4 else dg.sum(-1).to(g.dtype)
        return dq, dk, summed, dbeta.sum(-1).to(self.beta.dtype)


# states before all chunks have the same shape with and without beta; with beta each is stored as [V, K]
KERNEL = LinearKernel(
    scan_states, read_out, scan_gradients, gradients, gated.states_shape, gated.refuses, gated=gated.KERNEL
)
