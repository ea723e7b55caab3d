"""A run counted before anything is tried, for a dry run: a rank's memory at its peak, a step's flops and time.

What grows with the tokens is counted in numbers a token, of the run's precision. The runs of
benchmarks/train-h200.jsonl hold memory to a fifth. A step's time is that of attention as the plan predicts it on the
described machine, and of all other matrix products at the machine's rate; FSDP's transfers are hidden behind them.
"""

import json
from pathlib import Path

import torch

from ringattn.conf.schema import Model, Train
from ringattn.launch.train import data, parallelize
from ringattn.launch.train.checkpoint import about, matching
from ringattn.launch.train.model import GATE_LIMIT, Decoder, head_dim
from ringattn.layouts.balancing import pairs
from ringattn.masks.spec import AttentionSpec
from ringattn.models.pieces import LOGITS, tokens_at_once
from ringattn.plans.machine import ITEMS, Machine, load, of_device
from ringattn.plans.plan import Plan

STATE = 16  # bytes of a weight, its gradient and its two moments, in float32
GRADIENT = 4  # of these, the gradient's, which do not exist yet when backward begins
# Attention and its backward, over q, k, v, out and their gradients (benchmarks/ring-h200.jsonl). cuDNN widens keys to
# all query heads, and each call's gradients come beside their sum.
ATTENTION = {"cudnn": 3.0}
ATTENTION_OF_OTHERS = 1.9
RECOMPUTED = {"none": 0.0, "pointwise": 0.0, "cheap": 0.5, "block": 1.0}  # of the products of forward that run twice


def peak_memory(config: Train, decoder: Decoder, local_len: int, ranks: int) -> float:
    """Bytes at the peak of a rank that holds `local_len` tokens of each sequence and its part of the weights.

    Backward begins with all that was kept and no gradient, and ends the other way round.
    """
    m, tokens = config.model, config.batch * local_len
    itemsize = 2 if config.precision == "bfloat16" else 4
    weights = sum(p.numel() for p in decoder.parameters()) / ranks
    block = sum(p.numel() for p in decoder.blocks[0].parameters())
    whole = 3 * itemsize + 4  # a part's weights and the next one's, whole, its gradient, and that in float32
    logits = m.vocab * min(tokens, config.batch * tokens_at_once(LOGITS, m.vocab, config.batch))
    block_kept = itemsize * tokens * kept(m, config.strategy.recompute)
    here = min(m.layers, 2) if config.strategy.offload else m.layers  # the blocks whose part is not on the host
    block_at_work = itemsize * at_work(config, tokens) + whole * block
    head_at_work = 12 * logits + whole * decoder.head.weight.numel()  # logits, softmax and gradient in float32
    begins, ends = (STATE - GRADIENT) * weights + here * block_kept, STATE * weights + block_kept
    return max(begins + max(block_at_work, head_at_work), ends + block_at_work)


def kept(m: Model, recompute: str) -> int:
    """Numbers a token that a block keeps for its backward pass."""
    heads, keys = head_dim(m) * m.heads, head_dim(m) * m.kv_heads
    return {
        "none": 8 * m.dim + 3 * heads + 4 * m.hidden,
        "pointwise": 2 * m.dim + 2 * heads + 2 * keys + 2 * m.hidden,
        "cheap": m.dim + heads,
        "block": m.dim,
    }[recompute]


def at_work(config: Train, tokens: int) -> float:
    """Numbers that the backward pass of a block's MLP or attention needs, beside what the block kept."""
    m, recompute = config.model, config.strategy.recompute
    heads, keys = head_dim(m) * m.heads, head_dim(m) * m.kv_heads
    in_pieces = recompute in ("cheap", "block")
    gate = min(tokens * m.hidden, GATE_LIMIT) if in_pieces else tokens * m.hidden
    mlp = 3 * (tokens * m.dim + gate)  # activations computed again, their gradients
    numbers = ATTENTION.get(config.strategy.kernel, ATTENTION_OF_OTHERS) * 4 * (heads + keys)
    attention = numbers + 2 * m.dim  # beside the norm's output and the gradient of the other branch
    gone = {"none": 4 * m.hidden + 3 * heads, "pointwise": 2 * m.hidden + heads, "cheap": heads, "block": 0}[recompute]
    return max(mlp, tokens * (attention - gone))  # what the MLP kept is gone by then, and out is counted in `kept`


