"""A call of attention played event by event: the schedule of a plan, on the links and GPUs of a described machine.

Every transfer waits for its block, then for its turn on the sender's link; every step waits for its keys, then for the
GPU. Ranks and hosts may be slow, and times may vary. What the closed form of `predict` leaves out is here: queues on
links that GPUs of a host share, ranks that wait for late neighbours, and what one slow rank does to all others. Events
of one step of all ranks are computed at once, with numpy, and only those of the next step are kept: 16,384 ranks in a
ring have 268 million steps, forward and again backward.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from html import escape
from math import gcd
from typing import NamedTuple

import numpy as np

from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape, kv_heads_of_a_rank, replicas
from ringattn.plans.course import Ring, Steps, steps_of
from ringattn.plans.machine import Link, Machine
from ringattn.plans.plan import Plan
from ringattn.plans.predict import BACKWARD, MEASURED, Rates, across, blocks_at_once
from ringattn.plans.sharing import ALONE, FOREVER, Clock, on_links
from ringattn.steps.table import Transfers

SLOW = re.compile(r"(rank|host)(\d+):(\d+\.?\d*|\.\d+)")
LARGEST_RING = 16384  # ranks: it takes a minute, and a gigabyte of pairs
COLORS = {"computes": "#2a9d8f", "waits for keys": "#e76f51", "sends after its last step": "#8d99ae"}
AS_DESCRIBED = np.ones(1)  # the factors of durations without jitter
TRIALS, CHANGE = 30, 1e-3  # at most so many until what is simulated changes by less


class World(NamedTuple):
    """Where ranks are and how fast each is; `jitter` is the relative deviation of every duration."""

    machine: Machine
    host: np.ndarray  # [ring]: of the first Ulysses rank
    speed: np.ndarray  # [ring, ulysses]
    jitter: float
    random: np.random.Generator
    clock: Clock

    def computed(self, begun: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when all ranks are done with work that takes one alone so long."""
        return self.clock.after(begun, seconds[:, None] / self.speed * self.vary(begun.shape))

    def vary(self, shape: tuple[int, ...]) -> np.ndarray:
        """By what factors durations differ from what is described."""
        if not self.jitter:
            return AS_DESCRIBED
        return np.exp(self.jitter * self.random.standard_normal(shape, np.float32))


class Played:
    """When ranks were done, in seconds, and of those that are `watched`, by number, what each step did when."""

    def __init__(self, watched: Sequence[int]):
        self.watched, self.rows = list(watched), list[list[np.ndarray]]()
        self.worked = 0.0  # seconds of the mean rank
        self.finish: np.ndarray = np.zeros(0)  # [ring, ulysses], of forward and backward

    def add(self, arrived: np.ndarray, begun: np.ndarray, ended: np.ndarray) -> None:
        """A step of all ranks: when its keys came, when it began and ended."""
        self.worked += float((ended - begun).mean())
        if self.watched:
            self.rows.append([x.ravel()[self.watched] for x in (arrived, begun, ended)])

    @property
    def steps(self) -> np.ndarray:
        """[arrived, begun, ended; step, watched]"""
        return np.array(self.rows).swapaxes(0, 1)

    @property
    def seconds(self) -> float:
        return float(self.finish.max())

    @property
    def working(self) -> float:
        """The share of the time in which the mean rank computes."""
        return self.worked / self.seconds


