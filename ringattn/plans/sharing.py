"""Work on what is shared: transfers on a link, and ranks that compute on fewer cores than there are of them."""

from typing import NamedTuple

import numpy as np

FOREVER = 1e6  # seconds, in which everything is done


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
        if not len(self.times):  # every rank has a core
            return begun + seconds
        return np.interp(np.interp(begun, self.times, self.work) + seconds, self.work, self.times)

    @classmethod
    def shared(cls, begun: np.ndarray, ended: np.ndarray, cores: float) -> "Clock":
        """That of ranks which compute between these times and share so many cores evenly."""
        order = np.argsort(times := np.concatenate([begun, ended]), kind="stable")
        busy = np.cumsum(np.repeat([0, 1, -1], [1, len(begun), len(ended)])[np.append(0, order + 1)])
        times = np.append(times[order], times.max() + FOREVER)
        return cls(times, np.cumsum(np.minimum(1.0, cores / np.maximum(busy, 1)) * np.diff(times, prepend=0.0)))


ALONE = Clock(np.zeros(0), np.zeros(0))
