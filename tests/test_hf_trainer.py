"""transformers' Trainer over ranks: its losses are those of one rank."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")
pytest.importorskip("accelerate", reason="accelerate is not installed (pip install '.[hf]')")


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "num_hidden_layers": 2, "sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1,
    "attention_dropout": 0.0,
}  # fmt: skip


def rows(n: int) -> list[dict]:
    """Sequences that count up from anywhere, of different lengths, of which only some labels count."""
    torch.manual_seed(1)
    results = []
    for i in range(n):
        tokens = (torch.arange(20 + 7 * (i % 5)) + torch.randint(0, 64, (1,))) % 64
        labels = tokens.clone()
        labels[: i % 11] = -100
        results.append({"input_ids": tokens, "labels": labels})
    return results


def padded(batch: list[dict]) -> dict:
    """The rows of a batch, padded on the right."""
    pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    real = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in batch]
    stack = torch.nn.utils.rnn.pad_sequence
    return {name: stack([row[name] for row in real], True, value) for name, value in pad.items()}


def right(result) -> dict:
    """A metric of all logits, which depends on every example."""
    labels = np.concatenate([x[:, 1:].flatten() for x in result.label_ids])
    best = np.concatenate([x[:, :-1].argmax(-1).flatten() for x in result.predictions])
    return {"right": int(((best == labels) & (labels >= 0)).sum()), "labels": int((labels >= 0).sum())}


def trained(way: str, sizes: tuple[int, int], folder: str, kind: str, steps: int, options: dict) -> list[float]:
    """One rank: losses, norms of gradients and metrics of transformers' Trainer, over data x context-parallel ranks.

    `way` is "plain" (Trainer's own), "prepared" (the model is, and DDP averages), "accelerate" (FSDP2) or "config" (a
    ParallelismConfig on CPUs, which the mixin takes).
    """
    import torch.distributed as dist
    import transformers
    from accelerate import ParallelismConfig, PartialState
    from accelerate.utils import DistributedType
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    import ringattn as ra
    from ringattn.models import hf

    rank, ranks = dist.get_rank(), dist.get_world_size()
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in started.items()})  # as torchrun does; nobody connects

    class LongTrainer(hf.OverRanks, Trainer):
        pass

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    options = dict(options)
    if options.pop("lora", False):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    (data, ring), packed = sizes, kind == "Mistral"
    more: dict = dict(options)
    if way == "accelerate":
        wrap = {"version": 2, "transformer_layer_cls_to_wrap": [f"{kind}DecoderLayer"]}
        sharded = ParallelismConfig(dp_shard_size=data, cp_size=ring)
        more |= {"fsdp": True, "fsdp_config": wrap, "parallelism_config": sharded}
    elif way == "config":
        more["parallelism_config"] = ParallelismConfig(dp_shard_size=data, cp_size=ring)
    elif way == "prepared":
        mesh = ra.init_mesh(data=data, sequence=ring)
        model = hf.prepare(model, mesh, over=("data",))
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4 // data, per_device_eval_batch_size=4 // data,
        max_steps=steps, gradient_accumulation_steps=2, learning_rate=3e-3, lr_scheduler_type="constant",
        logging_steps=1, eval_strategy="steps", eval_steps=steps, save_strategy="no", report_to="none",
        disable_tqdm=True, eval_do_concat_batches=False, train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False, **more,
    )  # fmt: skip
    if way == "accelerate":  # which knows FSDP2 on GPUs only; gloo carries it
        assert args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = (Trainer if way == "plain" else LongTrainer)(
        model=model, args=args, train_dataset=rows(24), eval_dataset=rows(5 - packed), compute_metrics=right,
        data_collator=DataCollatorWithFlattening() if packed else padded,
    )  # fmt: skip
    trainer.train()
    names = "loss", "grad_norm", "eval_loss", "eval_right", "eval_labels"
    return [row[name] for row in trainer.state.log_history for name in names if name in row]


TRAINED = {  # the model, steps, options, and ways over two data times two context-parallel ranks
    "padded": ("GptOss", 3, {}, ("prepared", "accelerate")),  # windows and sinks
    "packed": ("Mistral", 3, {}, ("accelerate",)),
    "adapters": ("Llama", 4, {"lora": True, "activation_checkpointing": True}, ("accelerate",)),
    "cpus": ("Llama", 2, {}, ("config",)),
}  # compiled ones are in test_matrix.py


def all_trained(folder: str) -> dict[str, list[list[float]]]:
    """One rank: what one rank alone finds, or each way over four; with state of accelerate's anew."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    alone, results = dist.get_world_size() == 1, {}
    for name, (kind, steps, options, ways) in TRAINED.items():
        for way in ("plain",) if alone else ways:
            AcceleratorState._reset_state(reset_partial_state=True)
            sizes = (1, 1) if alone else (2, 2)
            results.setdefault(name, []).append(trained(way, sizes, folder, kind, steps, options))
    AcceleratorState._reset_state(reset_partial_state=True)
    return results


