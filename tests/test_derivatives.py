"""Gradients are there once and in reverse mode: whatever torch would answer with zeros is refused in words."""

from itertools import product

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd import functional as twice
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.comms.local import run
from ringattn.torch.linear.halo import causal_convolution

X = torch.randn(1, 8, 2, 8)
FUNCTIONS = {
    "attention": lambda x: ra.attention(x, X, X),
    "sinks": lambda x: ra.attention(X, X, X, sinks=x[0, 0, :, 0]),
    "linear": lambda x: ra.linear_attention(X, x, X, return_state=True)[1],
    "convolution": lambda x: causal_convolution(x.flatten(2), torch.ones(16, 3)),
}
PLAN = ra.plan(seq_len=8)


def beside_a_cache(name):
    """Prefill or decode, which leaves the cache as it was if it is refused."""

    def call(x):
        cache = ra.KVCache.allocate(PLAN, batch=1, max_len=16, kv_heads=2, head_dim=8, dtype=X.dtype)
        cache.append(X, X)
        try:
            return ra.prefill(x, X, X, PLAN, cache) if name == "prefill" else ra.decode(x, X, X, cache)
        except NotImplementedError:
            assert cache.lengths.tolist() == [8]
            raise

    return call


def jvp(function):
    return torch.func.jvp(function, (X,), (X,))[1]


def dual(function):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(X, X))


def compiled(function):
    torch._dynamo.reset()
    torch.compile(lambda: jvp(function), backend="eager")()


def squared(function):
    return lambda x: function(x).square().sum()


FORWARD, SECOND = "forward mode .* not supported", "second derivatives of ringattn.* are not supported"
VMAP = "vmap .* are not supported"
WAYS = {
    "jvp": (jvp, FORWARD),
    "dual": (dual, FORWARD),
    "compiled": (compiled, FORWARD),
    "hvp": (lambda f: twice.hvp(squared(f), X, X), SECOND),
    "vhp": (lambda f: twice.vhp(squared(f), X, X), SECOND),
    "vmap": (lambda f: torch.func.vmap(f)(torch.stack([X, X])), VMAP),
    "grad": (lambda f: torch.func.grad(squared(f))(X), VMAP),
    "jacobian": (lambda f: twice.jacobian(lambda x: f(x).flatten()[:2], X, vectorize=True), VMAP),
}
NAMED = [(name, way) for name, way in product(FUNCTIONS, WAYS) if (name, way) != ("sinks", "compiled")]  # attention's
REFUSED = [(FUNCTIONS[name], way, f"{name}-{way}") for name, way in NAMED]
REFUSED += [(beside_a_cache(name), way, f"{name}-{way}") for name in ("prefill", "decode") for way in ("jvp", "dual")]


@pytest.mark.parametrize(("function", "way"), [row[:2] for row in REFUSED], ids=[row[2] for row in REFUSED])
def test_what_would_lose_a_term_is_refused(function, way):
    differentiate, says = WAYS[way]
    if way != "compiled":
        function(X)  # the same call was right before
    error = RuntimeError if way == "compiled" else NotImplementedError  # torch 2.14 no longer wraps ours
    with pytest.raises(error, match=says):
        differentiate(function)


@pytest.mark.parametrize("sizes", [{"ring": 2}, {"ulysses": 2}], ids=str)
def test_a_gradient_penalty_is_refused_over_ranks_whatever_the_loss(sizes):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=8)
        x = plan.shard(X).requires_grad_()
        (grad,) = torch.autograd.grad(ra.attention(x, x, x, plan).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError):
            grad.square().sum().backward()

    run(one_rank, **sizes)


def test_a_graph_of_gradients_that_nobody_differentiates_changes_nothing():
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(FUNCTIONS["attention"](x).square().sum(), x)
    for call in (FUNCTIONS["attention"], lambda x: checkpoint(FUNCTIONS["attention"], x, use_reentrant=False)):
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        assert torch.equal(grad, expected)
