"""A call of attention played event by event: the schedule of a plan, on the links and GPUs of a described machine.

Every transfer waits for its block, then for its turn on the sender's link; every step waits for its keys, then for the
GPU. Ranks and hosts may be slow, and times may vary. What the closed form of `predict` leaves out is here: queues on
links that GPUs of a host share, ranks that wait for late neighbours, and what one slow rank does to all others. Events
of one step of all ranks are computed at once, with numpy: thousands of ranks on one core.
"""

import re
from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

import numpy as np

from ringattn.cost import Course, Shape, kv_heads_of_a_rank, replicas
from ringattn.machine import Link, Machine
from ringattn.planning import Plan
from ringattn.predict import BACKWARD, MEASURED, Rates, Spread, across, course
from ringattn.spec import AttentionSpec, Docs

SLOW = re.compile(r"(rank|host)(\d+):([0-9.]+)")


class World(NamedTuple):
    """Where ranks are and how fast each is; `jitter` is the relative deviation of every duration."""

    machine: Machine
    hosts: np.ndarray  # [ring, ulysses]
    speed: np.ndarray  # [ring, ulysses]
    jitter: float
    random: np.random.Generator

    def varied(self, seconds: np.ndarray) -> np.ndarray:
        """The same durations, as they come out."""
        if not self.jitter:
            return seconds
        return seconds * np.exp(self.random.normal(0.0, self.jitter, seconds.shape))


class Played(NamedTuple):
    """Of every step of every rank [step, ring, ulysses]: when its keys came, when it began and ended, in seconds."""

    arrived: np.ndarray
    begun: np.ndarray
    ended: np.ndarray
    finish: np.ndarray  # [ring, ulysses], of forward and backward

    @property
    def seconds(self) -> float:
        return float(self.finish.max())

    @property
    def working(self) -> float:
        """The share of the time in which the mean rank computes."""
        return float((self.ended - self.begun).sum(0).mean()) / self.seconds


