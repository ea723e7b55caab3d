"""Every public function keeps its arguments as they are, and takes them in any dtype, with any strides, in any mode."""

from contextlib import nullcontext
from itertools import cycle, product, repeat

import pytest
import torch
from torch import Tensor

import ringattn as ra
from ringattn.comms.local import run
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.linear.halo import causal_convolution

H, G, D = 4, 2, 8
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PLACES = [{}, {"ring": 3}, {"ulysses": 2}]
STRIDES = [
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: torch.cat([x, x], -1)[..., ::2],
    lambda x: x[..., :1].expand(x.shape),
    lambda x: x,
]


class Drawn:
    """Arguments of one call on one rank, the same values for any dtype; `kept` remembers them all.

    Their strides are in turn those of STRIDES, from the one given on; where that is None, they are contiguous.
    """

    def __init__(self, plan, B, dtype, grad=False, strides=None, contiguous=False):
        self.plan, self.B, self.dtype, self.grad, self.contiguous = plan, B, dtype, grad, contiguous
        self.turns = repeat(STRIDES[-1]) if strides is None else cycle(STRIDES[strides:] + STRIDES[:strides])
        self.source, self.kept = torch.Generator().manual_seed(B), []

    def strides(self, x):
        """The same values, with the next strides, or without strides if `contiguous`."""
        x = next(self.turns)(x)
        return x.contiguous() if self.contiguous else x

    def keep(self, x):
        self.kept.append((x, x.detach().clone()))
        return x

    def whole(self, *shape):
        """Floats that bfloat16 and float16 hold exactly, the same on every rank."""
        x = torch.randint(-8, 9, shape, generator=self.source) / 8
        return self.keep(self.strides(x.to(self.dtype)).requires_grad_(self.grad))

    def state(self, *shape):
        x = self.whole(*shape).detach().to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        return self.keep(self.strides(x).requires_grad_(self.grad))

    def __call__(self, *shape, most=1.0):
        """This rank's tokens [B, T, *shape]; at most `most`."""
        x = torch.randint(-8, 9, (self.B, self.plan.seq_len, *shape), generator=self.source) / 8
        x = self.strides(self.plan.shard(x.clamp(max=most).to(self.dtype)))
        return self.keep(x.requires_grad_(self.grad))

    def integers(self, high):
        x = torch.randint(0, high, (self.B, self.plan.seq_len), generator=self.source)
        return self.keep(self.plan.shard(x, compare=False))

    def layer(self, layer):
        for name, x in [*layer.named_parameters()]:
            made = torch.nn.Parameter(self.whole(*x.shape).detach() / 4, requires_grad=self.grad)
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, made)
            self.keep(made)
        return layer

    def cache(self):
        sizes = {"max_len": 64, "kv_heads": G, "head_dim": D, "dtype": self.dtype}
        return KVCache.allocate(self.plan, batch=self.B, **sizes)


def attention(x, plan):
    return ra.attention(x(H, D), x(G, D), x(G, D), plan, sinks=x.state(H), return_lse=True)


def merge(x, plan):
    alone = ra.AttentionSpec(causal=False)
    a, b = (ra.Partial(*ra.attention(x(H, D), x(G, D), x(G, D), spec=alone, return_lse=True)) for _ in "ab")
    for part in (*a, *b):
        x.keep(part)
    return ra.merge(a, b)


def linear(x, plan, rule=True):
    beta = x(H).detach().abs() if rule else None
    state = x.state(x.B, H, D, D)
    return ra.linear_attention(
        x(G, D), x(G, D), x(H, D), x(H, most=0.0), plan, beta=beta, initial_state=state, return_state=True
    )


def linear_documents(x, plan):
    docs = ra.Docs.from_lengths([[0, plan.seq_len - 1, 1]] * x.B)
    state = x.state(3 * x.B, H, D, D)
    q, k, v = x(H, D), x(H, D), x(H, D)
    return ra.linear_attention(q, k, v, None, plan, docs=docs, initial_state=state, return_state="documents")


def serving(x, plan):
    with torch.no_grad():
        cache = x.cache()
        out = [ra.prefill(x(H, D), x(G, D), x(G, D), plan, cache, sinks=x.state(H))]
        k, v = x.whole(x.B, 2, G, D), x.whole(x.B, 2, G, D)
        cache.append(k.detach(), v.detach())
        for n in (1, 2):
            new = [x.whole(x.B, n, heads, D) for heads in (H, G, G)]
            out.append(ra.decode(*new, cache, sinks=x.state(H)))
    return out


