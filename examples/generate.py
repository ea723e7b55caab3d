"""Generate text, byte by byte as it comes, with a model that `ringattn train` saved. The cache is spread over ranks.

make train ARGS="run=small save_every=40"
torchrun --nproc-per-node 2 examples/generate.py runs/small "def main(" 200 0.7
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ringattn as ra
from ringattn.conf.schema import Model, Train
from ringattn.launch.train.checkpoint import load_tensors, newest, numbered, read_state
from ringattn.launch.train.model import Decoder
from ringattn.launch.train.parallelize import build
from ringattn.models.nn import Attention, StreamingAttention


def load(run: Path, device: torch.device, max_len: int) -> Decoder:
    """The newest checkpoint of a run that is as it was saved, whole on every rank, its attention made to stream."""
    checkpoint = newest(numbered(run / "checkpoints"))
    if checkpoint is None:
        sys.exit(f'{run} holds no checkpoint yet; make one: make train ARGS="run={run.name} save_every=40"')
    state = read_state(checkpoint)
    model = Model(**{f.name: state[f"model.{f.name}"] for f in fields(Model)})
    decoder = build(Train(model=model), device).eval()
    load_tensors(checkpoint, {name: weight.detach() for name, weight in decoder.named_parameters()})
    for block in decoder.blocks:
        if isinstance(block.attention, Attention):  # linear attention streams as it is
            block.attention = StreamingAttention.of(block.attention, max_len)
    return decoder


def logits(decoder: Decoder, tokens: Tensor, plan: ra.Plan | None = None) -> Tensor:
    """The decoder, with attention that remembers: of a prompt's chunk by `plan`, or of new tokens."""
    x = decoder.embed(tokens)
    for block in decoder.blocks:
        normed = block.attention_norm(x)
        x = x + (block.attention.prefill(normed, plan) if plan else block.attention.step(normed))
        x = x + block.mlp(block.mlp_norm(x))
    return decoder.head(decoder.norm(x))


@torch.no_grad()
def generate(decoder: Decoder, plan: ra.Plan, prompt: Tensor, count: int, warmth: float, chunk: int) -> Iterator[int]:
    """The prompt [1, T] in chunks of which each rank takes its part; then one token after the other, known to all."""
    for tokens in prompt[:, :-1].split(chunk, 1):
        part = plan.for_length(tokens.shape[1])
        logits(decoder, part.shard(tokens), part)
    dice, last = torch.Generator().manual_seed(0), prompt[:, -1:]  # the same dice on every rank
    for _ in range(count):
        scores = logits(decoder, last)[0, -1].double().cpu()
        chosen = torch.multinomial((scores / warmth).softmax(0), 1, generator=dice) if warmth else scores.argmax()
        last = chosen.view(1, 1).to(prompt.device)
        yield int(last)


def main(run: str = "runs/small", prompt: str = "def main(", count: str = "200", warmth: str = "0") -> None:
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    spread = "RANK" in os.environ  # started by torchrun
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if spread:
        dist.init_process_group()
    text = torch.tensor([list(prompt.encode())], device=device)
    mesh = ra.init_mesh(ring=dist.get_world_size(), device_type=device.type) if spread else None
    decoder = load(Path(run), device, text.shape[1] + int(count))
    plan = ra.plan(mesh, seq_len=text.shape[1])
    speaks, out = not spread or dist.get_rank() == 0, sys.stdout.buffer
    if speaks:
        out.write(prompt.encode())
    for byte in generate(decoder, plan, text, int(count), float(warmth), chunk=512):
        if speaks:
            out.write(bytes([byte]))
            out.flush()
    if spread:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
