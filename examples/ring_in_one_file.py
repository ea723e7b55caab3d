"""Ring attention in one file: exact attention over a sequence that is spread over ranks, in plain torch.

torchrun --nproc-per-node=4 examples/ring_in_one_file.py

Read it from the top: a mask is an interval, two results merge, zigzag, the ring forward and backward, a check. The
library has the same parts (docs/explanation): its kernels never form the matrix of scores, its ring skips steps that
no query needs, and its blocks come from their owners instead of passing every rank.

B batch   T queries   S keys   H query heads   G key heads, which divide H   D head dim   R ranks
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

# 1. A mask is an interval -------------------------------------------------------------------------------------------
# With causal masks and packed documents every query sees one range of keys [begin, end), and neither number decreases
# from one query to the next. So a mask is two numbers per query: no matrix, and nothing about documents travels.


def intervals(positions: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """begin and end [T] of the keys that queries at these positions see: from their document's start to themselves.

    `starts` are the positions at which documents start; the first is 0.
    """
    document = torch.searchsorted(starts, positions, right=True) - 1
    return starts[document], positions + 1


def local(begin: Tensor, end: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same intervals as indices into keys at these positions, which are sorted: how many of them lie before."""
    return torch.searchsorted(positions, begin), torch.searchsorted(positions, end)


# 2. Attention over a block of keys, and how two results merge ---------------------------------------------------------
# (out, lse) describes attention over some keys: their weighted mean, and the logarithm of the softmax's denominator.


def scores(q: Tensor, k: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """q k^T / sqrt(D) [B, G, H/G, T, S], -inf where a query does not see a key."""
    key = torch.arange(k.shape[1], device=k.device)
    seen = (begin[:, None] <= key) & (key < end[:, None])
    s = torch.einsum("btgnd,bsgd->bgnts", grouped(q, k), k.float()) / math.sqrt(q.shape[-1])
    return s.masked_fill(~seen, -math.inf)


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """Query heads by the key head that they share, [B, T, G, H/G, D], in float32."""
    return q.float().unflatten(2, (k.shape[2], -1))


def attend(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, T, H, D] and lse [B, T, H] over these keys, in float32. A query that sees no key gets (0, -inf)."""
    s = scores(q, k, begin, end)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.einsum("bgnts,bsgd->btgnd", p, v.float()).flatten(2, 3)
    return out, lse.flatten(1, 2).transpose(1, 2)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each: numerators and denominators add up.

    w = exp(lse_b) / (exp(lse_a) + exp(lse_b)) is the weight of b. Mind the sign: the larger lse_b, the larger w.
    """
    w = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0)  # -inf - -inf: neither saw a key
    return out_a - w[..., None] * (out_a - out_b), torch.logaddexp(lse_a, lse_b)


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's parts of dq, dk and dv, in float32. `lse` is that over all keys, so p is final: parts just add up.

    delta [B, T, H] = rowsum(dout * out), with the final out, too.
    """
    G, scale = k.shape[2], 1 / math.sqrt(q.shape[-1])

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(1, (G, -1))[..., None]  # [B, T, H] -> [B, G, H/G, T, 1]

    lse = by_head(lse)
    p = torch.exp(scores(q, k, begin, end) - lse.masked_fill(lse == -math.inf, 0.0))
    dout = grouped(dout, k)
    dp = torch.einsum("btgnd,bsgd->bgnts", dout, v.float())
    ds = p * (dp - by_head(delta)) * scale
    dq = torch.einsum("bgnts,bsgd->btgnd", ds, k.float()).flatten(2, 3)
    dk = torch.einsum("bgnts,btgnd->bsgd", ds, grouped(q, k))
    dv = torch.einsum("bgnts,btgnd->bsgd", p, dout)
    return dq, dk, dv


# 3. Zigzag: who holds what --------------------------------------------------------------------------------------------
# With a causal mask late queries have more work. Of 2R blocks, rank r gets block r and block 2R - 1 - r: an early one
# and a late one, so that all ranks have equal work at every step.


def zigzag(tokens: int, ranks: int, rank: int) -> Tensor:
    """The positions of a rank's tokens, sorted. 2R must divide the number of tokens (the library pads)."""
    assert tokens % (2 * ranks) == 0, f"{tokens} tokens: a multiple of {2 * ranks}"
    blocks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([blocks[rank], blocks[2 * ranks - 1 - rank]])


# 4. The ring ----------------------------------------------------------------------------------------------------------
# Queries stay; keys and values go around. While a rank attends to a block, the next block is already on its way.


