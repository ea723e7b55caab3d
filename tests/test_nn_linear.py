"""Layers, most of them linear: over ranks each is the layer on one device, and a stream gives what forward gives."""

from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models.linear import LinearLayer
from ringattn.models.nn import Attention, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention
from ringattn.plans.plan import Plan
from ringattn.plans.segments import order
from ringattn.torch.linear.halo import causal_convolution

T, C = 45, 32
PACKED = ((20, 0, 2, 23), (1, 2, 42))
MESHES = [(1, 1, "contiguous"), (4, 1, "zigzag"), (4, 1, "contiguous"), (2, 2, "zigzag"), (2, 3, "zigzag")]


LAYERS = [
    (GatedLinearAttention, {}),
    (GatedLinearAttention, {"gate": "head", "convolution": 4}),
    (GatedLinearAttention, {"convolution": 1}),
    (GatedDeltaNet, {"key_heads": 2}),
    (KimiDeltaAttention, {"convolution": 3}),
]


ATTENTION = Attention, {"heads": 12, "kv_heads": 6, "head_dim": 8, "spec": ra.AttentionSpec(window=20)}


def layer(kind: type[LinearLayer | Attention] = GatedLinearAttention, **choices) -> LinearLayer | Attention:
    made = kind(C, **{"heads": 4, **choices}).double()
    generator = torch.Generator().manual_seed(0)  # not the global one: ranks are threads
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    return made


def data(length: int = T) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, C, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("lengths", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize(("kind", "choices"), [*LAYERS, ATTENTION], ids=str)
@pytest.mark.parametrize(("ring", "ulysses", "place"), [*MESHES, (4, 1, "balanced"), (2, 2, "balanced")])
def test_a_layer_over_ranks_is_the_layer_on_one_device(ring, ulysses, place, kind, choices, lengths):
    x, dout = data()
    docs = None if lengths is None else ra.Docs.from_lengths([list(row) for row in lengths])
    single, whole = layer(kind, **choices), x.clone().requires_grad_()
    untouched = deepcopy(single)
    if lengths is None:
        expected = single(whole)
    else:  # every document by itself
        rows = []
        for row, some in zip(whole, lengths, strict=True):
            ends = np.cumsum(some)
            rows.append(torch.cat([single(row[None, e - n : e]) for e, n in zip(ends, some, strict=True) if n], 1))
        expected = torch.cat(rows)
    expected.backward(dout)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T, layout=place)
        mine, local = deepcopy(untouched), plan.shard(x).requires_grad_()
        out = mine(local, plan, docs=docs)
        out.backward(plan.shard(dout))
        return plan.unshard(out.detach()), plan.unshard(local.grad), {n: p.grad for n, p in mine.named_parameters()}

    results = run(one_rank, ring=ring, ulysses=ulysses)
    for out, dx, _ in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(dx, whole.grad, rtol=0, atol=1e-11)
    for name, weight in single.named_parameters():
        torch.testing.assert_close(sum(s[name] for *_, s in results), weight.grad, rtol=0, atol=1e-10, msg=name)


def test_a_gated_delta_net_is_that_of_qwen3_next():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    G, H, K, V = 2, 4, 8, 6
    config = modeling.Qwen3NextConfig(
        hidden_size=C, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K,
        linear_value_head_dim=V, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs, ours = modeling.Qwen3NextGatedDeltaNet(config, 0), GatedDeltaNet(C, H, G, K, V)
    q, k, v, z = theirs.in_proj_qkvz.weight.view(G, -1, C).split([K, K, H // G * V, H // G * V], 1)
    beta, decay = theirs.in_proj_ba.weight.view(G, -1, C).chunk(2, 1)
    weights = {
        "qkv.weight": torch.cat([x.flatten(0, 1) for x in (q, k, v)]), "swish.weight": z.flatten(0, 1),
        "beta.weight": beta.flatten(0, 1), "decay.weight": decay.flatten(0, 1), "bias": theirs.dt_bias,
        "log_rate": theirs.A_log, "mix": theirs.conv1d.weight[:, 0].flip(1), "norm.weight": theirs.norm.weight,
        "out.weight": theirs.out_proj.weight,
    }  # fmt: skip
    ours.load_state_dict({n: x.detach() for n, x in weights.items()})
    x = data(150)[0].float()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("length", [3, 5, 9])
def test_the_convolution_reaches_over_segments_shorter_than_itself(length, layout):
    x, dout = data(length)
    weight = torch.randn(C, 6, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    expected = F.conv1d(F.pad(whole.mT, (5, 0)), weight.flip(1)[:, None], groups=C).mT
    expected.backward(dout)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=length, layout=layout)
        local = plan.shard(x).requires_grad_()
        out = causal_convolution(local, weight, plan)
        out.backward(plan.shard(dout))
        return plan.unshard(out.detach()), plan.unshard(local.grad)

    for out, dx in run(one_rank, ring=4):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(dx, whole.grad)


@pytest.mark.parametrize(("kind", "choices"), LAYERS, ids=str)
@pytest.mark.parametrize(("ring", "ulysses", "place"), MESHES[:4])
def test_a_stream_gives_what_forward_gives(ring, ulysses, place, kind, choices):
    """A prompt in chunks (one shorter than the convolution), then steps of one, three and ten tokens; and once more."""
    x, _ = data()
    expected = layer(kind, **choices)(x).detach()

    def one_rank(mesh):
        mine = layer(kind, **choices)
        for _ in range(2):
            outs, at = [], 0
            for n in (17, 2, 12):
                plan = ra.plan(mesh, seq_len=n, layout=place)
                outs.append(plan.unshard(mine.prefill(plan.shard(x[:, at : at + n]), plan)))
                at += n
            for n in (1, 3, 10):
                outs.append(mine.step(x[:, at : at + n]))
                at += n
            mine.reset()
        return torch.cat(outs, 1)

    for out in run(one_rank, ring=ring, ulysses=ulysses):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def hops(plan: Plan) -> int:
    """From each segment of the sequence to the next: on how many axes of the mesh their ranks differ, summed."""
    return sum((a[0] != b[0]) + (a[1] != b[1]) for a, b in pairwise(order(plan)))


@pytest.mark.parametrize("lengths", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize(
    ("ring", "ulysses", "place"), [(4, 1, "contiguous"), (4, 1, "zigzag"), (2, 2, "contiguous"), (2, 3, "zigzag")]
)
def test_the_convolution_sends_the_tokens_at_borders_and_no_others(ring, ulysses, place, lengths):
    """Forward and backward: W - 1 tokens a border between ranks, twice where ring and Ulysses rank both change."""
    W = 4
    docs = None if lengths is None else ra.Docs.from_lengths([list(row) for row in lengths])

    def one_rank(mesh, length):
        plan = ra.plan(mesh, seq_len=length, layout=place)
        x = torch.randn(2, plan.local_len, C).requires_grad_()
        out = causal_convolution(x, torch.randn(C, W), plan, docs=docs)
        forward = sent(plan)
        out.sum().backward()
        return forward, sent(plan) - forward

    def sent(plan):
        return sum(getattr(axis, "sent", 0) for axis in (plan.ring_axis, plan.ulysses_axis))

    expected = hops(Plan(seq_len=T, ring=ring, ulysses=ulysses, layout=place)) * 2 * (W - 1) * C * 4
    for length in (T,) if docs else (T, 10 * T):
        counts = run(lambda mesh, n=length: one_rank(mesh, n), ring=ring, ulysses=ulysses)
        for total in map(sum, zip(*counts, strict=True)):
            assert total == expected
