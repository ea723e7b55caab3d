"""Play a plan event by event on a described machine, of any size: `ringattn simulate machine=h100 ranks=1024`.

The layer's attention, forward and backward, of every rank: transfers wait for their links, steps for their keys.
`slow=rank7:0.8,host2:0.5` slows ranks or hosts down. It ends with a timeline of some ranks.
"""

from dataclasses import dataclass

import numpy as np

from ringattn.launch.commands.plan import Common, factored
from ringattn.launch.words import option
from ringattn.plans.candidates import problem_of, rates_of
from ringattn.plans.explain import way_of
from ringattn.plans.machine import ITEMS, load
from ringattn.plans.simulation import play, speeds, timeline

RANKS_LIMIT, RANKS_DRAWN = 65536, 8
WATCHED_LIMIT = 1024  # of no more ranks all steps are kept, so that the last rank can be drawn


@dataclass(frozen=True)
class Options(Common):
    heads: tuple[int, ...] = option((64, 8), "query heads, key heads")
    machine: str = option("h100", "a description of the machine: a name or a file")
    ranks: int = option(64, "ranks")
    seq_len: int | None = option(None, "tokens of the whole sequence; by default 8192 a rank")
    ulysses: int | None = option(None, "Ulysses ranks; by default the plan chooses")
    slow: str = option("", "ranks and hosts that are slow: rank7:0.8,host2:0.5")


def run(options: Options) -> int:
    machine, ranks = load(options.machine), options.ranks
    if ranks > RANKS_LIMIT:
        raise ValueError(f"ranks={ranks}: at most {RANKS_LIMIT} are simulated")
    if options.ulysses is not None and ranks % options.ulysses:
        raise ValueError(f"ulysses={options.ulysses} does not divide ranks={ranks}")
    sizes = factored(ranks) if options.ulysses is None else [(ranks // options.ulysses, options.ulysses)]
    plan = options.planned(options.seq_len or 8192 * ranks, sizes, machine, machine.device, machine.gpus)
    dtype, docs = options.dtype_on(machine.device), options.docs_of(plan.seq_len)
    shape = plan.shape(ITEMS[dtype])
    assert shape is not None
    problem = problem_of(plan, shape, options.spec, dtype, docs, machine.arch)
    given = plan, shape, options.spec, docs, machine, rates_of(problem, plan, machine)[1]
    speed = speeds(options.slow, plan.ring, plan.ulysses, machine.gpus)  # wrong words before long work
    slow = np.flatnonzero(speed.ravel() != 1)[:RANKS_DRAWN]
    some = sorted({*range(0, ranks, max(1, ranks // RANKS_DRAWN)), *slow.tolist()})
    played = play(*given, slow=options.slow, watched=range(ranks) if ranks <= WATCHED_LIMIT else some)
    hosts = -(-plan.ring * plan.ulysses // machine.gpus)
    seconds, predicted = played.seconds, plan.report()[1]["candidates"][0]["seconds"]
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
