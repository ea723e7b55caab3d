"""Fine-tune a transformers model with its Trainer, on sequences that are spread over ranks.

torchrun --nproc-per-node 2 examples/trainer_hf.py               # a tiny random Llama on this script's own text
torchrun --nproc-per-node 8 examples/trainer_hf.py MODEL TEXT 131072      # SEQ_LEN; then STEPS and OUT, a folder
"""

import os
import sys
from pathlib import Path

import torch
from finetune_hf import load
from transformers import Trainer, TrainingArguments

import ringattn as ra
from ringattn import hf


class LongTrainer(hf.OverRanks, Trainer): ...  # whose ranks share each sequence


def main(name: str = "", text: str = __file__, seq_len: str = "512", steps: str = "10", out: str = "runs/hf") -> None:
    args = TrainingArguments(
        out, max_steps=int(steps), per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=1,
        learning_rate=1e-5 if name else 3e-3, bf16=True, use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps", eval_steps=int(steps), save_strategy="no", report_to="none", disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    (model, tokens), length = load(name, Path(text)), int(seq_len)
    examples = [{"input_ids": x, "labels": x} for x in tokens[0, : tokens.shape[1] // length * length].split(length)]
    plan = ra.plan(ra.init_mesh(ring=args.world_size, device_type=args.device.type), seq_len=length)
    trainer = LongTrainer(
        model=hf.prepare(model, plan), args=args, train_dataset=examples[:-1], eval_dataset=examples[-1:]
    )
    trainer.train()
    trainer.accelerator.end_training()  # the ranks leave together


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
    main(*sys.argv[1:])
