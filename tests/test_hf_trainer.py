"""transformers' Trainer over ranks: its losses are those of one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")
pytest.importorskip("accelerate", reason="accelerate is not installed (pip install '.[hf]')")

pytestmark = pytest.mark.slow


def trained(data: int, batch: int, folder: str) -> list[float]:
    """One rank: the losses of six steps and of an evaluation, with gradients from two batches a step.

    Without data ranks, transformers' own Trainer and model.
    """
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import ringattn as ra
    from ringattn.comms.mesh import axis
    from ringattn.torch import hf

    rank, ranks = dist.get_rank(), dist.get_world_size()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in said.items()})  # as torchrun does; nobody connects

    class LongTrainer(hf.OverRanks, Trainer):
        pass

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape))
    tokens = (torch.arange(50) + torch.randint(0, 64, (32, 1))) % 64
    examples = [{"input_ids": x, "labels": x} for x in tokens]
    if data:
        mesh = ra.init_mesh(data=data, ring=ranks // data)
        model = hf.prepare(model, ra.plan(mesh, seq_len=50), over=(axis(mesh, "data"),))
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, max_steps=6,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1,
        eval_strategy="steps", eval_steps=6, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    kind = LongTrainer if data else Trainer
    trainer = kind(model=model, args=args, train_dataset=examples[:-4], eval_dataset=examples[-4:])
    trainer.train()
    return [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history[:-1]]


def test_losses_over_ring_and_data_ranks_are_those_of_one(tmp_path: Path) -> None:
    """In a process of its own: DistributedDataParallel does not survive TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    script = (
        "import json; from ringattn.launch.processes import run; from test_hf_trainer import trained; "
        "sizes = (1, 0, 2), (1, 1, 2), (4, 2, 1); "
        f"print(json.dumps([run(trained, *size, {str(tmp_path)!r})[0] for size in sizes]))"
    )
    here = Path(__file__).parent
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF", "PYTHONPATH": f"{here.parent}:{here}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, *ours = json.loads(done.stdout.splitlines()[-1])
    assert len(plain) == 7 and plain[5] < plain[0]
    for found in ours:
        np.testing.assert_allclose(found, plain, atol=1e-5)
