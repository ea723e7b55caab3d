"""What recomputation keeps waits on the host: the same bits, and when it leaves and comes back."""

import dataclasses
import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hf_ranks import gradients
from test_hf import T, batch, build
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ringattn as ra
from ringattn import hf
from ringattn.comms.local import run
from ringattn.conf import schema
from ringattn.launch.train import estimate, parallelize
from ringattn.models import offload
from tests.launched import launched
from tests.training import TINY, over, where

AGAIN = {
    "all": {"use_reentrant": False},
    "all but attention": {"use_reentrant": False, "context_fn": hf.keep_attention},
    "reentrant": {"use_reentrant": True},
}
PACKED = {"position_ids": torch.tensor([[*range(20), *range(T - 20)]]).expand(2, T)}


def kept_now() -> list[list[bool]]:
    """Of each layer that ran, from the last one on: which of its tensors have left."""
    layers, layer = [], offload.LATEST.get()()
    while layer is not None:
        layers.append([place.val is None for place in layer.places])
        layer = layer.before()
    return layers


@pytest.mark.parametrize("more", [{}, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("again", [*AGAIN, "wrapper"])
def test_losses_and_gradients_have_the_same_bits(again, more):
    """Of two ranks that accumulate over two batches; what accelerate puts around layers is a wrapper of torch."""
    single, results = build("Qwen3"), {}

    def one_rank(mesh, on):
        model = hf.prepare(deepcopy(single), mesh, offload=on).train()
        if again == "wrapper":
            model.model.layers = torch.nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
        else:
            model.gradient_checkpointing_enable(AGAIN[again])
        functions = [vars(m).get(n) for m in model.modules() for n in ("checkpoint_fn", "_gradient_checkpointing_func")]
        losses = []
        for ids in (batch(), batch().flip(1)):
            loss = model(ids, labels=ids, **more).loss
            left = [all(layer) for layer in kept_now()]
            assert left == ([False, True] if on else []), left  # of both layers the last one is still there
            loss.backward()
            losses.append(loss.detach())
            assert kept_now() == []
        now = [vars(m).get(n) for m in model.modules() for n in ("checkpoint_fn", "_gradient_checkpointing_func")]
        assert now == functions
        with torch.no_grad():
            model(batch())
        model.eval().generate(batch()[:, :5], max_new_tokens=2, do_sample=False)
        return losses, gradients(model)

    for on in (False, True):
        results[on] = run(lambda mesh, on=on: one_rank(mesh, on), sequence=2)
    for (losses, grads), (expected, plain) in zip(results[True], results[False], strict=True):
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert all(torch.equal(grads[name], plain[name]) for name in plain)


def test_a_layer_is_fetched_while_the_one_after_it_is_recomputed(monkeypatch):
    """With its attention, which is where the recomputation looks for it, and not attended to again."""
    seen, give = [], offload.Layer.give

    def giving(layer, kept):
        x = give(layer, kept)
        if layer is kept:
            seen.append((len(layer.host), layer.before() and [place.val is None for place in layer.before().places]))
        return x

    monkeypatch.setattr(offload.Layer, "give", giving)
    model = hf.prepare(build("Llama", num_hidden_layers=3), ra.plan(seq_len=T), offload=True).train()
    model.gradient_checkpointing_enable(AGAIN["all but attention"])
    loss = model(batch(), labels=batch()).loss
    last, *others = kept_now()
    assert len(last) > 1 and not any(last) and all(map(all, others)) and len(others) == 2
    loss.backward()
    count = len(last)
    assert seen == [(count, [False] * count), (count, [False] * count), (count, None)]


@pytest.mark.parametrize("how", ["kept", "compiled", "layers compiled"])
def test_layers_that_are_not_recomputed_or_are_compiled_are_refused(how):
    call = model = hf.prepare(build("Llama"), ra.plan(seq_len=T), offload=True).train()
    if how != "kept":
        model.gradient_checkpointing_enable(AGAIN["all"])
    if how == "layers compiled":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    elif how == "compiled":
        call = torch.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match=r"takes model.gradient_checkpointing_enable\(\), and no torch.compile"):
        call(batch(), labels=batch())


def test_training_from_the_host_has_the_same_losses_and_less_on_the_device(tmp_path):
    ways = {recompute: where(recompute=recompute) for recompute in ("cheap", "block")}
    ways |= {f"{name} host": where(recompute=name, offload=True) for name in ways}
    losses = over(2, {name: dataclasses.replace(way, accumulate=2, steps=2) for name, way in ways.items()}, tmp_path)
    assert losses["cheap host"] == losses["cheap"] and losses["block host"] == losses["block"]
    many = [dataclasses.replace(way, seq_len=2**16, model=dataclasses.replace(TINY.model, layers=20))
            for way in (ways["block"], ways["block host"])]  # fmt: skip
    here, host = (estimate.peak_memory(way, parallelize.build(way, torch.device("meta")), 2**15, 2) for way in many)
    assert here - host == pytest.approx(18 * 4 * 2**15 * TINY.model.dim)  # of the inputs of 20 blocks two stay
    for wrong in (where(offload=True), dataclasses.replace(ways["cheap host"], compile=True)):
        with pytest.raises(ValueError, match=r"takes strategy\.recompute=cheap or block, and"):
            schema.check(wrong)


@pytest.mark.slow
def test_the_benchmark_of_a_whole_model_runs_on_cpus(tmp_path):
    script = Path(__file__).parent.parent / "benchmarks" / "qwen3_8b.py"
    words = ["tokens=96", "layers=3", f"out={tmp_path}/rows.jsonl", "documents=24", "window=9", "recompute=all"]
    launched(script, words, 2, tmp_path)
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["losses"][-1] < row["losses"][0] and len(row["times_s"]) == 3 and row["layers"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("again", AGAIN)
def test_on_a_gpu_memory_falls_by_what_the_layers_keep(again):
    """The peak too, which is in forward, as tokens are many and the rest is small; gradients are the same twice."""
    layers, tokens, more = 12, 2**15, {"hidden_size": 512, "max_position_embeddings": 2**15}
    found = {}
    for on in (False, True):
        model = build("Llama", num_hidden_layers=layers, **more).to("cuda", torch.bfloat16).train()
        model = hf.prepare(hf.in_pieces(model), ra.plan(seq_len=tokens, kernel="triton"), offload=on)
        model.gradient_checkpointing_enable(AGAIN[again])
        ids = torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):  # the second one reuses the pinned memory of the first
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = model(ids, labels=ids).loss
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        found[on] = kept, torch.cuda.max_memory_allocated(), loss.detach(), gradients(model)
    (kept, peak, loss, grads), (less, lower, same, others) = found[False], found[True]
    gone = (layers - 1) * tokens * 512 * 2
    assert kept - less >= 0.99 * gone and peak - lower >= 0.7 * gone, (kept, less, peak, lower, gone)
    torch.testing.assert_close((loss, grads), (same, others))
