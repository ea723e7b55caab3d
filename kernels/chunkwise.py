"""Gated linear attention chunk by chunk, in plain torch: matrix products only, and no gate is ever inverted.

    B batch   T tokens   H heads   N chunks   C tokens a chunk   K key dim   V value dim   G gates a head, K or 1

Within a chunk every pair of tokens (i, j <= i) needs the decay between them. Cut the chunk in halves, those in halves
and so on: exactly one cut separates a pair, and its decay is that from j to the cut times that from the cut to i. Both
are sums of gates that start at the cut. So all exponents are <= 0, and no precision is lost, as it would be if sums
from the chunk's start were subtracted. Between chunks a state is carried. A gate's gradient is a sum over the pairs
that it lies between; nothing cancels.

A few chunks are computed at a time, so that the working set is small and stays in the processor's cache.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear import Deferred, Scan, ShapeAndDtype, State, resolve
from ringattn.kernels.protocol import LinearKernel

CHUNK = 64
AT_ONCE = 2**18  # the size of one tensor of the working set
KEPT = 2**25  # chunks' states of up to this size are kept between two passes; larger ones are recomputed

Own = tuple[Tensor, Tensor]  # the maps of the state by single chunks: kv [B, H, N, K, V], log decay [B, H, N, G]


class Decays(NamedTuple):
    """The decays of some chunks, as factors unless noted; zero across a document's border."""

    cuts: list[tuple[Tensor, Tensor]]  # for halves of 1, 2, 4, ... tokens: logs from the cut to i, from j to the cut
    seen: Tensor | None  # [1 or B, 1, N, C, C]: whether i and j are of one document; None: all are
    from_start: Tensor  # [B, H, N, C, G]: from the state before the chunk to each token
    to_end: Tensor  # [B, H, N, C, G]: from each token to the chunk's end
    across: Tensor  # [B, H, N, G]: log, from the state before the chunk to the chunk's end


def scan_states(k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None) -> Scan:
    """The state behind the last token, if the state before the first one is zero."""
    parts = pieces(k, v)
    return scanned(own_states(chunks(k, p), chunks(v, p), decays(k, g, begin, p)) for p in parts)


def scan_gradients(q: Tensor, dout: Tensor, g: Tensor | None, begin: Tensor | None, scale: float) -> Scan:
    """The gradient for the state before the first token, if the gradient for the state behind the last one is zero."""
    parts = reversed(pieces(q, dout))
    own = (own_gradients(chunks(q, p) * scale, chunks(dout, p), decays(q, g, begin, p)) for p in parts)
    return scanned(own, backward=True)