def losses(x, plan):
    mask = x.keep(x.integers(2).bool())
    return [ra.cross_entropy(x(5), x.integers(5), plan), ra.token_mean(x(), plan, mask=mask)]


def moved(x, plan):
    whole, mine = x.whole(x.B, plan.seq_len, 3), x(3)
    return [plan.shard(whole), plan.unshard(mine), plan.roll(mine, -1)]


def layers(x, plan):
    made = [x.layer(ra.nn.Attention(8, 4, 2)), x.layer(ra.nn.GatedDeltaNet(8, heads=2, convolution=3))]
    return [layer(x(8), plan) for layer in made]


def streams(x, plan):
    with torch.no_grad():
        made = [x.layer(ra.nn.StreamingAttention(8, 4, 2)), x.layer(ra.nn.GatedDeltaNet(8, heads=2, convolution=3))]
        outputs = []
        for layer in made:
            outputs += [layer.prefill(x(8).detach(), plan), layer.step(x.whole(x.B, 1, 8).detach())]
    return outputs


def convolution(x, plan):
    return causal_convolution(x(6), x.whole(6, 3), plan, first=x.whole(x.B, 2, 6).detach())


CALLS = [attention, merge, linear, linear_documents, serving, losses, moved, layers, streams, convolution]


def flat(out):
    return [out] if isinstance(out, Tensor) else [x for item in out for x in flat(item)]


def plan_for(mesh, T):
    return ra.plan(mesh, seq_len=T, layout="contiguous")


@pytest.mark.parametrize(
    ("place", "dtype"),
    [*(({}, dtype) for dtype in DTYPES), *product(PLACES[1:], (torch.float32, torch.bfloat16))],
    ids=str,
)
def test_no_call_changes_its_arguments_or_returns_their_memory(place, dtype):
    def one_rank(mesh, B, tokens, grad):
        plan = plan_for(mesh, tokens * max([1, *place.values()]))
        for call in CALLS:
            x = Drawn(plan, B, dtype, grad)
            out = flat(call(x, plan))
            if grad and (outs := [y for y in out if y.requires_grad]):
                torch.autograd.backward(outs, [x.keep(torch.ones_like(y)) for y in outs])
            for i, (now, before) in enumerate(x.kept):
                where = f"argument {i} of {call.__name__}, {B} rows, {tokens} tokens a rank, gradients: {grad}"
                assert torch.equal(now, before), f"{where}: written to"
                shared = {y.untyped_storage().data_ptr() for y in out} & {now.untyped_storage().data_ptr()}
                assert not shared, f"{where}: returned"

    for B, tokens, grad in ((1, 1, False), (1, 1, True), (2, 1, True), (1, 5, True), (2, 5, False)):
        if place:
            run(lambda mesh, how=(B, tokens, grad): one_rank(mesh, *how), **place)
        else:
            one_rank(None, B, tokens, grad)


@pytest.mark.parametrize(
    ("place", "strides"),
    [*(({}, i) for i in range(len(STRIDES))), ({"ring": 3}, 0), ({"ulysses": 2}, 1), ({"ulysses": 2}, 3)],
    ids=str,
)
def test_dtype_strides_and_mode_change_nothing_but_the_rounding(place, strides):
    modes = [(torch.float64, torch.no_grad), (torch.float32, torch.inference_mode)]
    modes += [(dtype, nullcontext) for dtype in DTYPES]

    def results(x, call, plan):
        """The outputs, then the gradients of the arguments."""
        out = flat(call(x, plan))
        leaves = [t for t, _ in x.kept if t.requires_grad and t.is_leaf]
        loss = sum(y.double().square().sum() for y in out if y.requires_grad)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if isinstance(loss, Tensor) else []
        return out, [g for g in grads if g is not None]

    def one_rank(mesh):
        plan = plan_for(mesh, 5 * max([1, *place.values()]))
        for call in CALLS:
            expected = results(Drawn(plan, 2, torch.float64, True, strides, contiguous=True), call, plan)
            for dtype, mode in modes:
                with mode():
                    outputs = results(Drawn(plan, 2, dtype, mode is nullcontext, strides), call, plan)
                limit = 32 * torch.finfo(dtype).eps
                for what, ours, truths in zip(("output", "gradient"), outputs, expected, strict=True):
                    for i, (y, truth) in enumerate(zip(ours, truths, strict=mode is nullcontext or what == "output")):
                        off = (y.double() - truth.double()).abs().max() / truth.abs().max().clamp(min=1)
                        where = f"{what} {i} of {call.__name__} in {dtype}, {mode.__name__}"
                        assert off <= limit, f"{where}, is off by {off:.1e} > {limit:.1e}"

    run(one_rank, **place) if place else one_rank(None)