@pytest.mark.slow
def test_losses_over_ranks_are_those_of_one(tmp_path: Path) -> None:
    """In a process of its own: DistributedDataParallel does not survive TORCH_DISTRIBUTED_DEBUG=DETAIL.

    Its ranks are forked with transformers imported: to import it takes longer than what is trained.
    """
    preload = "transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "peft"
    script = (
        "import json, test_hf_trainer as test; from ringattn.launch.processes import run; print(json.dumps("
        f"[run(test.all_trained, n, {str(tmp_path)!r}, preload={preload})[0] for n in (1, 4)]))"
    )
    here = Path(__file__).parent
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF", "PYTHONPATH": f"{here.parent}:{here}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    single, spread = json.loads(done.stdout.splitlines()[-1])
    assert {*single} == {*TRAINED} == {*spread}
    for name, (plain,) in single.items():
        every = 2 * TRAINED[name][1]  # a loss and a norm of each step
        assert len(plain) == every + 3 and min(plain[:every:2]) < plain[0], name
        for results in spread[name]:
            np.testing.assert_allclose(results[:every:2], plain[:every:2], atol=1e-5, err_msg=name)  # losses
            np.testing.assert_allclose(results, plain, atol=1e-4, err_msg=name)


def examples(n: int = 7) -> list[dict]:
    """Each says which it is, and has a column that the model does not know."""
    rows = torch.arange(n)[:, None].expand(n, 10)
    return [{"input_ids": x, "labels": x, "text_id": x[0]} for x in rows]


def llama(kind: str = "LlamaForCausalLM", layers: int = 1, **more):
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return getattr(transformers, kind)(
        transformers.LlamaConfig(vocab_size=16, num_hidden_layers=layers, **shape, **more)
    )


def quiet(folder: Path, **more):
    from transformers import TrainingArguments

    return TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **more)


def trainer_of(folder: Path, dataset=None, over=(), **arguments):
    """A trainer on this rank alone, which notes what its model is given."""
    from transformers import Trainer

    import ringattn as ra
    from ringattn.models import hf

    class LongTrainer(hf.OverRanks, Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(inputs["input_ids"][:, 0].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    seen: list[list[int]] = []
    model = hf.prepare(llama(), ra.plan(seq_len=10), over=over)
    arguments = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "save_strategy": "no", **arguments}
    mine = {name: arguments.pop(name) for name in ("compute_loss_func",) if name in arguments}
    args = quiet(folder, **arguments)
    trainer = LongTrainer(model=model, args=args, train_dataset=examples() if dataset is None else dataset, **mine)
    trainer.seen = seen
    return trainer


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("hidden", [False, True])
def test_predictions_are_those_of_one_rank_with_and_without_labels(tmp_path: Path, kind: str, hidden: bool) -> None:
    import transformers

    import ringattn as ra
    from ringattn.comms.local import run
    from ringattn.models import hf

    class LongTrainer(hf.OverRanks, transformers.Trainer):
        pass

    model, args = llama(kind, layers=2, output_hidden_states=hidden), quiet(tmp_path)
    tokens = torch.randint(0, 16, (3, 10))
    batches = [{"input_ids": tokens}, {"input_ids": tokens, "labels": None}]
    if kind == "LlamaForCausalLM":
        batches += [{"input_ids": tokens, "labels": tokens}]

    def steps(trainer) -> list:
        return [trainer.prediction_step(trainer.model, dict(b), only) for b in batches for only in (False, True)]

    def one_rank(mesh):
        copied = hf.prepare(copy.deepcopy(model), ra.plan(mesh, seq_len=16))
        return steps(LongTrainer(model=copied, args=args))

    expected = steps(transformers.Trainer(model=copy.deepcopy(model), args=args))
    for result in run(one_rank, ring=2, ulysses=2 if kind == "LlamaModel" else 1):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_class_that_takes_means_gets_the_mean_of_each_data_ranks_batch(tmp_path: Path) -> None:
    """Trainer divides by the steps that it accumulates then: Qwen2.5-VL, Gemma 3 and others (accepts_loss_kwargs)."""
    import transformers

    from ringattn.comms import mesh as meshes
    from ringattn.comms.local import run
    from ringattn.models import hf

    class LongTrainer(hf.OverRanks, transformers.Trainer):
        pass

    model, args = llama(), quiet(tmp_path)
    model.accepts_loss_kwargs = False  # as some classes have it
    tokens = torch.randint(0, 16, (2, 3, 10))
    labels = tokens.clone()
    labels[0, :, 2:] = -100
    batches = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]

    def one_rank(mesh):
        mine = hf.prepare(copy.deepcopy(model), mesh, over=("data",))
        trainer = LongTrainer(model=mine, args=args)
        batch = batches[meshes.axis(mesh, "data").rank]
        assert not trainer.model_accepts_loss_kwargs
        loss = trainer.compute_loss(mine, batch, num_items_in_batch=trainer._get_num_items_in_batch([batch], "cpu"))
        loss.backward()
        return loss.detach(), mine.lm_head.weight.grad

    expected = sum(model(**batch).loss for batch in batches) / 2
    expected.backward()
    losses, gradients = zip(*run(one_rank, data=2, ring=2), strict=True)
    torch.testing.assert_close(torch.stack(losses), expected.detach().expand(4))
    torch.testing.assert_close(sum(gradients), model.lm_head.weight.grad)


