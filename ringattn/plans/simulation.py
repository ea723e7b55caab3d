"""A call of attention played event by event: the schedule of a plan, on the links and GPUs of a described machine.

Every transfer waits for its block, then for its turn on the sender's link; every step waits for its keys, then for the
GPU. What the closed form of `predict` leaves out is here: queues on links and cores that ranks of a host share, late
neighbours, and slow ranks. Events of one step of all ranks are computed at once, and only those of the next step are
kept: 16,384 ranks in a ring have 268 million steps, forward and again backward.
"""

import re
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape
from ringattn.plans.course import Ring, Steps, steps_of
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.predict import Pass, Rates, gathered_bytes
from ringattn.steps.table import Transfers

SLOW = re.compile(r"(rank|host)(\d+):(\d+\.?\d*|\.\d+)")
LARGEST_RING = 16384  # ranks: it takes a minute, and a gigabyte of pairs


def users(group: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Of each rank, how many of its group are some of these; at least 1."""
    return np.maximum(np.bincount(group, some)[group], 1)


def speeds(slow: str, ring: int, ulysses: int, gpus: int) -> np.ndarray:
    """[ring, ulysses] from "rank7:0.8,host2:0.5": the speed of some ranks, of 1."""
    factors = np.ones(ring * ulysses)
    limits = {"rank": ring * ulysses, "host": -(-ring * ulysses // gpus)}
    for word in filter(None, slow.split(",")):
        match = SLOW.fullmatch(word)
        if match is None or not 0 < float(match[3]) <= 10 or int(match[2]) >= limits[match[1]]:
            raise ValueError(
                f"slow={word}: give rank7:0.8 or host2:0.5, a speed above 0 (1 is as described); there are "
                f"{limits['rank']} ranks and {limits['host']} hosts, counted from 0"
            )
        number = int(match[2])
        some = number if match[1] == "rank" else slice(number * gpus, (number + 1) * gpus)
        factors[some] = float(match[3])
    return factors.reshape(ring, ulysses)


class Played:
    """A plan's ranks on a machine: what links still carry, when all are done, and each step of those `watched`."""

    def __init__(self, plan: Plan, machine: Machine, slow: str, watched: Sequence[int]):
        self.plan, self.machine, self.ranks = plan, machine, plan.ring * plan.ulysses
        self.speed = speeds(slow, plan.ring, plan.ulysses, machine.gpus)
        self.host, place = np.divmod(np.arange(self.ranks), machine.gpus)
        # of both kinds of links, which ranks share one, and when that of each rank is idle again
        self.links = [(link, self.host * machine.gpus + place // link.sharing, np.zeros(self.ranks))
                      for link in (machine.inside, machine.between)]  # fmt: skip
        self.watched, self.rows = list(watched), list[list[np.ndarray]]()
        self.worked = 0.0  # seconds of the mean rank
        self.finish = np.zeros((plan.ring, plan.ulysses))

    @property
    def steps(self) -> np.ndarray:
        """[arrived, begun, ended; step, watched]"""
        return np.array(self.rows).swapaxes(0, 1)

    @property
    def seconds(self) -> float:
        return float(self.finish.max())

    def computed(self, arrived: np.ndarray, begun: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when all ranks are done with a step that takes one alone so long; they share cores."""
        seconds = (seconds[:, None] / self.speed).ravel()
        if self.machine.cores:
            seconds = seconds * np.maximum(users(self.host, seconds > 0) / self.machine.cores, 1.0)
        ended = begun + seconds.reshape(begun.shape)
        self.worked += float((ended - begun).mean())
        if self.watched:
            self.rows.append([x.ravel()[self.watched] for x in (arrived, begun, ended)])
        return ended

    def send(self, rows: Transfers, token_bytes: float, ready: np.ndarray) -> np.ndarray:
        """[ring, ulysses]: when all that a rank receives is there, which leaves when its source is `ready`.

        What a rank sends at a time arrives at a time, behind what its link still carries. Ranks that share a link, and
        send for the same step, do so at the same time.
        """
        arrived, each = np.full(ready.size, -np.inf), ready.shape[1]
        remote = self.host[rows.source * each] != self.host[rows.destination * each]
        for (link, group, free), kind in zip(self.links, (~remote, remote), strict=True):
            if kind.any():
                some = rows.some(kind)
                nbytes = np.bincount(some.source, some.tokens, len(ready)).repeat(each) * token_bytes
                senders = users(group, nbytes > 0) if link.sharing > 1 else 1
                done = np.maximum(ready.ravel(), free) + link.seconds(nbytes, senders=senders)
                free[:] = np.where(nbytes > 0, done, free)
                source, at = (x[:, None] * each + np.arange(each) for x in (some.source, some.destination))
                np.maximum.at(arrived, at.ravel(), done[source.ravel()] + link.seconds(0, 1))
        return arrived.reshape(ready.shape)

    def exchange(self, near: float, far: float, at: np.ndarray) -> np.ndarray:
        """When all-to-alls among the ranks of each row are done, which come to it at these times."""
        late = (self.machine.between if far else self.machine.inside).seconds(0, 1)
        seconds = self.machine.swap(near, far, self.ranks) + late
        return np.broadcast_to(at.max(1, keepdims=True), at.shape) + seconds

    def heads(self, at: np.ndarray, each: Pass) -> np.ndarray:
        """When heads are exchanged, one of two ways, behind what a rank's links still carry."""
        if self.plan.ulysses == 1:
            return at
        carrying = [free.reshape(at.shape) for (*_, free), n in zip(self.links, each.heads, strict=True) if n]
        return self.exchange(each.heads[0] / 2, each.heads[1] / 2, reduce(np.maximum, carrying, at))

    def ring_pass(self, steps: Steps, each: Pass, entered: np.ndarray) -> np.ndarray:
        """When every rank is done with all steps.

        The keys of a phase leave their holders as it begins, to the ranks of their hosts and to the next one. Gradients
        go back after the step, to the holder of the keys. The sums of a block that hops on move with it, and home to
        its owner from the last holder of a token.
        """
        arrived, since, done, home, sums, passed_on = (entered,) * 6  # every rank has its own block, `since` when
        starts = {int(first): phase for phase, first in enumerate(steps.first)}
        ends = [*steps.first[1:].tolist(), steps.count]
        following = steps.met(0, 1)
        for s in range(steps.count):
            ((reader, _, pairs), reads), following = following, steps.met(s + 1, s + 2)
            begun = np.maximum(done, arrived)
            done = self.computed(arrived, begun, each.seconds(np.bincount(reader, pairs, len(entered))))
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

    def gather_pass(self, steps: Steps, each: Pass, entered: np.ndarray) -> np.ndarray:
        """The same for gather: all keys of a ring come at once, when its last rank is there."""
        cells = (steps.met(s, s + 1)[0] for s in range(steps.count))
        pairs = sum((np.bincount(reader, seen, len(entered)) for reader, _, seen in cells), np.zeros(len(entered)))
        come = self.exchange(*gathered_bytes(self.plan, self.machine, each), entered.T).T
        return self.computed(come, come, each.seconds(pairs))


def play(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates, *,
    slow: str = "", backward: bool = True, watched: Sequence[int] = (),
) -> Played:  # fmt: skip
    """One layer's attention, forward and then backward, of all ranks; the steps of those `watched` are kept."""
    if plan.ring > LARGEST_RING:
        raise ValueError(f"ring={plan.ring}: rings of at most {LARGEST_RING} ranks are simulated; add Ulysses ranks")
    ring = Ring(plan.tokens, plan.keys.tokens, spec, docs, plan.hosts, machine.gpus)
    played = Played(plan, machine, slow, watched)
    for back in (False, True)[: 1 + backward]:
        each = Pass(plan, shape, spec, docs, machine, rates, back)
        steps = steps_of(ring, plan.together(shape, back), everyone=True)
        one_pass = played.gather_pass if plan.strategy == "gather" else played.ring_pass
        launched = played.finish + each.host(1 if plan.strategy == "gather" else steps.count)
        entered = played.heads(played.finish + each.first, each)
        played.finish = np.maximum(played.heads(one_pass(steps, each, entered), each), launched)
    return played


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
