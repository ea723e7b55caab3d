"""Linear attention chunk by chunk, in plain torch: matrix products and a triangular solve; no gate is ever inverted.

    B batch   T tokens   H heads   N chunks   C tokens a chunk   K key dim   V value dim   G gates a head, K or 1

Within a chunk every pair of tokens (i, j <= i) needs the decay between them. Cut the chunk in halves, those in halves
and so on: exactly one cut separates a pair, and its decay is that from j to the cut times that from the cut to i. Both
are sums of gates that start at the cut. So all exponents are <= 0, and no precision is lost, as it would be if sums
from the chunk's start were subtracted. Between chunks a state is carried. A gate's gradient is a sum over the pairs
that it lies between; nothing cancels.

The delta rule writes u_i = beta_i (v_i - what k_i reads) in the place of v_i. k_i reads the state before the chunk and
the u of earlier tokens, so u solves a triangular system, and is linear in that state: u = U - W state. With u all is as
without the delta rule. Backward, k is a second query, whose output has the gradient -dv.

A few chunks are computed at a time, so that the working set is small and stays in the processor's cache.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.kernels.arrays import accumulator
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
from ringattn.kernels.protocol import LinearKernel

CHUNK = 64
AT_ONCE = 2**18  # the size of one tensor of the working set
MAX_KEPT = 2**25  # chunks' maps of up to this size are kept between two passes; larger ones are recomputed


class Decays(NamedTuple):
    """The decays of some chunks, as factors unless noted; zero across a document's border."""

    cuts: list[tuple[Tensor, Tensor]]  # for halves of 1, 2, 4, ... tokens: logs from the cut to i, from j to the cut
    seen: Tensor | None  # [1 or B, 1, N, C, C]: whether i and j are of one document; None: all are
    from_start: Tensor  # [B, H, N, C, G]: from the state before the chunk to each token
    to_end: Tensor  # [B, H, N, C, G]: from each token to the chunk's end
    across: Tensor  # [B, H, N, G]: log, from the state before the chunk to the chunk's end


