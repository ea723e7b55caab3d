"""A dry run: what a training would take, on any number of ranks, none of which is started.

Memory is `estimate`'s; a step's time is that of attention as the plan predicts it on the described machine, and of all
other matrix products at the machine's rate. What FSDP moves is assumed to be hidden behind them.
"""

import json
from pathlib import Path

import torch

from ringattn.conf.schema import Train
from ringattn.launch.train import data, estimate, parallelize
from ringattn.launch.train.checkpoint import about, matching
from ringattn.launch.train.model import head_dim
from ringattn.plans.machine import ITEMS, Machine, load, of_device
from ringattn.plans.plan import Plan

AGAIN = {"none": 0.0, "pointwise": 0.0, "cheap": 0.5, "block": 1.0}  # of the products of forward that run twice


def report(config: Train) -> str:
    """The whole report of a dry run that starts no rank; `config` is resolved."""
    m, s, ranks = config.model, config.strategy, config.nproc or 1
    machine, plan, samples = machine_of(config), parallelize.plan_of(config), data.of(config)
    if config.resume not in (None, "auto"):
        matching(Path(config.resume), about(config, samples.corpus))
    decoder = parallelize.build(m, config.seed, torch.device("meta"), recompute=s.recompute, precision=config.precision)
    a_step = config.batch * config.accumulate * s.data
    lengths = [samples.train(i).lengths(config.seq_len) for i in range(a_step)] if samples.documents else None
    flops = sum(estimate.train_flops(m, n) for n in lengths or [[config.seq_len]] * a_step)
    memory = estimate.peak_memory(config, decoder, plan.local_len, ranks)
    seconds = step_seconds(config, plan, machine, flops)
    used = flops / ranks / seconds / (machine.products * 1e12)
    fits = "yes" if memory <= machine.memory else "no: more ranks, strategy.recompute or a shorter seq_len"
    rows = {
        "ranks": f"{ranks} on {config.device}, {config.precision}",
        "weights": f"{sum(p.numel() for p in decoder.parameters()) / 1e6:.2f} million in {m.layers} blocks",
        "a step": f"{config.seq_len} tokens x {a_step} sequences, {plan.local_len} tokens of each a rank",
        "data": f"{samples.corpus.name}: {len(samples.corpus) / 1e6:.1f} million tokens, {len(samples)} sequences",
        "peak memory": f"about {in_words(memory)} a rank: state, what is kept for backward, and what is at work",
        "fits": f"{fits}, {in_words(memory)} of {in_words(machine.memory)}",
        "flops": f"{flops:.3g} a step",
        "predicted": f"{seconds:.3g} s a step on {machine.name}",
        "speed": f"{a_step * config.seq_len / seconds:,.0f} tokens/s, {used:.0%} of what its matrix products reach",
    }
    return "\n".join([*(f"{name:<18} {what}" for name, what in rows.items()), "", plan.explain()])


def in_words(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def step_seconds(config: Train, plan: Plan, machine: Machine, flops: float) -> float:
    """Seconds of a step: attention as predicted, and the other products at the machine's rate."""
    m, best, ranks = config.model, json.loads(plan.explain(json=True))["candidates"][0], config.nproc or 1
    again = AGAIN[config.strategy.recompute]
    calls = m.layers // m.softmax_every * config.batch * config.accumulate
    attention = calls * (best["seconds"] + (again == 1.0) * best["forward"]["seconds"])
    pairs = estimate.visible(config.seq_len, m.window or config.seq_len) * config.batch * config.accumulate
    inner = head_dim(m) * m.heads * config.strategy.data
    others = flops - 12.0 * inner * (m.layers // m.softmax_every) * pairs
    slower = ITEMS[config.precision] / 2 if machine.device != "cpu" else 1.0  # float32 products take twice as long
    slower *= machine.crowd(ranks)
    return attention + slower * max(0.0, others) * (1 + again / 3) / ranks / (machine.products * 1e12)


def machine_of(config: Train) -> Machine:
    machine = of_device(config.device) if config.machine is None else load(config.machine)
    if machine.device != config.device:
        raise ValueError(f"machine={config.machine}: it describes {machine.device}, and device={config.device}")
    return machine