def speeds(slow: str, ring: int, ulysses: int, gpus: int) -> np.ndarray:
    """[ring, ulysses] from "rank7:0.8,host2:0.5": the speed of some ranks, of 1."""
    factors = np.ones(ring * ulysses)
    for word in filter(None, slow.split(",")):
        match = SLOW.fullmatch(word)
        if match is None or not 0 < float(match[3]) <= 10:
            raise ValueError(f"slow={word}: give rank7:0.8 or host2:0.5, a speed above 0 (1 is as described)")
        kind, number, speed = match[1], int(match[2]), float(match[3])
        most = ring * ulysses if kind == "rank" else -(-ring * ulysses // gpus)
        if number >= most:
            raise ValueError(f"slow={word}: there are {most} {kind}s, counted from 0")
        factors[number if kind == "rank" else slice(number * gpus, (number + 1) * gpus)] = speed
    return factors.reshape(ring, ulysses)


class Links:
    """All links of one kind, and when that of each rank is idle again."""

    def __init__(self, world: World, link: Link):
        gpus = world.machine.gpus
        self.link, self.free, self.wide = link, np.zeros(world.speed.shape), min(link.sharing, gpus)
        host, place = np.divmod(np.arange(world.speed.size), gpus)
        self.place = host * -(-gpus // self.wide) * self.wide + place  # [rank]: neighbours may share a link

    def send(self, tokens: np.ndarray, token_bytes: float, ready: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when what each rank sends arrives, which leaves when it is ready and the link idle."""
        some = tokens[:, None] > 0
        seconds = (tokens * (token_bytes / self.link.bandwidth))[:, None] * factors
        start = np.maximum(ready, self.free)
        if self.wide == 1:
            done = start + seconds
            self.free = np.where(some, done, self.free)
        else:
            cells = np.zeros((2, int(self.place[-1]) // self.wide + 1, self.wide))
            cells.reshape(2, -1)[:, self.place] = start.ravel(), np.broadcast_to(seconds, start.shape).ravel()
            ends = on_links(*cells)
            done = ends.ravel()[self.place].reshape(start.shape)
            last = np.where(cells[1] > 0, ends, 0).max(1)
            self.free = np.maximum(self.free, last[self.place // self.wide].reshape(start.shape))
        return np.where(some, done + self.link.latency, -np.inf)


class Traffic:
    """Transfers of rows of a table by the links of their senders."""

    def __init__(self, world: World):
        self.world, self.links = world, (Links(world, world.machine.inside), Links(world, world.machine.between))

    def send(self, rows: Transfers, token_bytes: float, ready: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when all that a rank receives is there, which leaves when its source is `ready`.

        What a rank sends at a time arrives at a time.
        """
        arrived = np.full(ready.shape, -np.inf)
        if not len(rows.source):
            return arrived
        host, factors = self.world.host, self.world.vary(ready.shape)
        remote = host[rows.source] != host[rows.destination]
        for links, kind in zip(self.links, (~remote, remote), strict=True):
            if kind.any():
                some = rows.some(kind)
                tokens = np.bincount(some.source, some.tokens, len(ready))
                done = links.send(tokens, token_bytes, ready, factors)
                at = some.destination[:, None] * ready.shape[1] + np.arange(ready.shape[1])
                np.maximum.at(arrived.ravel(), at.ravel(), done[some.source].ravel())  # 2D is 15 times as slow
        return arrived


def ring_pass(
    traffic: Traffic, steps: Steps, seconds: Callable[[np.ndarray], np.ndarray], entered: np.ndarray, played: Played,
    token_bytes: float, returned: float, summed: float,
) -> np.ndarray:  # fmt: skip
    """When every rank is done with all steps, which are noted; `seconds` are those of pairs.

    The keys of a phase leave their holders as it begins, to the ranks of their hosts and to the next one. `returned`
    bytes of gradients a token go back after the step, to the holder of the keys. The sums of a block that hops on,
    `summed` bytes a token, move with it, and home to its owner from the last holder of a token.
    """
    arrived, since, done, home, sums, passed_on = (entered,) * 6  # every rank has its own block, `since` when
    starts = {int(first): phase for phase, first in enumerate(steps.first)}
    ends = [*steps.first[1:].tolist(), steps.count]
    following = steps.met(0, 1)
    for s in range(steps.count):
        (cells, reads), following = following, steps.met(s + 1, s + 2)
        begun = np.maximum(done, arrived)
        work = seconds(np.bincount(cells.reader, cells.pairs, len(entered)))
        done = traffic.world.computed(begun, work)
        played.add(arrived, begun, done)
        if s in starts:
            phase, since = starts[s], begun if s else entered
            hops = steps.hops(ends[phase], ends[phase] + 1)
            onward = np.maximum(traffic.send(hops, token_bytes, since), entered)
        last = s + 1 == ends[phase]
        arrived = onward if last else np.maximum(traffic.send(following[1], token_bytes, since), entered)
        if not returned:
            continue
        back = reads._replace(source=reads.destination, destination=reads.source)
        sums = np.maximum(sums, traffic.send(back, returned, done))
        if last and not phase:
            home, sums = np.maximum(home, sums), entered
        elif last:
            ready = np.maximum(np.maximum(sums, passed_on), done)
            passed_on = np.maximum(traffic.send(hops, summed, ready), entered)
            home, sums = np.maximum(home, traffic.send(steps.homes(s + 1, s + 2), summed, ready)), entered
    return np.maximum(done, home)


def exchange(world: World, near: float, far: float, at: np.ndarray) -> np.ndarray:
    """When all-to-alls among the Ulysses ranks of each ring rank are done, whose ranks come to it at these times."""
    machine = world.machine
    sending = min(machine.gpus, at.size)
    seconds = machine.inside.transfer(near, sending) + machine.between.transfer(far, sending)
    latency = machine.between.latency if far else machine.inside.latency
    return np.broadcast_to(at.max(1, keepdims=True), at.shape) + seconds * world.vary(at.shape) + latency


def play(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates, *,
    slow: str = "", jitter: float = 0.0, seed: int = 0, backward: bool = True, watched: Sequence[int] = (),
) -> Played:  # fmt: skip
    """One layer's attention, forward and then backward, of all ranks; the steps of those `watched` are kept.

    When ranks compute says how fast each is, if they share cores, and that says when they compute: until both agree.
    """
    ring, ulysses, ranks = plan.ring, plan.ulysses, plan.ring * plan.ulysses
    if ring > LARGEST_RING:
        raise ValueError(f"ring={ring}: rings of at most {LARGEST_RING} ranks are simulated; add Ulysses ranks")
    cores = machine.cores * -(-ranks // machine.gpus)

    def once(clock: Clock, watched: Sequence[int]) -> Played:
        world = World(machine, np.arange(ring) * ulysses // machine.gpus, speeds(slow, ring, ulysses, machine.gpus),
                      jitter, np.random.default_rng(seed), clock)  # fmt: skip
        played = Played(watched)
        play_in(world, plan, shape, spec, docs, rates, backward, played)
        return played

    if not cores:
        return once(ALONE, watched)
    clock = Clock.shared(np.zeros(ranks), np.full(ranks, FOREVER), cores)  # at first all compute all the time
    before = 0.0
    for _ in range(TRIALS):
        played = once(clock, range(ranks))
        _, begun, ended = played.steps
        clock = Clock.shared(begun.ravel(), ended.ravel(), cores)
        if abs(played.seconds - before) < CHANGE * before:
            break
        before = played.seconds
    return once(clock, watched)


def play_in(
    world: World, plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, rates: Rates, backward: bool,
    played: Played,
) -> None:  # fmt: skip
    """The same, in a world whose clock says how fast ranks are."""
    ring, ulysses, machine = plan.ring, plan.ulysses, world.machine
    token = shape.kv_bytes(1, kv_heads_of_a_rank(shape.kv_heads, ulysses))
    here = gcd(ulysses, machine.gpus)
    total = shape.q_bytes(plan.local_len)
    total += shape.kv_bytes(plan.keys.local_len, shape.kv_heads * replicas(shape.kv_heads, ulysses))
    swap = total * (here - 1) / ulysses / 2, total * (ulysses - here) / ulysses / 2  # each of two ways
    rows = shape.batch * plan.tokens.shard_len * shape.heads / ulysses
    seen = work_of(spec, plan.tokens.length, plan.keys.tokens.length, docs).below(plan.tokens.length)
    at, traffic = np.zeros((ring, ulysses)), Traffic(world)
    grads = 1.0 if rates.low_precision or shape.itemsize > 2 else 2.0

    def swapped(at: np.ndarray) -> np.ndarray:
        """When heads are exchanged, behind what a rank's links still carry."""
        carrying = [link.free for link, n in zip(traffic.links, swap, strict=True) if n]
        return exchange(world, *swap, reduce(np.maximum, carrying, at)) if ulysses > 1 else at

    for back in (False, True)[: 1 + backward]:
        together = blocks_at_once(plan, shape, machine, back)
        steps = steps_of(Ring(plan.tokens, plan.keys.tokens, spec, docs, plan.hosts), together, everyone=True)
        slower = (1 + machine.half[back] / rows) / (1 + machine.half[back] / MEASURED)
        flops = shape.flops_a_pair * (BACKWARD if back else 1.0) / ulysses
        pair = slower * flops / rates.of(back, spec, seen / ring / plan.tokens.shard_len)

        def seconds(pairs: np.ndarray, pair: float = pair, launch: float = machine.launch[back]) -> np.ndarray:
            return pairs * pair + launch * (pairs > 0)

        at = swapped(at)
        if plan.strategy == "gather":
            each = (steps.met(s, s + 1)[0] for s in range(steps.count))
            pairs = sum((np.bincount(x.reader, x.pairs, ring) for x in each), np.zeros(ring))
            at = gathered(plan, world, seconds(pairs), token * (1 + grads * back), at, played)
        else:
            wide = token * max(1.0, 4 / shape.itemsize)
            at = ring_pass(traffic, steps, seconds, at, played, token, token * grads * back, wide * back)
        at = swapped(at)
    played.finish = at


def gathered(plan: Plan, world: World, work: np.ndarray, nbytes: float, at: np.ndarray, played: Played) -> np.ndarray:
    """The same for gather: all keys of a ring come at once, when its last rank is there."""
    local = max(1, min(world.machine.gpus // plan.ulysses, plan.ring))
    block = plan.keys.tokens.shard_len * nbytes
    far = across(plan.ring, local, world.machine) * block
    come = exchange(world, (plan.ring - 1) * block, far, at.T).T
    done = world.computed(come, work)
    played.add(come, come, done)
    return done


def timeline(played: Played, ranks: Mapping[int, str], width: int = 84) -> list[str]:
    """Text: of watched ranks, by number, when each computes (#), waits (.), and sends after its last step (-)."""
    scale, spans = width / played.seconds, played.steps[1:].T
    lines = []
    for number, name in ranks.items():
        last = int(spans[played.watched.index(number)].max() * scale)
        end = int(played.finish.ravel()[number] * scale)
        marks = list(("." * last + "-" * (end - last)).ljust(width)[:width])
        for begun, ended in spans[played.watched.index(number)]:
            for i in range(int(begun * scale), max(int(begun * scale) + 1, int(ended * scale))):
                if i < width and ended > begun:
                    marks[i] = "#"
        lines.append(f"{name:>12} {''.join(marks)}")
    return lines


def draw(played: Played, ranks: Mapping[int, str], title: str) -> str:
    """The same as an SVG picture, with an axis in milliseconds."""
    width, left, row = 900, 110, 22
    scale, spans = (width - left - 40) / played.seconds, played.steps[1:].T
    bottom = row * (len(ranks) + 1)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 2 * row}" '
             f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
             f'<text x="4" y="15">{escape(title)}</text>']  # fmt: skip
    for i in range(5):  # of the axis
        x = left + i / 4 * played.seconds * scale
        parts.append(f'<path d="M{x:.1f} {row}V{bottom + 3}" stroke="#ccc"/>'
                     f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">'
                     f"{played.seconds * 250 * i:.4g} ms</text>")  # fmt: skip
    for i, (what, color) in enumerate(COLORS.items()):
        parts.append(f'<rect x="{left + 200 * i}" y="{bottom + 25}" width="12" height="12" fill="{color}"/>'
                     f'<text x="{left + 200 * i + 18}" y="{bottom + 36}">{what}</text>')  # fmt: skip
    for i, (number, name) in enumerate(ranks.items(), 1):
        parts.append(f'<text x="4" y="{row * i + 15}">{name}</text>')
        before, finish = 0.0, played.finish.ravel()[number]
        for begun, ended in [*spans[played.watched.index(number)], (finish, finish)]:
            waits = "waits for keys" if begun < finish else "sends after its last step"
            for start, stop, what in ((before, begun, waits), (begun, ended, "computes")):
                if (stop - start) * scale > 0.2:
                    parts.append(f'<rect x="{left + start * scale:.1f}" y="{row * i + 3}" height="{row - 6}" '
                                 f'width="{(stop - start) * scale:.1f}" fill="{COLORS[what]}"/>')  # fmt: skip
            before = ended
    return "\n".join([*parts, "</svg>"])