class FewChunks:
    """A few chunks, [B, H, N, C, ...], and what follows from them without a state; computed when it is first needed."""

    def __init__(self, x: Inputs) -> None:
        self.x, self.d = x, decays(x.v, x.g, x.begin)

    @cached_property
    def q(self) -> Tensor:
        return of_values(chunks(self.x.q), self.x.v.shape[2], 1) * self.x.scale

    @cached_property
    def k(self) -> Tensor:
        return of_values(chunks(self.x.k), self.x.v.shape[2], 1)

    @cached_property
    def v(self) -> Tensor:
        return chunks(self.x.v)

    @cached_property
    def beta(self) -> Tensor:
        """[B, H, N, C, 1]"""
        assert self.x.beta is not None
        return chunks(self.x.beta[..., None], accumulator(self.x.v))

    @cached_property
    def written(self) -> Tensor:
        """k as it is at the end of the chunk."""
        return self.k * self.d.to_end

    @cached_property
    def weights(self) -> Tensor:
        """The weight of u_j in output i."""
        return weights(self.q, self.k, self.d)

    @cached_property
    def reads(self) -> Tensor:
        """The weight of u_j in what k_i reads: of earlier tokens only."""
        return weights(self.k, self.k, self.d).tril(-1)

    @cached_property
    def solved(self) -> tuple[Tensor, Tensor]:
        """U [B, H, N, C, V] and W [B, H, N, C, K] of the delta rule."""
        rhs = self.beta * torch.cat([self.v, self.k * self.d.from_start], -1)
        u, w = solve(self.beta * self.reads, rhs).split([self.v.shape[-1], self.k.shape[-1]], -1)
        return u, w

    def values(self, before: Tensor) -> Tensor:
        """u [B, H, N, C, V], given the state before each chunk."""
        if self.x.beta is None:
            return self.v
        u, w = self.solved
        return u - w @ before

    @cached_property
    def factor(self) -> Tensor:
        """What each chunk multiplies the state by, as in `Map`."""
        across = self.d.across.exp()
        if self.x.beta is None:
            return across[..., None]
        return torch.diag_embed(across.expand(*across.shape[:-1], self.k.shape[-1])) - self.written.mT @ self.solved[1]

    def maps(self) -> Map:
        """The map of the state by each chunk: factor [B, H, N, ...], kv [B, H, N, K, V]."""
        values = self.v if self.x.beta is None else self.solved[0]
        return Map(self.factor, self.written.mT @ values)

    def gradient_maps(self, dout: Tensor) -> Map:
        """The map from the gradient for the state behind each chunk to that for the state before it."""
        reader = self.q * self.d.from_start
        if self.x.beta is None:
            return Map(self.factor, reader.mT @ dout)
        return Map(self.factor.mT, (reader - self.weights @ self.solved[1]).mT @ dout)

    def rule_gradients(self, du: Tensor, u: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """(dv, dbeta) of the delta rule from the gradient for u."""
        missing = self.v - (self.k * self.d.from_start) @ before - self.reads @ u  # u = beta * missing
        dsolved = solve(self.beta * self.reads, du, transposed=True)
        return self.beta * dsolved, (dsolved * missing).sum(-1)


def solve(lower: Tensor, rhs: Tensor, transposed: bool = False) -> Tensor:
    """(1 + lower)^-1 rhs, or that of its transpose; what `lower` holds on the diagonal and above does not count."""
    matrix = lower.mT if transposed else lower
    return torch.linalg.solve_triangular(matrix, rhs, upper=transposed, unitriangular=True)


def scan_states(x: Inputs, maps: bool = True) -> Scan:
    return scanned(x, pieces(x), lambda few, _: few.maps()) if maps else Scan(None)


def scan_gradients(x: Inputs, dout: Tensor, maps: bool = True) -> Scan:
    def of_piece(few: FewChunks, tokens: slice) -> Map:
        return few.gradient_maps(chunks(dout[:, tokens]))

    return scanned(x, pieces(x)[::-1], of_piece, backward=True) if maps else Scan(None)


def states_shape(k: Tensor, v: Tensor) -> ShapeAndDtype:
    """The shape and dtype of the states before all chunks, [B, H, N, K, V]."""
    B, T, H, V = v.shape
    return (B, H, -(-T // CHUNK), k.shape[-1], V), accumulator(k)


def read_out(x: Inputs, scan: Scan, start: Deferred, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The products within each chunk, plus q times the state before it."""
    out = x.q.new_empty(x.v.shape)
    state = resolve(start)
    for n, tokens in enumerate(pieces(x)):
        few = FewChunks(cut(x, tokens))
        before, state = walk(scan.saved[n] if scan.saved else few.maps(), state)
        if kept is not None:
            kept[:, :, of_chunks(tokens)] = before
        put(out, tokens, few.weights @ few.values(before) + (few.q * few.d.from_start) @ before)
    assert state is not None
    return out, state


def gradients(x: Inputs, scan: Scan | Tensor, start: Deferred, rscan: Scan, dout: Tensor, dend: Deferred) -> Gradients:
    """Chunk by chunk, from the last to the first."""
    dq, dk, dv, dg, dbeta = (None if t is None else t.new_empty(t.shape) for t in x[:5])
    assert dq is not None and dk is not None and dv is not None
    parts, dstate = pieces(x), resolve(dend)
    starts = [] if isinstance(scan, Tensor) else before_pieces(x, scan, start)
    for n, tokens in reversed(list(enumerate(parts))):
        p, douts = FewChunks(cut(x, tokens)), chunks(dout[:, tokens])
        if isinstance(scan, Tensor):
            before = scan[:, :, of_chunks(tokens)].contiguous()  # other strides would give other bits
        else:
            before, _ = walk(scan.saved[n] if scan.saved else p.maps(), starts[n])
        maps = rscan.saved[len(parts) - 1 - n] if rscan.saved else p.gradient_maps(douts)
        behind, dstate = walk(maps, dstate, backward=True)

        u = p.values(before)
        dvs = p.weights.mT @ douts + p.written @ behind
        if dbeta is not None:
            dvs, dbetas = p.rule_gradients(dvs, u, before)
            put(dbeta[..., None], tokens, dbetas[..., None])
        put(dv, tokens, dvs)
        dks = (u @ behind.mT) * p.d.to_end
        dgs = prefix(per_gate(p.k * dks, p.d.across))
        passing = per_gate((before * behind).sum(-1) * p.d.across.exp(), p.d.across)  # from before the chunk to behind
        dgs = dgs + passing[..., None, :]
        for reader, dread in [(p.q, douts)] if dbeta is None else [(p.q, douts), (p.k, -dvs)]:
            dscores = dread @ u.mT
            dscores = dscores if reader is p.q else dscores.tril(-1)  # k reads earlier tokens only
            within = gradients_within(reader, p.k, dscores if p.d.seen is None else dscores * p.d.seen, p.d)
            of_before = (dread @ before.mT) * p.d.from_start
            dreader = of_before + within[0]
            dks = dks + within[1]
            dgs = dgs + within[2] + suffix(per_gate(reader * of_before, p.d.across))
            if reader is p.q:
                put(dq, tokens, of_keys(dreader * x.scale, dq.shape[2], 1))
            else:
                dks = dks + dreader
        put(dk, tokens, of_keys(dks, dk.shape[2], 1))
        if dg is not None:
            put(dg if dg.dim() == 4 else dg[..., None], tokens, dgs)
    assert dstate is not None
    return dq, dk, dv, dg, dbeta, dstate


def before_pieces(x: Inputs, scan: Scan, start: Deferred) -> list[Tensor | None]:
    """The state before each piece."""
    states = [resolve(start)]
    for n, tokens in enumerate(pieces(x)[:-1]):
        maps = scan.saved[n] if scan.saved else FewChunks(cut(x, tokens)).maps()
        states.append(walk(maps, states[-1])[1])
    return states


def weights(q: Tensor, k: Tensor, d: Decays) -> Tensor:
    """(q_i . decay from j to i . k_j) for all pairs j <= i of each chunk: [B, H, N, C, C]."""
    scores = q.new_zeros(*q.shape[:-1], CHUNK)
    for after, ahead in d.cuts:
        i, j = second(q, after) * after.exp(), first(k, ahead) * ahead.exp()
        corners(scores, after).copy_(i @ j.mT)
    scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    return scores if d.seen is None else scores * d.seen


def gradients_within(q: Tensor, k: Tensor, dscores: Tensor, d: Decays) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dg) of the pairs within each chunk."""
    diagonal = dscores.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk, dg = diagonal * k, diagonal * q, d.from_start.new_zeros(d.to_end.shape)
    for after, ahead in d.cuts:
        to_i, from_j, corner = after.exp(), ahead.exp(), corners(dscores, after)
        i, j = second(q, after) * to_i, first(k, ahead) * from_j
        di, dj = corner @ j, corner.mT @ i
        second(dq, after).addcmul_(di, to_i)
        first(dk, ahead).addcmul_(dj, from_j)
        second(dg, after).add_(suffix(per_gate(i * di, after)))
        first(dg, ahead).add_(prefix(per_gate(j * dj, ahead)))
    return dq, dk, dg


def decays(like: Tensor, g: Tensor | None, begin: Tensor | None) -> Decays:
    """The decays of the tokens: gates summed from each cut outwards, for blocks of 1, 2, 4, ... tokens in turn."""
    gates = like.new_zeros(1, 1, 1, 1).expand(*like.shape[:3], 1) if g is None else g if g.dim() == 4 else g[..., None]
    after = chunks(gates, accumulator(like)).unsqueeze(-2)  # [B, H, N, blocks, tokens of a block, G]
    ahead = torch.zeros_like(after)
    cuts = []
    while after.shape[-3] > 1:
        (left, right), (head, tail) = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (after, ahead))
        cuts.append((right, head))
        after = torch.cat([left, right + left[..., -1:, :]], -2)
        ahead = torch.cat([head + right[..., -1:, :], tail], -2)
    after, ahead = after.squeeze(-3), ahead.squeeze(-3)
    across = after[..., -1, :]
    if begin is None:
        return Decays(cuts, None, after.exp(), ahead.exp(), across)
    first_seen, at = begins(begin), torch.arange(CHUNK, device=begin.device)
    last = first_seen[..., -1:]
    return Decays(
        cuts,
        first_seen[..., None] <= at,
        after.exp() * (first_seen < 0)[..., None],
        ahead.exp() * (last <= at)[..., None],
        torch.where(last < 0, across, float("-inf")),
    )


def walk(maps: Map, start: Tensor | None, backward: bool = False) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, H, N, K, V], and the one behind the last; backward, from last to first."""
    factor, kv = maps
    state = torch.zeros_like(kv[:, :, 0]) if start is None else start.to(kv.dtype)
    before, N = torch.empty_like(kv), kv.shape[2]
    for n in range(N - 1, -1, -1) if backward else range(N):
        before[:, :, n] = state
        state = Map(factor[:, :, n], kv[:, :, n]).after(state)
    return before, state


def scanned(x: Inputs, parts: list[slice], maps_of: Callable[[FewChunks, slice], Map], backward: bool = False) -> Scan:
    """The map of all chunks together; also saves those of each piece, in order, if they are not too large.

    By the delta rule its factor is what becomes of the unit matrix, whose columns are walked beside the state's.
    """
    (B, _, H, V), K, dtype = x.v.shape, x.k.shape[-1], accumulator(x.v)
    decay = torch.zeros((), dtype=dtype, device=x.v.device)
    saved: list[Map] = []
    size = 0
    state: Tensor | None = None
    if x.beta is not None:
        state = F.pad(torch.eye(K, dtype=dtype, device=x.v.device), (0, V)).expand(B, H, K, K + V)
    for tokens in parts:
        few = FewChunks(cut(x, tokens))
        maps = maps_of(few, tokens)
        state = walk(maps if x.beta is None else maps._replace(kv=F.pad(maps.kv, (K, 0))), state, backward)[1]
        decay = decay + few.d.across.sum(2)
        size += maps.kv.numel() + maps.factor.numel()
        saved.append(maps)
        if size > MAX_KEPT:
            saved.clear()
    assert state is not None
    whole = Map(decay.exp()[..., None], state) if x.beta is None else Map(state[..., :K], state[..., K:])
    return Scan(whole, saved if size <= MAX_KEPT else None)


def pieces(x: Inputs) -> list[slice]:
    """Slices of the tokens, of a few chunks each."""
    B, T, H, V = x.v.shape
    few = max(1, AT_ONCE // (B * H * CHUNK * max(x.k.shape[-1], V, CHUNK))) * CHUNK
    return [slice(t, min(t + few, T)) for t in range(0, T, few)]


def cut(x: Inputs, tokens: slice) -> Inputs:
    """These tokens of the inputs; `begin` is counted from the first of them."""
    q, k, v = [t[:, tokens] for t in x[:3]]
    g, beta, begin = [t if t is None else t[:, tokens] for t in x[3:6]]
    return Inputs(q, k, v, g, beta, None if begin is None else begin - tokens.start, x.scale)


def chunks(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[B, T, H, X] as [B, H, N, C, X] in the accumulator's dtype; the last chunk is padded with zeros."""
    x = x.transpose(1, 2).to(dtype or accumulator(x))
    fill = -x.shape[2] % CHUNK
    x = F.pad(x, (0, 0, 0, fill)) if fill else x
    return x.unflatten(2, (-1, CHUNK)).contiguous()


def of_chunks(tokens: slice) -> slice:
    """The chunks of these tokens."""
    return slice(tokens.start // CHUNK, -(-tokens.stop // CHUNK))


def put(into: Tensor, tokens: slice, x: Tensor) -> None:
    """The inverse of `chunks`."""
    into[:, tokens] = x.flatten(2, 3)[:, :, : tokens.stop - tokens.start].transpose(1, 2)


def begins(begin: Tensor) -> Tensor:
    """`begin` [1 or B, T] as [1 or B, 1, N, C], counted from the first token of each chunk."""
    some = torch.cat([begin, begin[:, -1:].expand(-1, -begin.shape[1] % CHUNK)], 1).unflatten(1, (-1, CHUNK))
    return (some - CHUNK * torch.arange(some.shape[1], device=begin.device)[:, None])[:, None]


def first(x: Tensor, half: Tensor) -> Tensor:
    """[..., C, X] -> [..., C / 2h, h, X]: the tokens before each cut, where `half` has h tokens a block."""
    return x.unflatten(-2, (-1, 2, half.shape[-2]))[..., 0, :, :]


def second(x: Tensor, half: Tensor) -> Tensor:
    """The tokens after each cut."""
    return x.unflatten(-2, (-1, 2, half.shape[-2]))[..., 1, :, :]


def corners(x: Tensor, half: Tensor) -> Tensor:
    """[..., C, C] -> [..., C / 2h, h, h]: rows after a cut, columns before it; a view."""
    h = half.shape[-2]
    blocks = x.unflatten(-1, (-1, 2, h)).unflatten(-4, (-1, 2, h))  # [..., block, 2, h, block, 2, h]
    return blocks[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def per_gate(x: Tensor, gates: Tensor) -> Tensor:
    """The sum over the channels that share a gate."""
    return x if gates.shape[-1] > 1 else x.sum(-1, keepdim=True)


def suffix(x: Tensor) -> Tensor:
    """sum over i >= t, along the tokens."""
    return x.new_ones(x.shape[-2], x.shape[-2]).triu() @ x


def prefix(x: Tensor) -> Tensor:
    """sum over j < t, along the tokens."""
    return x.new_ones(x.shape[-2], x.shape[-2]).tril(-1) @ x


KERNEL = LinearKernel(scan_states, read_out, scan_gradients, gradients, states_shape)
