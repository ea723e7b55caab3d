"""A function of single tokens in pieces: the same values and gradients, and how often each piece runs."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringattn.models.pieces import in_pieces


class Layer(nn.Module):
    """x + mlp(norm(x)), in pieces of some tokens; `named`: with the weights named."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.tokens, self.named, self.runs = 100, True, 0

    def mlp(self, x):
        self.runs += 1
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        weights = [*self.first.parameters(), *self.second.parameters()]
        return x + in_pieces(self.mlp, self.tokens, self.norm(x), weights=weights if self.named else None)


def layer(**more) -> Layer:
    torch.manual_seed(0)
    made = Layer()
    vars(made).update(more)
    return made


def gradients(model, x, recompute):
    x = x.clone().requires_grad_()
    model = deepcopy(model)
    out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
    out.square().sum().backward()
    return out.detach(), [x.grad, *(p.grad for p in model.parameters())], model.runs


@pytest.mark.parametrize("tokens, pieces", [(5, 4), (7, 3), (19, 2)])
@pytest.mark.parametrize("named", [True, False])
def test_values_and_gradients_are_those_of_the_whole(tokens, pieces, named):
    """Where a layer is recomputed, its recomputation ends before the pieces, which then run twice in all."""
    x = torch.randn(2, 20, 8).double()
    out, expected, _ = gradients(layer().double(), x, False)
    for recompute in (False, True):
        result, grads, runs = gradients(layer(tokens=tokens, named=named).double(), x, recompute)
        torch.testing.assert_close(result, out)
        torch.testing.assert_close(grads, expected)
        assert runs == (2 * pieces if named or not recompute else 3 * pieces - 1)


def test_some_weights_are_frozen_and_autocast_is_that_of_forward():
    x, whole, some = torch.randn(1, 20, 8), layer(), layer(tokens=6)
    for model in (whole, some):
        model.first.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.sum().backward(retain_graph=True)
        once = model.second.weight.grad.clone()
        out.sum().backward()
        torch.testing.assert_close(model.second.weight.grad, 2 * once)
    assert some.first.weight.grad is None
    torch.testing.assert_close(some.second.weight.grad, whole.second.weight.grad, rtol=2e-2, atol=2e-2)


def test_gradients_of_weights_add_up_in_float32():
    """1 + 255 times 2^-8 is rounded to 1 in bf16 if one after the other is added."""
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    x = torch.full((1, 256, 1), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    in_pieces(partial(torch.mul, weight), 1, x, weights=[weight]).sum().backward()
    assert weight.grad == 2.0


def test_a_named_weight_that_takes_no_part_has_no_gradient():
    """As an expert that no token chose."""
    weight, other = (torch.ones((), requires_grad=True) for _ in range(2))
    in_pieces(partial(torch.mul, weight), 2, torch.ones(1, 5, 1), weights=[weight, other]).sum().backward()
    assert weight.grad == 5 and other.grad is None
