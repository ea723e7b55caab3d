"""Gradients are there once and in reverse mode: whatever torch would answer with zeros is refused in words."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.comms.local import run
from ringattn.torch.linear.halo import causal_convolution
from tests.test_bad_input import tensors


def test_forward_mode_is_refused_instead_of_losing_its_tangent():
    q, k, v = tensors()
    ra.attention(q, k, v)  # the same call was right before
    with pytest.raises(NotImplementedError, match=r"forward mode .* not supported"):
        torch.func.jvp(lambda k: ra.attention(q, k, v), (k,), (torch.ones_like(k),))
    with pytest.raises(NotImplementedError, match=r"forward mode .* not supported"), forward_ad.dual_level():
        ra.linear_attention(q, forward_ad.make_dual(q, q), q)


X = torch.randn(1, 8, 2, 8)
FUNCTIONS = {
    "attention": lambda x: ra.attention(x, X, X),
    "sinks": lambda x: ra.attention(X, X, X, sinks=x[0, 0, :, 0]),
    "linear": lambda x: ra.linear_attention(X, x, X, return_state=True)[1],
    "convolution": lambda x: causal_convolution(x.flatten(2), torch.ones(16, 3)),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_second_derivatives_are_refused_instead_of_losing_a_term(function):
    differentiate = torch.autograd.functional
    for again in (differentiate.hvp, differentiate.vhp):
        with pytest.raises(NotImplementedError, match=r"second derivatives of ringattn.* are not supported"):
            again(lambda x: function(x).square().sum(), X, X)


@pytest.mark.parametrize("sizes", [{"ring": 2}, {"ulysses": 2}], ids=str)
def test_a_gradient_penalty_is_refused_over_ranks_whatever_the_loss(sizes):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=8)
        x = plan.shard(X).requires_grad_()
        (grad,) = torch.autograd.grad(ra.attention(x, x, x, plan).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"second derivatives of ringattn.attention are not"):
            grad.square().sum().backward()

    run(one_rank, **sizes)


def test_a_graph_of_gradients_that_nobody_differentiates_changes_nothing():
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(FUNCTIONS["attention"](x).square().sum(), x)
    for call in (FUNCTIONS["attention"], lambda x: checkpoint(FUNCTIONS["attention"], x, use_reentrant=False)):
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        assert torch.equal(grad, expected)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_mode_is_refused_in_a_compiled_graph_too(function):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.func.jvp(function, (x,), (x,))[1], backend="eager")
    with pytest.raises((NotImplementedError, RuntimeError), match=r"forward mode .* not supported"):
        compiled(X)  # torch 2.14 no longer wraps our error


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_vmap_and_the_gradients_of_torch_func_are_refused_in_words(function):
    for call in (
        lambda: torch.func.vmap(function)(torch.stack([X, X])),
        lambda: torch.func.grad(lambda x: function(x).sum())(X),
        lambda: torch.autograd.functional.jacobian(lambda x: function(x).flatten()[:2], X, vectorize=True),
    ):
        with pytest.raises(NotImplementedError, match=r"vmap .* are not supported"):
            call()