def states_shape(k: Tensor, v: Tensor) -> ShapeAndDtype:
    """The shape and dtype of the states before all chunks, [B, H, N, K, V]."""
    B, T, H, K = k.shape
    return (B, H, -(-T // CHUNK), K, v.shape[-1]), accumulator(k)


def read_out(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, scan: Scan, start_kv: Deferred,
    scale: float, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out [B, T, H, V] in q's dtype: the products within each chunk, plus q times the state before it."""
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    state = resolve(start_kv)
    for n, p in enumerate(pieces(q, v)):
        d, qs, ks, vs = decays(k, g, begin, p), chunks(q, p) * scale, chunks(k, p), chunks(v, p)
        own = scan.saved[n] if scan.saved else own_states(ks, vs, d)
        before, state = walk(own, state)
        if kept is not None:
            kept[:, :, of_chunks(p)] = before
        put(out, p, weights(qs, ks, d) @ vs + (qs * d.from_start) @ before)
    return out


def gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, scan: Scan | Tensor, start_kv: Deferred,
    rscan: Scan, dout: Tensor, dend_kv: Deferred, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dg) in the dtypes and shapes of their inputs; `dend_kv` is the gradient for the end state."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dg = None if g is None else torch.empty_like(g, memory_format=torch.contiguous_format)
    parts = pieces(q, v)
    starts = [] if isinstance(scan, Tensor) else before_pieces(k, v, g, begin, scan, start_kv)
    dstate = resolve(dend_kv)
    for n, p in reversed(list(enumerate(parts))):
        d, qs, ks = decays(k, g, begin, p), chunks(q, p) * scale, chunks(k, p)
        vs, douts = chunks(v, p), chunks(dout, p)
        if isinstance(scan, Tensor):
            before = scan[:, :, of_chunks(p)].contiguous()  # other strides would give other bits
        else:
            before, _ = walk(scan.saved[n] if scan.saved else own_states(ks, vs, d), starts[n])
        own = rscan.saved[len(parts) - 1 - n] if rscan.saved else own_gradients(qs, douts, d)
        behind, dstate = walk(own, dstate, backward=True)

        dscores = douts @ vs.mT if d.seen is None else (douts @ vs.mT) * d.seen
        within = gradients_within(qs, ks, dscores, d)
        dqs, dks = (douts @ before.mT) * d.from_start, (vs @ behind.mT) * d.to_end
        put(dv, p, weights(qs, ks, d).mT @ douts + (ks * d.to_end) @ behind)
        put(dq, p, (dqs + within[0]) * scale)
        put(dk, p, dks + within[1])
        if dg is not None:
            passing = per_gate((before * behind).sum(-1) * d.across.exp(), d.across)  # from before the chunk to behind
            dgs = within[2] + suffix(per_gate(qs * dqs, d.across)) + prefix(per_gate(ks * dks, d.across))
            put(dg if dg.dim() == 4 else dg[..., None], p, dgs + passing[..., None, :])
    return dq, dk, dv, dg


def before_pieces(
    k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, scan: Scan, start_kv: Deferred
) -> list[Tensor | None]:
    """The state before each piece."""
    parts, states = pieces(k, v), [resolve(start_kv)]
    for n, p in enumerate(parts[:-1]):
        own = scan.saved[n] if scan.saved else own_states(chunks(k, p), chunks(v, p), decays(k, g, begin, p))
        states.append(walk(own, states[-1])[1])
    return states


def weights(q: Tensor, k: Tensor, d: Decays) -> Tensor:
    """(q_i . decay from j to i . k_j) for all pairs j <= i of each chunk: [B, H, N, C, C]."""
    found = q.new_zeros(*q.shape[:-1], CHUNK)
    for after, ahead in d.cuts:
        i, j = second(q, after) * after.exp(), first(k, ahead) * ahead.exp()
        corners(found, after).copy_(i @ j.mT)
    found.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    return found if d.seen is None else found * d.seen


def gradients_within(q: Tensor, k: Tensor, dscores: Tensor, d: Decays) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dg) of the pairs within each chunk."""
    own = dscores.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk, dg = own * k, own * q, d.from_start.new_zeros(d.to_end.shape)
    for after, ahead in d.cuts:
        to_i, from_j, corner = after.exp(), ahead.exp(), corners(dscores, after)
        i, j = second(q, after) * to_i, first(k, ahead) * from_j
        di, dj = corner @ j, corner.mT @ i
        second(dq, after).addcmul_(di, to_i)
        first(dk, ahead).addcmul_(dj, from_j)
        second(dg, after).add_(suffix(per_gate(i * di, after)))
        first(dg, ahead).add_(prefix(per_gate(j * dj, ahead)))
    return dq, dk, dg


def decays(like: Tensor, g: Tensor | None, begin: Tensor | None, part: slice) -> Decays:
    """The decays of these tokens: gates summed from each cut outwards, for blocks of 1, 2, 4, ... tokens in turn."""
    gates = like.new_zeros(1, 1, 1, 1).expand(*like.shape[:3], 1) if g is None else g if g.dim() == 4 else g[..., None]
    after = chunks(gates, part, accumulator(like)).unsqueeze(-2)  # [B, H, N, blocks, tokens of a block, G]
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
    first_seen, at = begins(begin, part), torch.arange(CHUNK, device=begin.device)
    last = first_seen[..., -1:]
    return Decays(
        cuts,
        first_seen[..., None] <= at,
        after.exp() * (first_seen < 0)[..., None],
        ahead.exp() * (last <= at)[..., None],
        torch.where(last < 0, across, float("-inf")),
    )


def own_states(k: Tensor, v: Tensor, d: Decays) -> Own:
    return (k * d.to_end).mT @ v, d.across


def own_gradients(q: Tensor, dout: Tensor, d: Decays) -> Own:
    return (q * d.from_start).mT @ dout, d.across


def walk(own: Own, start: Tensor | None, backward: bool = False) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, H, N, K, V], and the one behind the last; backward, from last to first."""
    kv, log_decay = own
    state = torch.zeros_like(kv[:, :, 0]) if start is None else start.to(kv.dtype)
    decay, before = log_decay.exp()[..., None], torch.empty_like(kv)
    N = kv.shape[2]
    for n in range(N - 1, -1, -1) if backward else range(N):
        before[:, :, n] = state
        state = torch.addcmul(kv[:, :, n], decay[:, :, n], state)
    return before, state


def scanned(parts: Iterable[Own], backward: bool = False) -> Scan:
    """The map of all chunks together; also saves those of each piece, in order, if they are not too large."""
    saved: list[Own] = []
    state, total, size = None, None, 0
    for own in parts:
        kv, log_decay = own
        state = walk(own, state, backward)[1]
        total = log_decay.sum(2) if total is None else total + log_decay.sum(2)
        size += kv.numel()
        saved.append(own)
        if size > KEPT:
            saved.clear()
    assert state is not None and total is not None
    return Scan(State(total, state), saved if size <= KEPT else None)


def pieces(k: Tensor, v: Tensor) -> list[slice]:
    """Slices of the tokens, of a few chunks each."""
    B, T, H, K = k.shape
    few = max(1, AT_ONCE // (B * H * CHUNK * max(K, v.shape[-1], CHUNK))) * CHUNK
    return [slice(t, min(t + few, T)) for t in range(0, T, few)]


def chunks(x: Tensor, part: slice, dtype: torch.dtype | None = None) -> Tensor:
    """[B, T, H, X] as [B, H, N, C, X] in the accumulator's dtype; the last chunk is padded with zeros."""
    x = x[:, part].transpose(1, 2).to(dtype or accumulator(x))
    fill = -x.shape[2] % CHUNK
    x = F.pad(x, (0, 0, 0, fill)) if fill else x
    return x.unflatten(2, (-1, CHUNK)).contiguous()


def of_chunks(part: slice) -> slice:
    """The chunks of these tokens."""
    return slice(part.start // CHUNK, -(-part.stop // CHUNK))


def put(into: Tensor, part: slice, x: Tensor) -> None:
    """The inverse of `chunks`."""
    into[:, part] = x.flatten(2, 3)[:, :, : part.stop - part.start].transpose(1, 2)


def begins(begin: Tensor, part: slice) -> Tensor:
    """`begin` [1 or B, T] as [1 or B, 1, N, C], counted from the first token of each chunk."""
    some = begin[:, part]
    fill = -some.shape[1] % CHUNK
    some = torch.cat([some, some[:, -1:].expand(-1, fill)], 1).unflatten(1, (-1, CHUNK))
    starts = part.start + CHUNK * torch.arange(some.shape[1], device=begin.device)
    return (some - starts[:, None])[:, None]


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
