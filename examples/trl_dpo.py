"""TRL's DPOTrainer on answers that are spread over ranks, as its reference model is.

torchrun --nproc-per-node 8 examples/trl_dpo.py MODEL PAIRS.jsonl 32768      # the longest; then STEPS and OUT, a folder
"""

import os
import sys

import torch

if "RANK" not in os.environ:
    sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import ringattn as ra
from ringattn import hf


class LongDPO(hf.OverRanks, DPOTrainer): ...


def main(name: str, pairs: str, length: str = "32768", steps: str = "10", out: str = "runs/dpo") -> None:
    args = DPOConfig(
        out, max_length=int(length), max_steps=int(steps), per_device_train_batch_size=1, logging_steps=1,
        router_aux_loss_coef=0.0, use_cpu=not torch.cuda.is_available(),
        report_to="none", save_strategy="no",
    )  # fmt: skip
    plan = ra.plan(ra.init_mesh(ring=args.world_size, device_type=args.device.type), seq_len=int(length))
    model, reference = (AutoModelForCausalLM.from_pretrained(name, dtype="auto") for _ in range(2))
    trainer = LongDPO(
        model=hf.prepare(model, plan), ref_model=reference, args=args, train_dataset=Dataset.from_json(pairs),
        processing_class=AutoTokenizer.from_pretrained(name),
    )  # fmt: skip
    trainer.train()


main(*sys.argv[1:])