class Ring:
    """The ranks of a process group in a circle."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def rotate(self, tensors: tuple[Tensor, ...]):
        """Start to send tensors to the next rank; returns a function that waits, and gives those of the rank before."""
        if self.size == 1:
            return lambda: tensors
        ahead, behind = (
            dist.get_global_rank(self.group or dist.group.WORLD, r % self.size) for r in (self.rank + 1, self.rank - 1)
        )
        sent, arriving = [x.contiguous() for x in tensors], [torch.empty_like(x.contiguous()) for x in tensors]
        sends = [dist.P2POp(dist.isend, x, ahead, self.group) for x in sent]
        receives = [dist.P2POp(dist.irecv, x, behind, self.group) for x in arriving]
        works = dist.batch_isend_irecv(sends + receives)

        def wait() -> tuple[Tensor, ...]:
            for work in works:
                work.wait()
            sent.clear()  # kept until here: what is being sent must not be freed
            return tuple(arriving)

        return wait


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(ctx, q, k, v, starts, tokens, ring):
        positions = [zigzag(tokens, ring.size, rank).to(q.device) for rank in range(ring.size)]
        begin, end = intervals(positions[ring.rank], starts.to(q.device))
        out = torch.zeros(
            *q.shape[:3], v.shape[-1], device=q.device
        )  # float32, whatever the inputs: errors would add up
        lse = torch.full(q.shape[:3], -math.inf, device=q.device)
        keys = k, v
        for step in range(ring.size):
            owner = (ring.rank - step) % ring.size
            hop = ring.rotate(keys) if step < ring.size - 1 else None
            where = local(begin, end, positions[owner])
            if (where[0] < where[1]).any():
                out, lse = merge(out, lse, *attend(q, *keys, *where))
            if hop is not None:
                keys = hop()
        ctx.save_for_backward(q, k, v, out, lse, begin, end, *positions)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        """dq stays and adds up; (dk, dv) travel with their keys, get a part on every rank, and end where they began."""
        q, k, v, out, lse, begin, end, *positions = ctx.saved_tensors
        ring, delta = ctx.ring, (dout.float() * out).sum(-1)
        dq, keys = torch.zeros_like(q, dtype=torch.float32), (k, v)
        gradients = tuple(torch.zeros_like(x, dtype=torch.float32) for x in keys)
        for step in range(ring.size):
            owner = (ring.rank - step) % ring.size
            hop = ring.rotate(keys) if step < ring.size - 1 else None
            where = local(begin, end, positions[owner])
            if (where[0] < where[1]).any():
                dq_part, *parts = attend_backward(q, *keys, *where, dout, lse, delta)
                dq += dq_part
                gradients = tuple(sum_ + part for sum_, part in zip(gradients, parts, strict=True))
            gradients = ring.rotate(gradients)()  # R hops: back to the rank of the keys
            if hop is not None:
                keys = hop()
        dk, dv = gradients
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, tokens: int, ring: Ring) -> Tensor:
    """Causal attention within packed documents over all ranks: q [B, t, H, D], k and v [B, t, G, D] of zigzag(...)."""
    return RingAttention.apply(q, k, v, starts, tokens, ring)


# 5. Is it right? ------------------------------------------------------------------------------------------------------


def check(ring: Ring, tokens: int = 960) -> None:
    """Compare a rank's out, dq, dk and dv with attention over the whole sequence in float64 on one device."""
    torch.manual_seed(0)  # the same numbers on every rank
    whole = [torch.randn(2, tokens, heads, 32, requires_grad=True) for heads in (8, 2, 2)]
    dout, starts = torch.randn(2, tokens, 8, 32), torch.tensor([0, 301, 333, 700])  # four documents
    mine = zigzag(tokens, ring.size, ring.rank)

    q, k, v = (x.detach()[:, mine].requires_grad_() for x in whole)
    out = ring_attention(q, k, v, starts, tokens, ring)
    out.backward(dout[:, mine])

    q64, k64, v64 = (x.double() for x in whole)
    position, document = torch.arange(tokens), torch.searchsorted(starts, torch.arange(tokens), right=True)
    seen = (position[:, None] >= position) & (document[:, None] == document)
    k64, v64 = (x.repeat_interleave(4, 2) for x in (k64, v64))
    s = torch.einsum("bthd,bshd->bhts", q64, k64) / math.sqrt(32)
    exact = torch.einsum("bhts,bshd->bthd", s.masked_fill(~seen, -math.inf).softmax(-1), v64)
    exact.backward(dout.double())

    pairs = {
        "out": (out, exact),
        **{f"d{n}": (x.grad, y.grad) for n, x, y in zip("qkv", (q, k, v), whole, strict=True)},
    }
    errors = {name: ((x - y[:, mine]).norm() / y[:, mine].norm()).item() for name, (x, y) in pairs.items()}
    assert max(errors.values()) < 1e-6, errors
    print(f"rank {ring.rank} of {ring.size}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check(Ring())
    dist.destroy_process_group()
