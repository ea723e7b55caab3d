"""token_mean: the average over the real tokens of all ranks, as a value and as a gradient."""

import pytest
import torch
from torch.nn import functional as F

import ringattn as ra
from ringattn.comms.local import run
from ringattn.comms.mesh import axis
from ringattn.models import loss
from ringattn.torch.sharding import own_positions


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_is_the_mean_over_real_tokens_of_all_ranks(layout):
    losses, keep = torch.rand(2, 13), torch.rand(2, 13) > 0.3
    docs = ra.Docs.from_lengths([[13], [4, 3]], pad_to=13)
    real = keep & torch.tensor([[True] * 13, [True] * 7 + [False] * 6])

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=13, layout=layout)
        padded = torch.cat([losses, torch.full((2, plan.tokens.padded_length - 13), torch.nan)], 1)
        at = torch.from_numpy(own_positions(plan))
        mine = padded[:, at].requires_grad_()
        mask = torch.cat([keep, torch.ones(2, plan.tokens.padded_length - 13, dtype=torch.bool)], 1)[:, at]
        mean = ra.token_mean(mine, plan, mask=mask, docs=docs)
        mean.backward()
        return mean.detach(), plan.unshard(mine.grad)

    for mean, grad in run(one_rank, ring=2, ulysses=2):
        torch.testing.assert_close(mean, losses[real].mean())
        torch.testing.assert_close(grad, real / real.sum())


@pytest.mark.parametrize("place", [{"ring": 4}, {"ring": 2, "ulysses": 2}, {"data": 2, "ring": 2}], ids=str)
def test_every_rank_has_the_same_bits(place):
    """Also of a loss that one rank alone finds infinite."""

    def one_rank(mesh, seed, scale):
        torch.manual_seed(seed)
        plan, over = ra.plan(mesh, seq_len=13), [axis(mesh, "data")] if "data" in place else []
        rows = slice(3 * mesh.coordinates.get("data", 0), None)
        logits, labels = torch.randn(6, 13, 7)[rows][:3] * scale, torch.randint(0, 7, (6, 13))[rows][:3]
        losses = torch.rand(6, 13)[rows][:3]
        losses[-1, -1] *= scale
        mean = ra.cross_entropy(plan.shard(logits), plan.shard(labels, compare=False), plan, over=over)
        return mean.item(), ra.token_mean(plan.shard(losses), plan, over=over).item()

    for seed in range(12):
        results = run(lambda mesh, seed=seed: one_rank(mesh, seed, 100.0), **place)
        assert len(set(results)) == 1, results
    assert set(run(lambda mesh: one_rank(mesh, 0, torch.inf)[1], **place)) == {torch.inf}


def test_averages_over_a_data_axis_too():
    losses = torch.rand(2, 1, 8)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=8)
        mine = plan.shard(losses[mesh.coordinates["data"]])
        return ra.token_mean(mine, plan, over=[axis(mesh, "data")])

    for mean in run(one_rank, data=2, ring=2):
        torch.testing.assert_close(mean, losses.mean())


def test_no_real_token_at_all_is_zero_and_not_nan():
    plan = ra.plan(seq_len=4)
    assert ra.token_mean(torch.rand(1, 4), plan, mask=torch.zeros(1, 4, dtype=torch.int64)).item() == 0


def test_a_mask_of_one_row_counts_for_every_row():
    losses, mask, plan = torch.rand(8, 16), torch.arange(16)[None] < 5, ra.plan(seq_len=16)
    for given in (mask, mask[0], mask.expand(8, 16)):
        torch.testing.assert_close(ra.token_mean(losses, plan, mask=given), losses[:, :5].mean())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_adds_up_in_float32_or_float64(dtype):
    losses = torch.full((1, 131072), 10.0, dtype=dtype, requires_grad=True)
    mean = ra.token_mean(losses, ra.plan(seq_len=131072))
    mean.backward()
    assert mean.item() == 10 and mean.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert losses.grad.dtype == dtype and losses.grad.eq(torch.tensor(1 / 131072, dtype=dtype)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_is_the_mean_over_labels_of_all_ranks_and_pieces(dtype, monkeypatch):
    """Beside a data axis, with labels to ignore, padding that holds NaN, and logits of few tokens at once."""
    monkeypatch.setattr(loss, "LOGITS", 2 * 7 * 3)
    logits, labels = torch.randn(2, 2, 13, 7).to(dtype), torch.randint(0, 7, (2, 2, 13))
    labels[torch.rand(labels.shape) < 0.3] = -100
    labels[0, :, :6] = -100  # some ranks have none that counts
    whole = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 2), labels.flatten())
    expected.backward()

    def one_rank(mesh):
        plan, row = ra.plan(mesh, seq_len=13, layout="contiguous"), mesh.coordinates["data"]
        pad = plan.tokens.padded_length - 13
        at = torch.from_numpy(own_positions(plan))
        mine = F.pad(logits[row], (0, 0, 0, pad), value=torch.nan)[:, at].requires_grad_()
        own = F.pad(labels[row], (0, pad), value=99)[:, at]
        mean = ra.cross_entropy(mine, own, plan, over=[axis(mesh, "data")])
        mean.backward()
        assert mine.grad.isfinite().all()  # a weight's gradient adds up over padding too
        return mean.detach(), plan.unshard(mine.grad), row

    for mean, grad, row in run(one_rank, data=2, ring=2, ulysses=2):
        torch.testing.assert_close(mean, expected.detach())
        near = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(grad.float(), whole.grad[row], **near)


def test_tokens_are_counted_exactly():
    """float32 holds no 2^24 + 1."""
    losses, counted = (torch.ones((), dtype=x).expand(1, 2**24 + 1) for x in (torch.float64, torch.bool))
    assert loss.mean_over_ranks(1.5 * losses, counted, ra.plan(seq_len=4), ()).item() == 1.5
