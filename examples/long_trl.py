"""TRL's trainers on sequences that are spread over ranks.

torchrun --nproc-per-node 8 examples/long_trl.py sft MODEL TEXT 32768        # packs of a text's paragraphs
torchrun --nproc-per-node 8 examples/long_trl.py dpo MODEL PAIRS.jsonl 32768 # the longest pair
torchrun --nproc-per-node 8 examples/long_trl.py grpo MODEL TEXT 8192        # prompts are lines; answers of 8192 tokens

Then STEPS and OUT, a folder. DPO's reference model is spread too; ranks generate GRPO's answers together.
"""

import os
import sys
from pathlib import Path

import torch

if "RANK" not in os.environ:
    sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import ringattn as ra
from ringattn import hf


class LongSFT(hf.OverRanks, trl.SFTTrainer): ...


class LongDPO(hf.OverRanks, trl.DPOTrainer): ...


class LongGRPO(hf.OverRanks, trl.GRPOTrainer): ...


def variety(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]  # your reward: the first rank's counts


def main(kind: str, name: str, data: str, length: str, steps: str = "10", out: str = "runs/trl") -> None:
    how = {
        "max_steps": int(steps), "logging_steps": 1, "per_device_train_batch_size": 1, "router_aux_loss_coef": 0.0,
        "use_cpu": not torch.cuda.is_available(), "report_to": "none", "save_strategy": "no",
    }  # fmt: skip
    if kind == "sft":
        args = trl.SFTConfig(out, packing=True, max_length=int(length), **how)
    elif kind == "dpo":
        args = trl.DPOConfig(out, max_length=int(length), **how)
    else:
        how |= {"num_generations": 4, "per_device_train_batch_size": 4}
        args = trl.GRPOConfig(out, max_completion_length=int(length), **how)
    plan = ra.plan(ra.init_mesh(ring=args.world_size, device_type=args.device.type), seq_len=int(length))
    model, reference = (AutoModelForCausalLM.from_pretrained(name, dtype="auto") for _ in range(2))
    given = {"model": hf.prepare(model, plan), "args": args, "processing_class": AutoTokenizer.from_pretrained(name)}
    if kind == "sft":
        texts = Dataset.from_dict({"text": Path(data).read_text().split("\n\n")})
        LongSFT(**given, train_dataset=texts).train()
    elif kind == "dpo":
        LongDPO(**given, ref_model=reference, train_dataset=Dataset.from_json(data)).train()
    else:
        prompts = Dataset.from_text(data).rename_column("text", "prompt")
        LongGRPO(**given, reward_funcs=variety, train_dataset=prompts).train()


main(*sys.argv[1:])
