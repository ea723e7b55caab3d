"""Gated linear attention in Triton: the functions of a `LinearKernel`, for any strides and lengths.

The number of segments (gated_states.py) depends on how many programs a GPU runs at the same time, not on the length.
The states before all chunks exist only while `read_out` or `gradients` runs, unless they are kept for the backward
pass. The scores within chunks are never kept.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ringattn import kernels
from ringattn.kernels.linear.maps import (
    Deferred,
    Gradients,
    Inputs,
    Map,
    Scan,
    ShapeAndDtype,
    of_keys,
    of_values,
    resolve,
)
from ringattn.kernels.linear.triton.gated_products import apply_kernel, gradients_kernel, scores_kernel
from ringattn.kernels.linear.triton.gated_states import CHANNEL, HEAD, NO_GATE, join_kernel, states_kernel
from ringattn.kernels.protocol import LinearKernel
from ringattn.kernels.triton import architecture, cannot_run, cdiv, launch, power_of_2

WIDEST_KEY, WIDEST_VALUE = 256, 512
PART = 4  # tokens of a part: in chunks with strong decays, pairs within a part are multiplied out
PROGRAMS = 1024  # about how many programs of `states_kernel` run at the same time


class Config(NamedTuple):
    """Sizes of one kernel: key and value channels of a tile (at most), warps, pipeline stages, a limit of registers."""

    keys: int
    values: int
    warps: int
    stages: int
    registers: int | None = None


class Configs(NamedTuple):
    """One entry of the table: tokens of a chunk, and each kernel's sizes; `strong` and `strong_scores` are those of
    gradients and scores in chunks with strong decays.
    """

    chunk: int
    states: Config
    scores: Config
    apply: Config
    gradients: Config
    strong: Config
    strong_scores: Config


def entries(rule: str, kind: Any) -> dict[str, Any]:
    """The entries of `tiles.json`, by architecture and bits of the dtype; kernels that are not named have "others".

    "/wide" is for heads of more than 128 channels, "/half" for float16, whose intermediates the delta rule stores in
    float32. sm90/16 was measured on an H200: there strong gradients and wide heads are faster with a few spills than
    with smaller tiles and none. sm90/32 and sm90/16/half were tested there, and the others only compiled.
    """
    rows = json.loads(Path(__file__).with_name("tiles.json").read_text())[rule]

    def sizes(row: dict[str, Any]) -> list[Config]:
        return [Config(*row.get(name, row["others"])) for name in kind._fields[1:]]

    return {key: kind(row["chunk"], *sizes(row)) for key, row in rows.items()}


TABLE: dict[str, Configs] = entries("gated", Configs)
JOIN = Config(16, 64, 2, 3)


def entry(table: dict[str, Any], key: str, width: int, half: bool = False) -> Any:
    """The entry for heads of this many channels; `half`: float16 by the delta rule."""
    return table.get(key + ("/half" if half else "/wide" if width > 128 else ""), table[key])


class Segments(NamedTuple):
    """What a scan saves, in float32, for the later passes; of gradients, "before" is behind."""

    before: Tensor  # [B, S, H, K, V]: the state before each segment, if the state before the first token is zero
    passed: Tensor  # [B, S, H, G]: the log decay, in base 2, from the first token to each segment
    strongest: Tensor  # [B, N, H, tiles of channels]: the strongest decay in each chunk; for gates per channel only


def scan_states(x: Inputs, maps: bool = True) -> Scan:
    """The map of the state by all tokens, which these kernels find in any case."""
    k = of_values(x.k, x.v.shape[2], 2)
    return Launches(k, x.v, x.g, x.begin).scan(k, x.v, 1.0, reverse=False)


def scan_gradients(x: Inputs, dout: Tensor, maps: bool = True) -> Scan:
    q = of_values(x.q, x.v.shape[2], 2)
    return Launches(q, dout, x.g, x.begin).scan(q, dout, x.scale, reverse=True)


def states_shape(k: Tensor, v: Tensor) -> ShapeAndDtype:
    """The shape and dtype of the states before all chunks, [B, N, H, K, V]."""
    return Launches(k, v, None, None).states_shape()


def read_out(x: Inputs, scan: Scan, start: Deferred, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, k = (of_values(t, x.v.shape[2], 2) for t in (x.q, x.k))
    call = Launches(k, x.v, x.g, x.begin)
    a = call.scores(q, k, scan.saved.strongest, x.scale)  # before the start state is needed, which may still travel
    first = resolve(start)
    states = call.states(k, x.v, scan.saved, first, 1.0, reverse=False, kept=kept)
    return call.apply(q, x.v, a, states, x.scale, reverse=False), behind(scan, first)


def gradients(x: Inputs, scan: Scan | Tensor, start: Deferred, rscan: Scan, dout: Tensor, dend: Deferred) -> Gradients:
    q, k = (of_values(t, x.v.shape[2], 2) for t in (x.q, x.k))
    call, strongest = Launches(k, x.v, x.g, x.begin), rscan.saved.strongest
    states = scan if isinstance(scan, Tensor) else call.states(k, x.v, scan.saved, resolve(start), 1.0, reverse=False)
    a = call.scores(q, k, strongest, x.scale)  # before the end state's gradient is needed, which may still travel
    last = resolve(dend)
    dstates = call.states(q, dout, rscan.saved, last, x.scale, reverse=True)
    dv = call.apply(k, dout, a, dstates, 1.0, reverse=True)
    dq, dk, dg = call.gradients(q, k, x.v, dout, states, dstates, strongest, x.scale)
    G = x.k.shape[2]
    return of_keys(dq, G, 2), of_keys(dk, G, 2), dv, dg, None, behind(rscan, last)


def behind(scan: Scan, start: Tensor | None) -> Tensor:
    """The state behind all tokens, if `start` is the one before them."""
    assert scan.map is not None
    return scan.map.kv if start is None else scan.map.after(start)


class Launches:
    """What all launches of one call share: its shape, gates and documents."""

    def __init__(self, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None) -> None:
        (self.B, self.T, self.H, self.V), self.K = v.shape, k.shape[-1]
        self.device, self.dtype, self.g = k.device, k.dtype, g
        self.gate = NO_GATE if g is None else CHANNEL if g.dim() == 4 else HEAD
        self.arch = arch = architecture(k.device)
        self.configs: Configs = entry(TABLE, f"{arch}/{8 * k.element_size()}", max(self.K, self.V))
        self.N = cdiv(self.T, self.configs.chunk)
        self.chunks = self.B * self.N * self.H
        self.begin = None if begin is None else begin.to(torch.int32).contiguous()
        # States and scores may exceed the range of float16.
        self.inner = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.exact = self.dtype == torch.float32
        self.precision = "ieee" if arch in ("cpu", "gfx942") else "tf32x3" if self.exact else "tf32"

    def whole(self, size: int) -> int:
        """The smallest tile that holds all channels."""
        return max(16, power_of_2(size))

    def tile(self, config: Config) -> tuple[int, int]:
        """(keys, values) of a tile: those of the config, or the smallest that hold all channels."""
        return min(config.keys, self.whole(self.K)), min(config.values, self.whole(self.V))

    def tiles(self, config: Config) -> tuple[int, int]:
        """How many tiles hold the key channels and the value channels."""
        block_k, block_v = self.tile(config)
        return cdiv(self.K, block_k), cdiv(self.V, block_v)

    def launch(
        self, kernel: Any, programs: int, config: Config, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...],
        *numbers: float, **flags: Any,
    ) -> None:  # fmt: skip
        """Launch with the arguments that all kernels take; `others` are contiguous, so they have no strides."""
        g, begin, (block_k, block_v) = self.g, self.begin, self.tile(config)
        g_st = (0,) * 4 if g is None else (*g.stride(), 0)[:4]
        begin_st = 0 if begin is None or begin.shape[0] == 1 else begin.stride(0)
        docs = inputs[0] if begin is None else begin
        tensors = (*inputs, inputs[0] if g is None else g, docs, *others)
        strides = (*[x.stride() for x in inputs], g_st, begin_st)
        launch(
            kernel, (programs,), tensors, (*strides, self.T, self.N, self.H, *numbers), config,
            K=self.K, V=self.V, CHUNK=self.configs.chunk, BLOCK_K=block_k, BLOCK_V=block_v, GATE=self.gate.value,
            DOCS=begin is not None, EXACT=self.exact, PRECISION=self.precision,
            DTYPE=tl.bfloat16 if self.inner == torch.bfloat16 else tl.float32, **flags,
        )  # fmt: skip

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=self.device)

    def scan(self, x: Tensor, y: Tensor, scale: float, reverse: bool) -> Scan:
        """The first two passes of gated_states.py: all segments from a state of zero, then the join."""
        (tiles_k, tiles_v), G = self.tiles(self.configs.states), self.K if self.gate == CHANNEL else 1
        S = max(1, min(self.N, cdiv(PROGRAMS, self.B * self.H * tiles_k * tiles_v)))
        ends, before = (self.empty(self.B, S, self.H, self.K, self.V) for _ in range(2))
        decays, passed = (self.empty(self.B, S, self.H, G) for _ in range(2))
        strongest = self.empty(self.B, self.N, self.H, tiles_k)
        self.walk(x, y, (x, before, passed, x, ends, decays, strongest), S, scale, reverse)
        log_decay, end = self.empty(self.B, self.H, G), self.empty(self.B, self.H, self.K, self.V)
        launch(
            join_kernel, (self.B * self.H, cdiv(self.K, JOIN.keys), cdiv(self.V, JOIN.values)),
            (ends, decays, before, passed, end, log_decay), (S, self.H), JOIN,
            K=self.K, V=self.V, BLOCK_K=JOIN.keys, BLOCK_V=JOIN.values, GATE=self.gate.value, REVERSE=reverse,
        )  # fmt: skip
        return Scan(Map(log_decay.exp()[..., None], end), Segments(before, passed, strongest))

    def states_shape(self) -> ShapeAndDtype:
        return (self.B, self.N, self.H, self.K, self.V), self.inner

    def empty_states(self) -> Tensor:
        """Memory for the states before all chunks."""
        sizes, dtype = self.states_shape()
        return self.empty(*sizes, dtype=dtype)

    def states(
        self, x: Tensor, y: Tensor, saved: Segments, first: Tensor | None, scale: float, reverse: bool,
        kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The third pass: the state before (in reverse: behind) each chunk, [B, N, H, K, V], starting from `first`."""
        states = self.empty_states() if kept is None else kept
        begins = x if first is None else first.float().contiguous()
        others = (begins, saved.before, saved.passed, states, saved.before, saved.passed, saved.strongest)
        self.walk(x, y, others, saved.before.shape[1], scale, reverse, STORE=True, FIRST=first is not None)
        return states

    def walk(
        self, x: Tensor, y: Tensor, others: tuple[Tensor, ...], S: int, scale: float, reverse: bool,
        STORE: bool = False, FIRST: bool = False,
    ) -> None:  # fmt: skip
        """Launch `states_kernel`; arguments that a pass does not use may be any tensor."""
        tiles_k, tiles_v = self.tiles(self.configs.states)
        self.launch(
            states_kernel, self.B * S * self.H * tiles_k * tiles_v, self.configs.states, (x, y), others,
            scale, cdiv(self.N, S), S, REVERSE=reverse, STORE=STORE, FIRST=FIRST,
        )  # fmt: skip

    def both(self, config: Config, strong: Config) -> list[tuple[bool, Config]]:
        """(strong, config) of a kernel's launches: for gentle chunks and, with gates per channel, for strong ones."""
        return [(False, config), (True, strong)][: 2 if self.gate == CHANNEL else 1]

    def scores(self, q: Tensor, k: Tensor, strongest: Tensor, scale: float) -> Tensor:
        """a_ij of gated_products.py for the pairs j <= i of each chunk, [B, N, H, C, C]."""
        a = self.empty(self.B, self.N, self.H, self.configs.chunk, self.configs.chunk, dtype=self.inner)
        for strong, config in self.both(self.configs.scores, self.configs.strong_scores):
            self.launch(
                scores_kernel, self.chunks, config, (q, k), (strongest, a), scale,
                TILES=strongest.shape[-1], PART=PART, STRONG=strong,
            )  # fmt: skip
        return a

    def apply(self, x: Tensor, y: Tensor, a: Tensor, states: Tensor, scale: float, reverse: bool) -> Tensor:
        """out from q and v, or in reverse dv from k and dout, in the dtype of y."""
        config, out = self.configs.apply, self.empty(*y.shape, dtype=y.dtype)
        programs = self.chunks * self.tiles(config)[1]
        self.launch(
            apply_kernel, programs, config, (x, y), (a, states, out), scale, REVERSE=reverse, GROUP=self.H // x.shape[2]
        )
        return out

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, states: Tensor, dstates: Tensor, strongest: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """(dq, dk, dg)."""
        g, dq, dk = self.g, self.empty(*q.shape, dtype=q.dtype), self.empty(*k.shape, dtype=k.dtype)
        tiles = self.tiles(self.configs.gradients)[0]
        dg = dq
        if g is not None and self.gate == CHANNEL:
            dg = self.empty(*q.shape, dtype=g.dtype)
        elif self.gate == HEAD:  # one part for each tile of channels, summed below
            dg = self.empty(*q.shape[:3], tiles)
        for strong, config in self.both(self.configs.gradients, self.configs.strong):
            self.launch(
                gradients_kernel, self.chunks * self.tiles(config)[0], config, (q, k, v, dout),
                (strongest, states, dstates, dq, dk, dg), scale,
                TILES=strongest.shape[-1], PART=PART, STRONG=strong,
            )  # fmt: skip
        return dq, dk, None if g is None else dg if g.dim() == 4 else dg.sum(-1).to(g.dtype)


def refuses(problem: kernels.Problem) -> str | None:
    """Why these kernels cannot serve the problem, or None when they can."""
    if (reason := cannot_run(problem)) is not None:
        return reason
    if problem.head_dim > WIDEST_KEY or problem.value_dim > WIDEST_VALUE:
        limits = f"takes key dims up to {WIDEST_KEY} and value dims up to {WIDEST_VALUE}"
        return f"{limits}, got {problem.head_dim} and {problem.value_dim}"
    return None


KERNEL = LinearKernel(scan_states, read_out, scan_gradients, gradients, states_shape, refuses)
