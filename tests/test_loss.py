"""token_mean: the average over the real tokens of all ranks, as a value and as a gradient."""

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.comms.mesh import axis


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_is_the_mean_over_real_tokens_of_all_ranks(layout):
    losses, keep = torch.rand(2, 13), torch.rand(2, 13) > 0.3
    docs = ra.Docs.from_lengths([[13], [4, 3]], pad_to=13)
    real = keep & torch.tensor([[True] * 13, [True] * 7 + [False] * 6])

    def one(mesh):
        plan = ra.plan(mesh, seq_len=13, layout=layout)
        padded = torch.cat([losses, torch.full((2, plan.tokens.padded_length - 13), torch.nan)], 1)
        mine = padded[:, plan.positions()].requires_grad_()
        mask = torch.cat([keep, torch.ones(2, plan.tokens.padded_length - 13, dtype=torch.bool)], 1)[
            :, plan.positions()
        ]
        mean = ra.token_mean(mine, plan, mask=mask, docs=docs)
        mean.backward()
        return mean.detach(), plan.unshard(mine.grad)

    for mean, grad in run(one, ring=2, ulysses=2):
        torch.testing.assert_close(mean, losses[real].mean())
        torch.testing.assert_close(grad, real / real.sum())


def test_averages_over_a_data_axis_too():
    losses = torch.rand(2, 1, 8)

    def one(mesh):
        plan = ra.plan(mesh, seq_len=8)
        mine = plan.shard(losses[mesh.coordinates["data"]])
        return ra.token_mean(mine, plan, over=[axis(mesh, "data")])

    for mean in run(one, data=2, ring=2):
        torch.testing.assert_close(mean, losses.mean())


def test_no_real_token_at_all_is_zero_and_not_nan():
    plan = ra.plan(seq_len=4)
    assert ra.token_mean(torch.rand(1, 4), plan, mask=torch.zeros(1, 4)).item() == 0


def test_a_mask_of_one_row_counts_for_every_row():
    losses, mask = torch.rand(8, 16), torch.arange(16)[None] < 5
    for given in (mask, mask[0], mask.expand(8, 16)):
        found = ra.token_mean(losses, ra.plan(seq_len=16), mask=given)
        torch.testing.assert_close(found, losses[:, :5].mean())


@pytest.mark.parametrize("shape", [(3, 4), (2, 3), (1, 2, 4)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=rf"mask has shape \({shape[0]}, .*, losses \(2, 4\)"):
        ra.token_mean(torch.rand(2, 4), ra.plan(seq_len=4), mask=torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_adds_up_in_float32_or_float64(dtype):
    losses = torch.full((1, 131072), 10.0, dtype=dtype, requires_grad=True)
    mean = ra.token_mean(losses, ra.plan(seq_len=131072))
    mean.backward()
    assert mean.item() == 10 and mean.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert losses.grad.dtype == dtype and losses.grad.eq(torch.tensor(1 / 131072, dtype=dtype)).all()


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match="losses has 5 tokens, a rank of this plan holds 4"):
        ra.token_mean(torch.rand(1, 5), ra.plan(seq_len=4))
