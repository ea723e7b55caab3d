"""TRL's GRPOTrainer over ranks, which generate answers to the prompts (the lines of a text) together.

torchrun --nproc-per-node 8 examples/trl_grpo.py MODEL TEXT 8192      # tokens of an answer; then STEPS and OUT
"""

import os
import sys

import torch

if "RANK" not in os.environ:
    sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import ringattn as ra
from ringattn import hf


class LongGRPO(hf.OverRanks, GRPOTrainer): ...


def variety(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]  # your reward: the first rank's counts


def main(name: str, text: str, length: str = "8192", steps: str = "10", out: str = "runs/grpo") -> None:
    args = GRPOConfig(
        out, max_completion_length=int(length), num_generations=4, per_device_train_batch_size=4, max_steps=int(steps),
        logging_steps=1, router_aux_loss_coef=0.0, report_to="none", save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    plan = ra.plan(ra.init_mesh(ring=args.world_size, device_type=args.device.type), seq_len=int(length))
    model = hf.prepare(AutoModelForCausalLM.from_pretrained(name, dtype="auto"), plan)
    LongGRPO(model, variety, args, Dataset.from_text(text).rename_column("text", "prompt")).train()


main(*sys.argv[1:])
