"""A call of attention played event by event: the schedule of a plan, on the links and GPUs of a described machine.

Every transfer waits for its block, then for its turn on the sender's link; every step waits for its keys, then for the
GPU. Ranks and hosts may be slow. What the closed form of `predict` leaves out is here: queues on links that GPUs of a
host share, ranks that wait for late neighbours, and what one slow rank does to all others. Events of one step of all
ranks are computed at once, with numpy, and only those of the next step are kept: 16,384 ranks in a ring have 268
million steps, forward and again backward.
"""

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape
from ringattn.plans.course import Ring, Steps, steps_of
from ringattn.plans.machine import Link, Machine
from ringattn.plans.plan import Plan
from ringattn.plans.predict import Pass, Rates, blocks_at_once, gathered_bytes, pass_of
from ringattn.steps.table import Transfers

SLOW = re.compile(r"(rank|host)(\d+):(\d+\.?\d*|\.\d+)")
LARGEST_RING = 16384  # ranks: it takes a minute, and a gigabyte of pairs
FOREVER = 1e6  # seconds, in which everything is done
TRIALS, CHANGE = 30, 1e-3  # at most so many until what is simulated changes by less


def on_links(start: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[link, transfer]: when each is done, if those that have started share a link evenly.

    `seconds` are those of a transfer alone on its link; with none there is no transfer. In the loop every link goes on
    to its next event: the next transfer that starts, or is done.
    """
    left, ends, now = seconds, start, np.where(seconds > 0, start, np.inf).min(1)
    now[np.isinf(now)] = 0  # an idle link
    while (waiting := left > 0).any():
        going = waiting & (start <= now[:, None])
        share = np.maximum(going.sum(1), 1)[:, None]
        done = np.where(going, now[:, None] + share * left, np.inf)
        until = np.minimum(done.min(1), np.where(waiting & ~going, start, np.inf).min(1))
        until = np.where(waiting.any(1), until, now)
        left = np.where(going, left - (until - now)[:, None] / share, left)
        ended = going & ((done <= until[:, None]) | (left <= 0))
        ends, left, now = np.where(ended, until[:, None], ends), np.where(ended, 0.0, left), until
    return ends


class Clock(NamedTuple):
    """What a rank that computes has done by some times, if it shares cores with others: seconds of a core."""

    times: np.ndarray
    work: np.ndarray

    def after(self, begun: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """When so much work is done that begins so."""
        return np.interp(np.interp(begun, self.times, self.work) + seconds, self.work, self.times)

    @classmethod
    def shared(cls, begun: np.ndarray, ended: np.ndarray, cores: float) -> "Clock":
        """That of ranks which compute between these times and share so many cores evenly."""
        order = np.argsort(times := np.concatenate([begun, ended]), kind="stable")
        busy = np.cumsum(np.repeat([0, 1, -1], [1, len(begun), len(ended)])[np.append(0, order + 1)])
        times = np.append(times[order], times.max() + FOREVER)
        return cls(times, np.cumsum(np.minimum(1.0, cores / np.maximum(busy, 1)) * np.diff(times, prepend=0.0)))


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

    def __init__(self, machine: Machine, link: Link, ranks: tuple[int, int]):
        gpus = machine.gpus
        self.link, self.free, self.wide = link, np.zeros(ranks), min(link.sharing, gpus)
        host, place = np.divmod(np.arange(self.free.size), gpus)
        self.place = host * -(-gpus // self.wide) * self.wide + place  # [rank]: neighbours may share a link

    def send(self, tokens: np.ndarray, token_bytes: float, ready: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when what each rank sends arrives, which leaves when it is ready and the link idle."""
        some = tokens[:, None] > 0
        seconds = (tokens * (token_bytes / self.link.bandwidth))[:, None]
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


class World:
    """A plan's ranks on a machine: how fast each is, and what their links still carry."""

    def __init__(self, plan: Plan, machine: Machine, slow: str, clock: Clock | None):
        self.plan, self.machine, self.clock = plan, machine, clock
        self.speed = speeds(slow, plan.ring, plan.ulysses, machine.gpus)
        self.host = np.arange(plan.ring) * plan.ulysses // machine.gpus  # [ring]: of the first Ulysses rank
        self.links = [Links(machine, link, (plan.ring, plan.ulysses)) for link in (machine.inside, machine.between)]

    def computed(self, begun: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when all ranks are done with work that takes one alone so long."""
        work = seconds[:, None] / self.speed
        return begun + work if self.clock is None else self.clock.after(begun, work)

    def send(self, rows: Transfers, token_bytes: float, ready: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when all that a rank receives is there, which leaves when its source is `ready`.

        What a rank sends at a time arrives at a time.
        """
        arrived = np.full(ready.shape, -np.inf)
        remote = self.host[rows.source] != self.host[rows.destination]
        for links, kind in zip(self.links, (~remote, remote), strict=True):
            if kind.any():
                some = rows.some(kind)
                done = links.send(np.bincount(some.source, some.tokens, len(ready)), token_bytes, ready)
                at = some.destination[:, None] * ready.shape[1] + np.arange(ready.shape[1])
                np.maximum.at(arrived.ravel(), at.ravel(), done[some.source].ravel())  # 2D is 15 times as slow
        return arrived

    def exchange(self, near: float, far: float, at: np.ndarray) -> np.ndarray:
        """When all-to-alls among the ranks of each row are done, which come to it at these times."""
        machine, sending = self.machine, min(self.machine.gpus, at.size)
        seconds = machine.inside.transfer(near, sending) + machine.between.transfer(far, sending)
        seconds += machine.between.latency if far else machine.inside.latency
        return np.broadcast_to(at.max(1, keepdims=True), at.shape) + seconds

    def heads(self, at: np.ndarray, each: Pass) -> np.ndarray:
        """When heads are exchanged, one of two ways, behind what a rank's links still carry."""
        if self.plan.ulysses == 1:
            return at
        carrying = [links.free for links, n in zip(self.links, each.heads, strict=True) if n]
        return self.exchange(each.heads[0] / 2, each.heads[1] / 2, reduce(np.maximum, carrying, at))

    def ring_pass(self, steps: Steps, each: Pass, entered: np.ndarray, played: Played) -> np.ndarray:
        """When every rank is done with all steps, which are noted.

        The keys of a phase leave their holders as it begins, to the ranks of their hosts and to the next one. Gradients
        go back after the step, to the holder of the keys. The sums of a block that hops on move with it, and home to
        its owner from the last holder of a token.
        """
        arrived, since, done, home, sums, passed_on = (entered,) * 6  # every rank has its own block, `since` when
        starts = {int(first): phase for phase, first in enumerate(steps.first)}
        ends = [*steps.first[1:].tolist(), steps.count]
        following = steps.met(0, 1)
        for s in range(steps.count):
            (cells, reads), following = following, steps.met(s + 1, s + 2)
            begun = np.maximum(done, arrived)
            done = self.computed(begun, each.seconds(np.bincount(cells.reader, cells.pairs, len(entered))))
            played.add(arrived, begun, done)
            if s in starts:
                phase, since = starts[s], begun if s else entered
                hops = steps.hops(ends[phase], ends[phase] + 1)
                onward = np.maximum(self.send(hops, each.token, since), entered)
            last = s + 1 == ends[phase]
            arrived = onward if last else np.maximum(self.send(following[1], each.token, since), entered)
            if not each.returned:
                continue
            back = reads._replace(source=reads.destination, destination=reads.source)
            sums = np.maximum(sums, self.send(back, each.returned, done))
            if last and phase:
                ready = np.maximum(np.maximum(sums, passed_on), done)
                passed_on = np.maximum(self.send(hops, each.summed, ready), entered)
                sums = self.send(steps.homes(s + 1, s + 2), each.summed, ready)
            if last:
                home, sums = np.maximum(home, sums), entered
        return np.maximum(done, home)

    def gather_pass(self, steps: Steps, each: Pass, entered: np.ndarray, played: Played) -> np.ndarray:
        """The same for gather: all keys of a ring come at once, when its last rank is there."""
        cells = (steps.met(s, s + 1)[0] for s in range(steps.count))
        pairs = sum((np.bincount(x.reader, x.pairs, len(entered)) for x in cells), np.zeros(len(entered)))
        come = self.exchange(*gathered_bytes(self.plan, self.machine, each.token + each.returned), entered.T).T
        done = self.computed(come, each.seconds(pairs))
        played.add(come, come, done)
        return done


def play(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates, *,
    slow: str = "", backward: bool = True, watched: Sequence[int] = (),
) -> Played:  # fmt: skip
    """One layer's attention, forward and then backward, of all ranks; the steps of those `watched` are kept.

    When ranks compute says how fast each is, if they share cores, and that says when they compute: until both agree.
    """
    ranks = plan.ring * plan.ulysses
    if plan.ring > LARGEST_RING:
        raise ValueError(f"ring={plan.ring}: rings of at most {LARGEST_RING} ranks are simulated; add Ulysses ranks")
    ring = Ring(plan.tokens, plan.keys.tokens, spec, docs, plan.hosts, machine.gpus)

    def with_clock(clock: Clock | None, watched: Sequence[int]) -> Played:
        world, played, at = World(plan, machine, slow, clock), Played(watched), np.zeros((plan.ring, plan.ulysses))
        for back in (False, True)[: 1 + backward]:
            each = pass_of(plan, shape, spec, docs, machine, rates, back)
            steps = steps_of(ring, blocks_at_once(plan, shape, machine, back), everyone=True)
            one_pass = world.gather_pass if plan.strategy == "gather" else world.ring_pass
            at = world.heads(one_pass(steps, each, world.heads(at, each), played), each)
        played.finish = at
        return played

    if not machine.cores:
        return with_clock(None, watched)
    cores, before = machine.cores * -(-ranks // machine.gpus), 0.0
    clock = Clock.shared(np.zeros(ranks), np.full(ranks, FOREVER), cores)  # at first all compute all the time
    for _ in range(TRIALS):
        played = with_clock(clock, range(ranks))
        _, begun, ended = played.steps
        clock = Clock.shared(begun.ravel(), ended.ravel(), cores)
        if abs(played.seconds - before) < CHANGE * before:
            break
        before = played.seconds
    return with_clock(clock, watched)


def timeline(played: Played, ranks: Mapping[int, str], width: int = 84) -> list[str]:
    """Text: of watched ranks, by number, when each computes (#), waits (.), and sends after its last step (-)."""
    scale, lines = width / played.seconds, []
    for number, name in ranks.items():
        spans = played.steps[1:, :, played.watched.index(number)].T
        last, end = (int(x * scale) for x in (spans.max(), played.finish.ravel()[number]))
        marks = list(("." * last + "-" * (end - last)).ljust(width)[:width])
        for begun, ended in spans:
            if ended > begun:
                some = range(int(begun * scale), min(width, max(int(begun * scale) + 1, int(ended * scale))))
                marks[some.start : some.stop] = "#" * len(some)
        lines.append(f"{name:>12} {''.join(marks)}")
    return lines
