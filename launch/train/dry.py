"""A dry run: what a training would take, on any number of ranks, none of which is started.

Memory is `estimate`'s; a step's time is that of attention as the plan predicts it on the described machine, and of all
other matrix products at the machine's rate. What FSDP moves is assumed to be hidden behind them.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from ringattn.conf.schema import Train
from ringattn.launch.train import data, estimate, model, parallelize
from ringattn.launch.train.checkpoint import about, matching
from ringattn.plans.machine import ITEMS, Machine, load, of_device
from ringattn.plans.plan import Plan

RECOMPUTES = ("none", "pointwise", "cheap", "block")  # less and less is kept
AGAIN = {"none": 0.0, "pointwise": 0.0, "cheap": 0.5, "block": 1.0}  # of the products of forward that run twice


def machine_of(config: Train) -> Machine:
    machine = of_device(config.device) if config.machine is None else load(config.machine)
    if machine.device != config.device:
        raise ValueError(f"machine={config.machine}: it describes {machine.device}, and device={config.device}")
    return machine


def decoder_of(config: Train) -> model.Decoder:
    """The decoder without its weights."""
    return parallelize.build(
        config.model, config.seed, torch.device("meta"), recompute=config.strategy.recompute, precision=config.precision
    )


def report(config: Train) -> str:
    """The whole report of a dry run that starts no rank; `config` is resolved."""
    machine, decoder, ranks = machine_of(config), decoder_of(config), config.nproc or 1
    plan = parallelize.plan_of(config)
    samples = data.of(config)
    if config.resume not in (None, "auto"):
        matching(Path(config.resume), about(config, samples.corpus))
    a_step = config.batch * config.accumulate * config.strategy.data
    lengths = [samples.train(i).lengths(config.seq_len) for i in range(a_step)] if samples.documents else None
    flops = sum(estimate.train_flops(config.model, n) for n in lengths or [[config.seq_len]] * a_step)
    rows = shapes(config, decoder, plan, samples, ranks, flops)
    rows += predicted(config, decoder, plan, machine, ranks, flops)
    return "\n".join([*(f"{name:<18} {what}" for name, what in rows), "", plan.explain()])


def shapes(
    config: Train, decoder: model.Decoder, plan: Plan, samples: data.Samples, ranks: int, flops: float
) -> list[tuple[str, str]]:
    """The rows about sizes and memory."""
    weights = sum(p.numel() for p in decoder.parameters())
    memory = estimate.needs(config, decoder, plan.local_len, ranks)
    corpus, a_step = samples.corpus, config.batch * config.accumulate * config.strategy.data
    return [
        ("ranks", f"{ranks} on {config.device}, {config.precision}"),
        ("weights", f"{weights / 1e6:.2f} million in {config.model.layers} blocks"),
        ("a step", f"{config.seq_len} tokens x {a_step} sequences, {plan.local_len} tokens of each a rank"),
        ("data", f"{corpus.name}: {len(corpus) / 1e6:.1f} million tokens, {len(samples)} sequences"),
        ("state", f"{in_words(memory.state)} a rank: float32 weights, gradients, two moments"),
        ("kept for backward", f"about {in_words(memory.kept)} a rank"),
        ("a block at work", f"about {in_words(memory.block_at_work)} a rank"),
        (
            "logits at work",
            f"about {in_words(memory.head_at_work)} a rank: in float32, with softmax, gradient and weights",
        ),
        ("peak", f"about {in_words(memory.most)} a rank: block and logits are not alive together"),
        ("flops", f"{flops:.3g} a step"),
    ]


def in_words(size: float) -> str:
    """Bytes in the unit that is read most easily."""
    unit, name = next(((2**n, name) for n, name in ((30, "GiB"), (20, "MiB")) if size >= 2**n / 2), (2**10, "KiB"))
    return f"{size / unit:.3g} {name}"


def predicted(
    config: Train, decoder: model.Decoder, plan: Plan, machine: Machine, ranks: int, flops: float
) -> list[tuple[str, str]]:
    """The rows about time, and whether it fits."""
    seconds = step_seconds(config, plan, machine, ranks, flops)
    peak = machine.products * 1e12
    a_step = config.batch * config.accumulate * config.strategy.data
    speed, used = a_step * config.seq_len / seconds, flops / ranks / seconds / peak
    return [
        ("predicted", f"{seconds:.3g} s a step on {machine.name}"),
        ("speed", f"{speed:,.0f} tokens/s, {used:.0%} of what its matrix products reach"),
        ("fits", fits(config, decoder, plan, machine, ranks)),
    ]


def step_seconds(config: Train, plan: Plan, machine: Machine, ranks: int, flops: float) -> float:
    """Seconds of a step: attention as predicted, and the other products at the machine's rate."""
    m, best = config.model, json.loads(plan.explain(json=True))["candidates"][0]
    again = AGAIN[config.strategy.recompute]
    calls = m.layers // m.softmax_every * config.batch * config.accumulate
    attention = calls * (best["seconds"] + (again == 1.0) * best["forward"]["seconds"])
    pairs = estimate.visible(config.seq_len, m.window or config.seq_len) * config.batch * config.accumulate
    inner = model.head_dim(m) * m.heads * config.strategy.data
    others = flops - 12.0 * inner * (m.layers // m.softmax_every) * pairs
    slower = ITEMS[config.precision] / 2 if machine.device != "cpu" else 1.0  # float32 products take twice as long
    slower *= machine.crowd(ranks)
    return attention + slower * max(0.0, others) * (1 + again / 3) / ranks / (machine.products * 1e12)


def fits(config: Train, decoder: model.Decoder, plan: Plan, machine: Machine, ranks: int) -> str:
    """Whether a rank's memory is enough; if not, by how much, and what would do."""

    def most(config: Train, local: int, ranks: int) -> float:
        return estimate.needs(config, decoder, local, ranks).most

    least = most(config, plan.local_len, ranks)
    if least <= machine.memory:
        return f"yes, {in_words(least)} of {in_words(machine.memory)}"
    stronger = [r for r in RECOMPUTES[RECOMPUTES.index(config.strategy.recompute) + 1 :]
                if most(recomputing(config, r), plan.local_len, ranks) <= machine.memory]  # fmt: skip
    would = [f"strategy.recompute={recompute}" for recompute in stronger[:1]]
    more = first(lambda n: most(config, -(-plan.local_len // n), ranks * n) <= machine.memory)
    shorter = first(lambda n: most(config, -(-plan.local_len // n), ranks) <= machine.memory)
    would += [f"{ranks * more} ranks"] if more else []
    would += [f"seq_len={config.seq_len // shorter}"] if shorter else []
    return f"no, {in_words(least)} of {in_words(machine.memory)}; {' or '.join(would) or 'no number of ranks'} would do"


def first(enough: Callable[[int], bool]) -> int | None:
    """The first power of two that is enough, if there is one below 2^16."""
    return next((2**i for i in range(1, 16) if enough(2**i)), None)


def recomputing(config: Train, recompute: str) -> Train:
    return dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, recompute=recompute))
