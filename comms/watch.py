"""Time-outs for lanes, which cannot be interrupted: finds the rank that a lane waits for in vain."""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.engines import IN, OUT, RELEASE, Lanes
from ringattn.comms.lost import with_first_loss
from ringattn.comms.outbox import Outbox

Wait = tuple[int, int, str]  # the lane, the peer, and what it waits for


class Record:
    """The waits of a captured graph. A lane counts those that are over in the current replay, from 0 in each."""

    def __init__(self) -> None:
        counts = torch.zeros(3, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())
        self.counts, self.address = counts.numpy(), counts.data_ptr()  # of both lanes, and how many replays are over
        self.waits: tuple[list[Wait], list[Wait]] = ([], [])
        self.replays = 0  # that were launched

    def current(self) -> Wait:
        """The first wait that is not over: of what arrives, if there is one. A graph may have none."""
        ahead = [wait for lane in (IN, OUT) for wait in self.waits[lane][int(self.counts[lane]) :][:1]]
        return (ahead or self.waits[IN] or self.waits[OUT] or [(IN, 0, "a graph")])[0]


class Watch:
    """A thread that follows the progress of the lanes, and reports the rank that one of them waits for too long.

    Then it sets all flags, so that the device does not wait for ever. What arrived until then is invalid, and every
    later use of the axis raises the error.
    """

    def __init__(self, lanes: Lanes, outbox: Outbox, size: int, counts: Tensor, timeout: float):
        self.lanes, self.outbox, self.size, self.timeout = lanes, outbox, size, timeout
        self.done_counts = counts.numpy()  # [3, size]: waits that are over, by lane and peer; the lanes write them
        self.address = counts.data_ptr()
        self.expected: Counter[tuple[int, int]] = Counter()
        self.open: deque[tuple[float, Any, Any, int, Wait | Record]] = deque()  # end, counts, at, number, what
        self.error: str | None = None
        self.record: Record | None = None  # of the graph that is captured
        self.thread: threading.Thread | None = None

    def expect(self, what: str, lane: int, peer: int) -> tuple[int, int]:
        """Note that the lane now waits for that peer; returns an address and a number to write when that is over."""
        if self.lanes.capturing():
            if self.record is None:  # the graph is the user's, and nobody reads this
                return self.address + 4 * 2 * self.size, 0
            waits = self.record.waits[lane]
            waits.append((lane, peer, what))
            return self.record.address + 4 * lane, len(waits)
        self.expected[lane, peer] += 1
        number = self.expected[lane, peer]
        self.follow(self.done_counts, (lane, peer), number, (lane, peer, what))
        return self.address + 4 * (lane * self.size + peer), number % 2**32

    def follow(self, counts: Any, at: Any, number: int, what: Wait | Record) -> None:
        self.open.append((time.monotonic() + self.timeout, counts, at, number, what))
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()

    def check(self) -> None:
        if self.error:
            raise ConnectionError(self.error)

    def run(self) -> None:
        """Look every `turn` seconds. After a loss it goes on setting flags, for work that is still launched then."""
        turn = min(0.2, self.timeout / 10)
        while True:
            time.sleep(0.01 if self.error else turn)
            while self.open and self.done():
                self.open.popleft()
            if self.open and self.error:
                self.release()
            elif self.open and time.monotonic() > self.open[0][0]:
                self.error = self.report(turn)
                print(self.error, file=sys.stderr, flush=True)
                self.lanes.attach()

    def done(self) -> bool:
        _, counts, at, number, _ = self.open[0]
        return (int(counts[at]) - number) % 2**32 < 2**31  # of numbers the lanes write 32 bits

    def report(self, turn: float) -> str:
        """The error that names the peer of the first open wait, and the first loss that any rank has reported."""
        waited = self.open[0][-1]
        lane, peer, what = waited.current() if isinstance(waited, Record) else waited
        way = "nothing came from" if lane == IN else "nothing was taken by"
        mine = (
            f"rank {self.outbox.rank} of {self.size}: {way} rank {peer} within {self.timeout:g} s"
            f"{what and f' ({what})'}; it died, hangs, or makes another call"
        )
        if lane == IN:  # that rank may itself wait for the lost one: let it report first
            time.sleep(2 * turn)
        return in_time(partial(with_first_loss, mine), 5 * turn) or mine

    def release(self) -> None:
        for peer in range(self.size):
            for slot in range(self.outbox.slots):
                self.lanes.set(RELEASE, self.outbox.full(self.outbox.rank, peer, slot))
                self.lanes.set(RELEASE, self.outbox.free(self.outbox.rank, peer, slot))


def in_time(ask: Callable[[], Any], seconds: float) -> Any:
    """The result of `ask()`, or None if it takes longer than `seconds` or fails."""
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None
