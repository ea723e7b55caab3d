"""Fine-tune a transformers model with its Trainer, on sequences that are spread over ranks.

torchrun --nproc-per-node 2 examples/trainer_hf.py               # a tiny random Llama on this script's own text
torchrun --nproc-per-node 8 examples/trainer_hf.py MODEL TEXT 131072      # SEQ_LEN; then STEPS and OUT, a folder
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer import Trainer, TrainingArguments

import ringattn as ra
from ringattn import hf


class LongTrainer(hf.OverRanks, Trainer): ...  # whose ranks share each sequence


def load(name: str, text: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A pretrained model and the text's tokens; or a tiny model over bytes."""
    if name:
        tokens = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), tokens
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **shape))
    return model, torch.tensor(list(text.encode()))


def main(name: str = "", text: str = __file__, seq_len: str = "512", steps: str = "10", out: str = "runs/hf") -> None:
    if not Path(text).is_file():
        sys.exit(f"{text} is no file: trainer_hf.py MODEL TEXT SEQ_LEN STEPS OUT")
    args = TrainingArguments(
        out, max_steps=int(steps), per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=1,
        learning_rate=1e-5 if name else 3e-3, bf16=True, use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps", eval_steps=int(steps), save_strategy="no", report_to="none", disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    model, tokens = load(name, Path(text).read_text())
    length = int(seq_len)
    examples = [{"input_ids": x, "labels": x} for x in tokens[: len(tokens) // length * length].split(length)]
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