def test_every_epoch_has_its_own_order_and_a_restart_goes_on_with_it(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path, save_strategy="steps", save_steps=6)
    whole.train()
    epochs = [[i for batch in whole.seen[at : at + 4] for i in batch] for at in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = trainer_of(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.seen == whole.seen[6:]


def test_loading_works_as_documented(tmp_path: Path) -> None:
    ordered = trainer_of(tmp_path, train_sampling_strategy="sequential", num_train_epochs=1, dataloader_drop_last=True)
    ordered.train()
    assert ordered.seen == [[0, 1], [2, 3], [4, 5]]  # and nobody asked the model about text_id
    options = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = trainer_of(
        tmp_path, **{f"dataloader_{name}": value for name, value in options.items()}
    ).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert "text_id" in next(iter(trainer_of(tmp_path, remove_unused_columns=False).get_train_dataloader()))


class Stream(torch.utils.data.IterableDataset):
    """Examples without a length, which begin elsewhere in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(examples()[self.epoch :])


def test_a_stream_is_read_by_all_ranks_of_a_plan_and_dealt_out_to_data_ranks(tmp_path: Path) -> None:
    streaming = trainer_of(tmp_path, Stream(), max_steps=6)
    streaming.train()
    assert streaming.seen == [[0, 1], [2, 3], [4, 5], [6], [1, 2], [3, 4]]
    second = SimpleNamespace(size=2, rank=1)
    loader = trainer_of(tmp_path, Stream(), (second,), max_steps=1).get_train_dataloader()
    assert next(iter(loader))["input_ids"][:, 0].tolist() == [2, 3]


def with_context(size: int | None, **options) -> None:
    """An accelerator of so many context-parallel ranks, to be spread over them."""
    from ringattn.models import hf

    config = None if size is None else SimpleNamespace(cp_size=size)
    hf.over_ranks(SimpleNamespace(parallelism_config=config), **options)


NO_LABELS = [{"input_ids": torch.arange(10)}] * 2
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
REFUSED = [  # what a user does in a folder, and a part of the error's message
    (lambda _: with_context(None), "this SimpleNamespace has no context parallelism; make it with"),
    (lambda _: with_context(4, ulysses=3), "ulysses=3: choose a whole number that divides cp_size=4"),
    (lambda folder: trainer_of(folder, **BY_LENGTH).train(), "deals out examples by their lengths"),
    (lambda folder: trainer_of(folder, NO_LABELS).train(), "there are no labels among input_ids, so there is no loss"),
    (lambda folder: trainer_of(folder, label_smoothing_factor=0.5).train(), "a label_smoother, which needs all logits"),
    (lambda folder: trainer_of(folder, compute_loss_func=print).train(), "a compute_loss_func, which needs all logits"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_over_ranks_cannot_do_is_refused(tmp_path: Path, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(tmp_path)
