"""Play a plan event by event on a described machine, of any size: `ringattn simulate machine=h100 ranks=1024`.

The layer's attention, forward and backward, of every rank: transfers wait for their links, steps for their keys.
`slow=rank7:0.8,host2:0.5` slows ranks or hosts down, `jitter=0.1` varies every duration, `picture=FILE.svg` draws the
timeline. It ends with what the plan predicts in closed form, and with the length from which so many ranks pay.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringattn.choosing import elsewhere, factored
from ringattn.launch.words import option, writable
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.candidates import Asked, compared, rates_of
from ringattn.plans.explain import Option, way_of
from ringattn.plans.machine import Machine, load
from ringattn.plans.plan import Plan
from ringattn.plans.simulation import draw, play, speeds, timeline
from ringattn.plans.transport import Transport

MAX_RANKS, RANKS_SHOWN = 65536, 8
MAX_WATCHED = 1024  # of no more ranks all steps are kept, so that the last rank can be drawn


@dataclass(frozen=True)
class Options:
    machine: str = option("h100", "a description of the machine: a name or a file")
    ranks: int = option(64, "ranks")
    seq_len: int | None = option(None, "tokens of the whole sequence; by default 8192 a rank")
    heads: tuple[int, ...] = option((64, 8), "query heads, key heads")
    head_dim: int = option(128, "the size of a head")
    ulysses: int | None = option(None, "Ulysses ranks; by default the plan chooses")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: str = option("auto", "auto, contiguous, striped, zigzag or balanced")
    route: str = option("auto", "auto, direct, relay or levels")
    causal: bool = option(True, "whether a query sees no later key")
    window: int | None = option(None, "how many keys a query sees at most")
    docs: tuple[int, ...] | None = option(None, "lengths of packed documents; the rest is padding", least=0)
    slow: str = option("", "ranks and hosts that are slow: rank7:0.8,host2:0.5")
    jitter: float = option(0.0, "how much durations vary, relatively", least=0, below=10)
    seed: int = option(0, "of the jitter", least=0)
    picture: str | None = option(None, "an SVG file for the timeline")
    pays: bool = option(False, "also say from what length so many ranks are faster than one")


def run(options: Options) -> int:
    machine, ranks = load(options.machine), options.ranks
    if ranks > MAX_RANKS:
        raise ValueError(f"ranks={ranks}: at most {MAX_RANKS} are simulated")
    if options.ulysses is not None and ranks % options.ulysses:
        raise ValueError(f"ulysses={options.ulysses} does not divide ranks={ranks}")
    picture = writable(Path(options.picture)) if options.picture else None
    asked = asked_of(options, machine, options.seq_len or 8192 * ranks)
    best = compared(asked)[0]
    shape = asked.shape
    assert shape is not None
    rates = rates_of(asked.problem(best.plan, shape), best.plan, machine)[1]
    speed = speeds(options.slow, best.plan.ring, best.plan.ulysses, machine.gpus)  # wrong words before long work
    slow = np.flatnonzero(speed.ravel() != 1)[:RANKS_SHOWN]
    some = sorted({*range(0, ranks, max(1, ranks // RANKS_SHOWN)), *slow.tolist()})
    played = play(best.plan, shape, asked.spec, asked.docs, machine, rates, slow=options.slow, jitter=options.jitter,
                  seed=options.seed, watched=range(ranks) if ranks <= MAX_WATCHED else some)  # fmt: skip
    report(best, machine, played.seconds, played.working)
    if options.slow or options.jitter:
        clean = play(best.plan, shape, asked.spec, asked.docs, machine, rates).seconds
        print(f"without slow= and jitter= {clean * 1e3:.4g} ms: they cost {played.seconds / clean - 1:+.1%}")
    last = int(played.finish.argmax())
    names = {n: f"rank {n}" for n in sorted({*some, last} & set(played.watched))}
    print("\n".join(timeline(played, names)))
    drawn = "" if last in names else ", which is not drawn,"
    print(f"# computes, . waits, - sends after its last step; rank {last}{drawn} is the last")
    if picture:
        picture.write_text(draw(played, names, f"{way_of(best.plan)} on {machine.name}"))
    if options.pays:
        print(from_what_length(options, machine))
    return 0


def asked_of(options: Options, machine: Machine, seq_len: int, ranks: int | None = None) -> Asked:
    """The candidates on so many ranks."""
    ranks = options.ranks if ranks is None else ranks
    split = options.ulysses if ranks > 1 else None
    sizes = factored(ranks) if split is None else [(ranks // split, split)]
    heads = options.heads[0], options.heads[-1]
    docs = None if options.docs is None else Docs.from_lengths(options.docs, pad_to=seq_len)
    spec = AttentionSpec(causal=options.causal, window=options.window)
    target = elsewhere(machine.device, sizes, framework="jax" if machine.device == "tpu" else "torch")
    alone = Plan(seq_len, heads=heads, head_dim=options.head_dim, axes=target.bind(1, 1), machine=machine)
    dtype = "float32" if machine.device == "cpu" else "bfloat16"
    strategy, layout = (options.strategy, options.layout) if ranks > 1 else ("auto", "auto")
    how = Transport(options.route if ranks > 1 else "auto")
    return Asked(alone, tuple(sizes), machine.gpus, strategy, layout, spec, docs, dtype, how)


def report(best: Option, machine: Machine, seconds: float, working: float) -> None:
    plan = best.plan
    hosts = -(-plan.ring * plan.ulysses // machine.gpus)
    print(f"{way_of(plan)}, {plan.seq_len} tokens, {hosts} hosts of {machine.gpus} ({machine.name})")
    predicted = best.cost.seconds
    print(f"simulated {seconds * 1e3:.4g} ms a layer, forward and backward; {working:.1%} of it computing")
    print(f"predicted {predicted * 1e3:.4g} ms ({predicted / seconds - 1:+.1%})")


def from_what_length(options: Options, machine: Machine) -> str:
    """The least power of two of tokens with which so many ranks beat one."""
    for power in range(12, 31):
        options = dataclasses.replace(options, docs=None, window=None)
        times = [compared(asked_of(options, machine, 2**power, n))[0].cost.seconds for n in (options.ranks, 1)]
        if times[0] < times[1]:
            return (
                f"{options.ranks} ranks pay from {2**power} tokens on: {times[0]:.3g} s a layer there, "
                f"{times[1]:.3g} s on one rank ({times[1] / times[0]:.2f} x)"
            )
    return f"{options.ranks} ranks do not pay up to {2**30} tokens"