def speeds(slow: str, ring: int, ulysses: int, gpus: int) -> np.ndarray:
    """[ring, ulysses] from "rank7:0.8,host2:0.5": the speed of some ranks, of 1."""
    found = np.ones(ring * ulysses)
    for word in filter(None, slow.split(",")):
        match = SLOW.fullmatch(word)
        if match is None or not 0 < float(match[3]) <= 10:
            raise ValueError(f"slow={word}: give rank7:0.8 or host2:0.5, a speed above 0 (1 is as described)")
        kind, number, speed = match[1], int(match[2]), float(match[3])
        most = ring * ulysses if kind == "rank" else -(-ring * ulysses // gpus)
        if number >= most:
            raise ValueError(f"slow={word}: there are {most} {kind}s, counted from 0")
        found[number if kind == "rank" else slice(number * gpus, (number + 1) * gpus)] = speed
    return found.reshape(ring, ulysses)


def on_links(ready: np.ndarray, seconds: np.ndarray, free: np.ndarray, links: np.ndarray) -> np.ndarray:
    """When each transfer is done, if those that are ready share a link evenly; `free` [link] is when it is idle again.

    `seconds` are those of a transfer alone on its link. Transfers without bytes take no time. In the loop every link
    goes on to its next event: the next transfer that is ready, or done.
    """
    done, some = ready.copy(), np.flatnonzero(seconds > 0)
    order = some[np.argsort(links[some], kind="stable")]
    used, first, count = np.unique(links[order], return_index=True, return_counts=True)
    cell = np.repeat(np.arange(len(used)), count), np.arange(len(order)) - np.repeat(first, count)
    left, least, start, ends = np.zeros((4, len(used), int(count.max(initial=0))))  # [link, transfer]
    left[cell], start[cell] = seconds[order], np.maximum(ready[order], free[links[order]])
    least[cell], now = 1e-9 * seconds[order], np.where(left > 0, start, np.inf).min(1, initial=np.inf)
    while (waiting := left > 0).any():
        going = waiting & (start <= now[:, None])
        share = np.maximum(going.sum(1), 1)
        until = np.minimum(
            now + share * np.where(going, left, np.inf).min(1), np.where(waiting & ~going, start, np.inf).min(1)
        )
        until = np.where(waiting.any(1), until, now)
        left = np.where(going, left - ((until - now) / share)[:, None], left)
        ended = going & (left <= least)
        ends, left, now = np.where(ended, until[:, None], ends), np.where(ended, 0.0, left), until
    done[order] = ends[cell]
    np.maximum.at(free, links[order], done[order])
    return done


class Links:
    """All links of one kind, and when each is idle again."""

    def __init__(self, world: World, link: Link):
        place = np.arange(world.hosts.size) % world.machine.gpus
        self.of = world.hosts.ravel() * world.machine.gpus + place // link.sharing  # [rank]: neighbours may share one
        self.link, self.world, self.free = link, world, np.zeros(int(self.of.max()) + 1)

    def send(self, tokens: np.ndarray, token_bytes: float, senders: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """[transfer]: when it has arrived, if it leaves its sender when it is ready and the link is idle; else -inf."""
        nbytes = tokens * token_bytes
        sent = on_links(ready, self.world.varied(nbytes / self.link.bandwidth), self.free, self.of[senders])
        return np.where(nbytes > 0, sent + self.link.latency, -np.inf)


def ring_pass(
    steps: Course, links: tuple[Links, Links], work: np.ndarray, token_bytes: float, entered: np.ndarray,
    out: list[list[np.ndarray]], returned: float, summed: float,
) -> np.ndarray:  # fmt: skip
    """When every rank is done with all steps, whose times go to `out`; `work` [rank, step] are seconds.

    The keys of a step leave their holder while the step before is computed. `returned` bytes of gradients a token go
    back after the step, to the holder of the keys. The sums of a block that is passed on, `summed` bytes a token, move
    with it, and home to its owner from the last holder of a token.
    """
    (ring, ulysses), world, last = entered.shape, links[0].world, work.shape[1] - 1
    lanes, tokens = np.arange(ulysses), (steps.near, steps.far)
    begun, done, home = entered.copy(), entered.copy(), entered.copy()
    owner, sums, coming = np.arange(ring), entered.copy(), entered.copy()

    def moved(sizes: tuple[np.ndarray, ...], senders: np.ndarray, ready: np.ndarray, nbytes: float) -> np.ndarray:
        numbers = (senders[:, None] * ulysses + lanes).ravel()
        came = [
            kind.send(np.repeat(n, ulysses), nbytes, numbers, ready.ravel())
            for kind, n in zip(links, sizes, strict=True)
        ]
        return np.maximum(*came).reshape(ring, ulysses)

    def of(s: int) -> tuple[np.ndarray, ...]:
        return tuple(x[:, s] for x in tokens)

    def keys(s: int) -> np.ndarray:
        sender = steps.sender[:, s]
        ready = begun[sender] if steps.passed[s] else entered[sender]
        return np.maximum(moved(of(s), sender, ready, token_bytes), entered)

    def passed_on(s: int, held: np.ndarray) -> np.ndarray:
        """When the sums of the `held` tokens are at the next holder, after step s; the others go home."""
        ready, rest, come = np.maximum(np.maximum(sums, coming), done), held.copy(), entered
        if s < last:
            sender = steps.sender[:, s + 1]
            come = moved(of(s + 1), sender, ready[sender], summed)
            np.subtract.at(rest, sender, np.add(*of(s + 1)))
        far = (np.arange(ring) * ulysses // world.machine.gpus) != owner * ulysses // world.machine.gpus
        sizes = np.maximum(rest, 0) * ~far, np.maximum(rest, 0) * far
        np.maximum.at(home, owner, moved(sizes, np.arange(ring), ready, summed))
        return come

    arrived, held = keys(0), np.zeros(ring, int)
    for s in range(last + 1):
        begun = np.maximum(done, arrived)
        done = begun + world.varied(work[:, s, None] / world.speed)
        out.append([arrived, begun, done])
        if s < last:
            arrived = keys(s + 1)
        if not returned:
            continue
        if steps.passed[s]:
            owner, held = owner[steps.sender[:, s]], np.add(*of(s))
        else:
            np.maximum.at(sums, steps.sender[:, s], moved(of(s), np.arange(ring), done, returned))
        if s == last or steps.passed[s + 1]:  # the last step with this block
            if held.any():
                coming = passed_on(s, held)
            else:
                home = np.maximum(home, sums)
            sums = entered.copy()
    return np.maximum(done, home)


def exchange(world: World, near: float, far: float, at: np.ndarray) -> np.ndarray:
    """When all-to-alls among the Ulysses ranks of each ring rank are done, whose ranks come to it at these times."""
    machine = world.machine
    sending = min(machine.gpus, at.size)
    seconds = machine.inside.transfer(near, sending) + machine.between.transfer(far, sending)
    latency = machine.between.latency if far else machine.inside.latency
    return np.broadcast_to(at.max(1, keepdims=True), at.shape) + world.varied(np.full(at.shape, seconds)) + latency


def play(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates, *,
    slow: str = "", jitter: float = 0.0, seed: int = 0, backward: bool = True,
) -> Played:  # fmt: skip
    """One layer's attention, forward and then backward, of all ranks."""
    ring, ulysses = plan.ring, plan.ulysses
    number = np.arange(ring * ulysses).reshape(ring, ulysses)
    world = World(machine, number // machine.gpus, speeds(slow, ring, ulysses, machine.gpus), jitter,
                  np.random.default_rng(seed))  # fmt: skip
    token = shape.kv_bytes(1, kv_heads_of_a_rank(shape.kv_heads, ulysses))
    together = 1 if plan.tokens.by_document else machine.blocks_at_once(token * plan.keys.tokens.shard_len)
    spread = Spread(plan.tokens, plan.keys.tokens, plan.hosts, machine.gpus, spec, docs, every=True)
    steps = course(spread, min(together, ring))
    here = gcd(ulysses, machine.gpus)
    total = shape.q_bytes(plan.local_len)
    total += shape.kv_bytes(plan.keys.local_len, shape.kv_heads * replicas(shape.kv_heads, ulysses))
    swap = total * (here - 1) / ulysses / 2, total * (ulysses - here) / ulysses / 2  # each of two ways
    rows = shape.batch * plan.tokens.shard_len * shape.heads / ulysses
    at, links = np.zeros((ring, ulysses)), (Links(world, machine.inside), Links(world, machine.between))
    out: list[list[np.ndarray]] = []
    grads = 1.0 if rates.narrow or shape.itemsize > 2 else 2.0
    for back in (False, True)[: 1 + backward]:
        slower = (1 + machine.half[back] / rows) / (1 + machine.half[back] / MEASURED)
        flops = shape.flops_a_pair * (BACKWARD if back else 1.0) / ulysses
        rate = rates.of(back, spec, steps.pairs.sum(1).mean() / plan.tokens.shard_len)
        work = steps.pairs * (slower * flops / rate) + machine.launch[back] * (steps.pairs > 0)
        at = exchange(world, *swap, at) if ulysses > 1 else at
        if plan.strategy == "gather":
            at = gathered(plan, world, work, token * (1 + grads * back), at, out)
        else:
            wide = token * max(1.0, 4 / shape.itemsize)
            at = ring_pass(steps, links, work, token, at, out, token * grads * back, wide * back)
        at = exchange(world, *swap, at) if ulysses > 1 else at
    arrived, begun, ended = (np.stack([one[i] for one in out]) for i in range(3))
    return Played(arrived, begun, ended, at)


def gathered(
    plan: Plan, world: World, work: np.ndarray, nbytes: float, at: np.ndarray, out: list[list[np.ndarray]]
) -> np.ndarray:
    """The same for gather: all keys of a ring come at once, when its last rank is there."""
    local = max(1, min(world.machine.gpus // plan.ulysses, plan.ring))
    block = plan.keys.tokens.shard_len * nbytes
    far = across(plan.ring, local, world.machine) * block
    come = exchange(world, (plan.ring - 1) * block, far, at.T).T
    done = come + world.varied(work.sum(1)[:, None] / world.speed)
    out.append([come, come, done])
    return done


def timeline(played: Played, ranks: Mapping[int, str], width: int = 84) -> list[str]:
    """Text: of some ranks, by number, when each computes (#) and waits (.)."""
    ulysses = played.finish.shape[1]
    scale = width / played.seconds
    lines = []
    for number, name in ranks.items():
        r, u = divmod(number, ulysses)
        marks = ["."] * width
        for begun, ended in zip(played.begun[:, r, u], played.ended[:, r, u], strict=True):
            for i in range(int(begun * scale), max(int(begun * scale) + 1, int(ended * scale))):
                if i < width and ended > begun:
                    marks[i] = "#"
        lines.append(f"{name:>12} {''.join(marks)}")
    return lines


def draw(played: Played, ranks: Mapping[int, str], title: str) -> str:
    """The same as an SVG picture: steps green, waiting for keys orange."""
    width, left, row = 900, 110, 22
    scale = (width - left - 10) / played.seconds
    ulysses = played.finish.shape[1]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{row * (len(ranks) + 2)}" '
             f'font-family="sans-serif" font-size="12"><text x="4" y="15">{title}</text>']  # fmt: skip
    for i, (number, name) in enumerate(ranks.items(), 1):
        r, u = divmod(number, ulysses)
        parts.append(f'<text x="4" y="{row * i + 15}">{name}</text>')
        before = 0.0
        for begun, ended in zip(played.begun[:, r, u], played.ended[:, r, u], strict=True):
            for start, stop, color in ((before, begun, "#e76f51"), (begun, ended, "#2a9d8f")):
                if (stop - start) * scale > 0.2:
                    parts.append(f'<rect x="{left + start * scale:.1f}" y="{row * i + 3}" height="{row - 6}" '
                                 f'width="{(stop - start) * scale:.1f}" fill="{color}"/>')  # fmt: skip
            before = ended
    return "\n".join([*parts, "</svg>"])
