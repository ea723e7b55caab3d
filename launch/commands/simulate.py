"""Play a plan event by event on a described machine, of any size: `ringattn simulate machine=h100 ranks=1024`.

The layer's attention, forward and backward, of every rank: transfers wait for their links, steps for their keys.
`slow=rank7:0.8,host2:0.5` slows ranks or hosts down. It ends with a timeline of some ranks.
"""

from dataclasses import dataclass

import numpy as np

from ringattn.choosing import elsewhere, factored
from ringattn.launch.words import option
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.candidates import Asked, compared, rates_of
from ringattn.plans.explain import way_of
from ringattn.plans.machine import Machine, load
from ringattn.plans.plan import Plan
from ringattn.plans.simulation import play, speeds, timeline
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


def run(options: Options) -> int:
    machine, ranks = load(options.machine), options.ranks
    if ranks > MAX_RANKS:
        raise ValueError(f"ranks={ranks}: at most {MAX_RANKS} are simulated")
    if options.ulysses is not None and ranks % options.ulysses:
        raise ValueError(f"ulysses={options.ulysses} does not divide ranks={ranks}")
    asked = asked_of(options, machine)
    best, shape = compared(asked)[0], asked.shape
    assert shape is not None
    plan, rates = best.plan, rates_of(asked.problem(best.plan, shape), best.plan, machine)[1]
    given = plan, shape, asked.spec, asked.docs, machine, rates
    speed = speeds(options.slow, plan.ring, plan.ulysses, machine.gpus)  # wrong words before long work
    slow = np.flatnonzero(speed.ravel() != 1)[:RANKS_SHOWN]
    some = sorted({*range(0, ranks, max(1, ranks // RANKS_SHOWN)), *slow.tolist()})
    played = play(*given, slow=options.slow, watched=range(ranks) if ranks <= MAX_WATCHED else some)
    hosts = -(-plan.ring * plan.ulysses // machine.gpus)
    seconds, predicted = played.seconds, best.cost.seconds
    print(f"{way_of(plan)}, {plan.layout}, {plan.seq_len} tokens, {hosts} hosts of {machine.gpus} ({machine.name})")
    print(f"simulated {seconds * 1e3:.4g} ms a layer, forward and backward; {played.worked / seconds:.1%} computing")
    print(f"predicted {predicted * 1e3:.4g} ms ({predicted / seconds - 1:+.1%})")
    if options.slow:
        clean = play(*given).seconds
        print(f"without slow= {clean * 1e3:.4g} ms: they cost {seconds / clean - 1:+.1%}")
    last = int(played.finish.argmax())
    names = {n: f"rank {n}" for n in sorted({*some, last} & set(played.watched))}
    print("\n".join(timeline(played, names)))
    drawn = "" if last in names else ", which is not drawn,"
    print(f"# computes, . waits, - sends after its last step; rank {last}{drawn} is the last")
    return 0


def asked_of(options: Options, machine: Machine) -> Asked:
    """The candidates on so many ranks."""
    ranks, seq_len = options.ranks, options.seq_len or 8192 * options.ranks
    sizes = factored(ranks) if options.ulysses is None else [(ranks // options.ulysses, options.ulysses)]
    docs = None if options.docs is None else Docs.from_lengths(options.docs, pad_to=seq_len)
    spec = AttentionSpec(causal=options.causal, window=options.window)
    target = elsewhere(machine.device, sizes, framework="jax" if machine.device == "tpu" else "torch")
    heads = options.heads[0], options.heads[-1]
    alone = Plan(seq_len, heads=heads, head_dim=options.head_dim, axes=target.bind(1, 1), machine=machine)
    how, dtype = Transport(options.route), "float32" if machine.device == "cpu" else "bfloat16"
    return Asked(alone, tuple(sizes), machine.gpus, options.strategy, options.layout, spec, docs, dtype, how)
