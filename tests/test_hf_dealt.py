"""Packed and padded batches of a prepared model: documents are dealt out, and all numbers are those of one rank."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hf_ranks import same, trained
from test_hf import build
from torch._dynamo.testing import CompileCounterWithBackend

import ringattn as ra
from ringattn import hf
from ringattn.comms.local import run
from ringattn.launch.processes import run as run_processes

T = 40


def packed():
    """One row of documents by positions, as DataCollatorWithFlattening makes it."""
    lengths = [17, 1, 9, 13]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = torch.randint(0, 64, (1, T), generator=torch.Generator().manual_seed(1))
    labels[positions == 0] = -100
    return {"position_ids": positions}, labels, None


def padded():
    """Rows padded on either side."""
    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, 22:], mask[1, :9] = 0, 0
    no_label = torch.diff(mask, dim=1, prepend=mask[:, :1]) == 1  # padding would predict the first real token
    labels = torch.randint(0, 64, (3, T), generator=torch.Generator().manual_seed(2))
    return {"attention_mask": mask}, labels.masked_fill((mask == 0) | no_label, -100), mask.bool()


def rows_packed_differently():
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([30, 10], [5, 15, 20])])
    labels = torch.randint(0, 64, (2, T), generator=torch.Generator().manual_seed(3))
    return {"position_ids": positions}, labels.masked_fill(positions == 0, -100), None


@pytest.mark.parametrize("batch", [packed, padded, rows_packed_differently], ids=lambda b: b.__name__)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_documents_are_dealt_out_and_the_numbers_are_those_of_one_rank(name, batch):
    given, labels, real = batch()
    tokens = torch.randint(0, 64, labels.shape, generator=torch.Generator().manual_seed(0))
    plain = build(name)
    copies = [deepcopy(plain) for _ in range(4)]
    expected = plain(tokens, labels=labels, use_cache=False, **given)
    expected.loss.backward()

    def one_rank(mesh):
        mine = hf.prepare(copies[mesh.rank], mesh, seq_len=T)
        loss, logits, grads = trained(mine, input_ids=tokens, labels=labels, **given)
        plan = mine.ringattn_last.plan
        assert plan.layout == "balanced" and plan.seq_len == (labels.numel() if real is None else int(real.sum()))
        local = mine(tokens, **given).logits  # without labels: every row as it is
        assert local.shape[:2] == (len(tokens), hf.plan_of(mine).local_len)
        return (loss, logits, grads), (loss, hf.whole(mine, local.detach()), grads)

    for results in zip(*run(one_rank, ring=2, ulysses=2), strict=True):
        same(results, expected.loss, plain, expected.logits, ... if real is None else real)


@pytest.mark.parametrize("batch", [packed, rows_packed_differently], ids=lambda b: b.__name__)
def test_a_hybrid_of_linear_layers_that_is_dealt_out_has_the_numbers_of_zigzag(batch):
    given, labels, _ = batch()
    tokens, plain = torch.randint(0, 64, labels.shape, generator=torch.Generator().manual_seed(0)), build("Qwen3_5")
    copies = [deepcopy(plain) for _ in range(6)]

    def one_rank(mesh):
        outputs = []
        for i, layout in enumerate(("balanced", "zigzag")):
            mine = hf.prepare(copies[3 * i + mesh.rank], ra.plan(mesh, seq_len=T, layout=layout))
            outputs.append(trained(mine, input_ids=tokens, labels=labels, **given))
            assert getattr(mine.ringattn_last, "plan", mine.ringattn_last).layout == layout
        return outputs

    dealt, named = zip(*run(one_rank, ring=3), strict=True)
    sums = {n: sum(grads[n] for *_, grads in named) for n in named[0][2]}
    for name, grad in sums.items():
        torch.testing.assert_close(sum(grads[name] for *_, grads in dealt), grad, atol=1e-5, rtol=1e-4, msg=name)
    assert [loss for loss, *_ in dealt] == pytest.approx([loss for loss, *_ in named], abs=1e-5)


def batches():
    """Ten batches that are packed differently, then ten whose padding leaves ever more tokens."""
    draw = torch.Generator().manual_seed(0)
    for i in range(20):
        tokens = torch.randint(3, 64, (1 + i // 10, T), generator=draw)
        given = {"input_ids": tokens, "labels": tokens.clone()}
        if i < 10:
            edges = [0, *sorted(torch.randperm(T - 1, generator=draw)[: 2 + i % 4].add(1).tolist()), T]
            positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
            given["position_ids"] = positions[None]
            given["labels"][given["position_ids"] == 0] = -100
        else:
            given["attention_mask"] = torch.ones_like(tokens)
            given["attention_mask"][1, i:] = 0
            given["labels"][given["attention_mask"] == 0] = -100
        yield given


def compiled_over_ranks():
    """(how often a layer was compiled so far, the layout, the largest error beside one rank) of each batch."""
    counter = CompileCounterWithBackend("aot_eager")
    single, results = build("Llama"), []
    model = hf.prepare(deepcopy(single), ra.init_mesh(ring=2, ulysses=dist.get_world_size() // 2, device_type="cpu"))
    for layer in model.model.layers:
        layer.compile(backend=counter)
    for given in batches():
        losses = []
        for each in (single, model):
            each.zero_grad()
            losses.append(each(**given, use_cache=False).loss)
            losses[-1].backward()
        worst = abs(float(losses[0].detach() - losses[1].detach()))
        for mine, expected in zip(model.parameters(), single.parameters(), strict=True):
            dist.all_reduce(mine.grad)
            worst = max(worst, float((mine.grad - expected.grad).abs().max()))
        results.append((counter.frame_count, model.ringattn_last.plan.layout, worst))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.compile)])
def test_compiled_layers_take_a_plan_a_batch(ranks):
    """Once for the first batch, and once for other numbers of documents or tokens."""
    counts, layouts, errors = zip(*run_processes(compiled_over_ranks, ranks)[0], strict=True)
    assert counts[9] <= 2 and counts[19] <= 4, counts
    assert set(layouts) == {"balanced"} and max(errors) < 2e-6
