"""TRL's SFTTrainer on packed documents that are spread over ranks, with sliding windows and sinks too (gpt-oss).

torchrun --nproc-per-node 8 examples/trl_sft.py MODEL TEXT 32768      # tokens of a pack; then STEPS and OUT, a folder
"""

import os
import sys
from pathlib import Path

import torch

if "RANK" not in os.environ:
    sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import ringattn as ra
from ringattn import hf


class LongSFT(hf.OverRanks, SFTTrainer): ...


def main(name: str, text: str, length: str = "32768", steps: str = "10", out: str = "runs/sft") -> None:
    args = SFTConfig(
        out, packing=True, max_length=int(length), max_steps=int(steps), per_device_train_batch_size=1, logging_steps=1,
        router_aux_loss_coef=0.0, use_cpu=not torch.cuda.is_available(),
        report_to="none", save_strategy="no",
    )  # fmt: skip
    plan = ra.plan(ra.init_mesh(ring=args.world_size, device_type=args.device.type), seq_len=int(length))
    model = hf.prepare(AutoModelForCausalLM.from_pretrained(name, dtype="auto"), plan)
    data = Dataset.from_dict({"text": Path(text).read_text().split("\n\n")})
    trainer = LongSFT(model=model, args=args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(name))
    trainer.train()


main(*sys.argv[1:])
