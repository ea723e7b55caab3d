"""token_mean: the average over the real tokens of all ranks, as a value and as a gradient."""

import pytest
import torch

import ringattn as ra
from ringattn.comms.axis import Solo
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
    assert ra.token_mean(torch.rand(1, 4), plan, mask=torch.zeros(1, 4, dtype=torch.int64)).item() == 0


def test_a_mask_of_one_row_counts_for_every_row():
    losses, mask = torch.rand(8, 16), torch.arange(16)[None] < 5
    for given in (mask, mask[0], mask.expand(8, 16)):
        found = ra.token_mean(losses, ra.plan(seq_len=16), mask=given)
        torch.testing.assert_close(found, losses[:, :5].mean())


@pytest.mark.parametrize("shape", [(3, 4), (2, 3), (1, 2, 4)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=rf"mask has shape \({shape[0]}, .*, losses \(2, 4\)"):
        ra.token_mean(torch.rand(2, 4), ra.plan(seq_len=4), mask=torch.ones(shape) > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_adds_up_in_float32_or_float64(dtype):
    losses = torch.full((1, 131072), 10.0, dtype=dtype, requires_grad=True)
    mean = ra.token_mean(losses, ra.plan(seq_len=131072))
    mean.backward()
    assert mean.item() == 10 and mean.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert losses.grad.dtype == dtype and losses.grad.eq(torch.tensor(1 / 131072, dtype=dtype)).all()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"losses_BT": torch.rand(1, 9)}, "losses has 9 tokens, a rank of this plan holds 4"),
        ({"losses_BT": torch.rand(4).mean()}, r"losses has shape \(\) .*expected a float for each token"),
        ({"losses_BT": torch.ones(1, 4).int()}, "losses has shape .* dtype torch.int32; expected a float"),
        ({"losses_BT": [0.5] * 4}, "losses is of type list; it must be a torch tensor"),
        ({"docs": [8]}, "docs is of type list; say Docs.from_lengths"),
        ({"docs": ra.Docs.from_lengths([6])}, "docs: document lengths add up to 6, the sequence has 8 tokens"),
        ({"docs": ra.Docs.from_lengths([[8]] * 3)}, "docs describes 3 rows, the batch has 2"),
        ({"mask": [True] * 4}, "mask is of type list; it must be a torch tensor"),
        ({"mask": torch.full((2, 4), 0.25)}, r"mask is torch.float32: .* give bools \(mask > 0\) or integers"),
        ({"mask": torch.ones(2, 4, device="meta").bool()}, "mask is on meta, losses on cpu"),
        ({"over": "data"}, r"over='data': a list of axes, such as \[ringattn.comms.mesh.axis\(mesh, 'data'\)\]"),
        ({"over": Solo("data")}, "over=.*: a list of axes"),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else next(iter(x)),
)
def test_what_one_rank_says_wrongly_is_refused_on_all(given, says):
    def one(mesh):
        plan = ra.plan(mesh, seq_len=8)
        call = {"losses_BT": torch.rand(2, 4), "plan": plan}
        with pytest.raises(ValueError, match=rf"{says}.*\(on ring rank 1\)"):
            ra.token_mean(**call | (given if mesh.rank else {}))
        ra.token_mean(**call)
        with pytest.raises(ValueError, match=r"over: ring rank 0 has \['data'\], ring rank 1 has \[\]"):
            ra.token_mean(**call, over=[] if mesh.rank else [Solo("data")])

    run(one, ring=2, timeout=20)


@pytest.mark.parametrize("plan", [None, "x"])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(ValueError, match=r"plan is of type .*; make one with ringattn.plan\(mesh"):
        ra.token_mean(torch.rand(1, 4), plan)