def step_flops(config: Train, decoder: Decoder, samples: data.Samples, step: int = 0) -> float:
    """Flops of all ranks in a step, forward and backward: 6 a weight and token, 12 a visible pair, head and head dim.

    Linear attention is counted as its recurrence: 12 per token, head and number in a state.
    """
    m, documents = config.model, [config.seq_len] * config.a_step
    if samples.documents:
        drawn = (samples.train(step * config.a_step + i) for i in range(config.a_step))
        documents = [length for sample in drawn for length in sample.lengths(config.seq_len)]
    weights = sum(p.numel() for p in decoder.parameters() if p.dim() > 1) - decoder.embed.weight.numel()
    dim, softmax, tokens = head_dim(m), m.layers // m.softmax_every, sum(documents)
    seen = softmax * pairs(documents, AttentionSpec(window=m.window))
    states = (m.layers - softmax) * tokens * max(1, dim // 2)
    return 6.0 * weights * tokens + 12.0 * dim * m.heads * (seen + states)


def report(config: Train) -> str:
    """The whole report of a dry run that starts no rank; `config` is resolved."""
    m, ranks = config.model, config.nproc or 1
    machine = of_device(config.device) if config.machine is None else load(config.machine)
    if machine.device != config.device:
        raise ValueError(f"machine={config.machine}: it describes {machine.device}, and device={config.device}")
    plan, samples = parallelize.plan_of(config), data.of(config)
    if config.resume not in (None, "auto"):
        matching(Path(config.resume), about(config, samples.corpus))
    decoder = parallelize.build(config, torch.device("meta"))
    memory = peak_memory(config, decoder, plan.local_len, ranks) / 2**30
    room, flops = machine.memory / 2**30, step_flops(config, decoder, samples)
    seconds = step_seconds(config, plan, machine, flops)
    used, rate = flops / ranks / seconds / (machine.products * 1e12), config.a_step * config.seq_len / seconds
    fits = "yes" if memory <= room else "no: more ranks, strategy.recompute or a shorter seq_len"
    rows = {
        "ranks": f"{ranks} on {config.device}, {config.precision}",
        "weights": f"{sum(p.numel() for p in decoder.parameters()) / 1e6:.2f} million in {m.layers} blocks",
        "a step": f"{config.seq_len} tokens x {config.a_step} sequences, {plan.local_len} tokens of each a rank",
        "data": f"{samples.corpus.name}: {len(samples.corpus) / 1e6:.1f} million tokens, {len(samples)} sequences",
        "peak memory": f"about {memory:.3g} GiB a rank: state, what is kept for backward, and what is at work",
        "fits": f"{fits}, {memory:.3g} GiB of {room:.3g} GiB",
        "flops": f"{flops:.3g} a step",
        "predicted": f"{seconds:.3g} s a step on {machine.name}",
        "speed": f"{rate:,.0f} tokens/s, {used:.0%} of what its matrix products reach",
    }
    return "\n".join([*(f"{name:<18} {what}" for name, what in rows.items()), "", plan.explain()])


def step_seconds(config: Train, plan: Plan, machine: Machine, flops: float) -> float:
    """Seconds of a step: attention as predicted, and the other products at the machine's rate."""
    m, best, ranks = config.model, json.loads(plan.explain(json=True))["candidates"][0], config.nproc or 1
    again, layers = RECOMPUTED[config.strategy.recompute], m.layers // m.softmax_every
    calls = layers * config.batch * config.accumulate
    attention = calls * (best["seconds"] + (again == 1.0) * best["forward"]["seconds"])
    seen = calls * config.strategy.data * pairs([config.seq_len], AttentionSpec(window=m.window))
    others = flops - 12.0 * head_dim(m) * m.heads * seen
    slower = ITEMS[config.precision] / 2 if machine.device != "cpu" else 1.0  # float32 products take twice as long
    slower *= machine.crowd(ranks)
    return attention + slower * max(0.0, others) * (1 + again / 3) / ranks / (machine.products * 1e12)
