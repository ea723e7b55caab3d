"""Gated linear attention of one device: what a chunk leaves behind is a state, and states compose.

    B batch   T tokens   H heads   K key dim   V value dim   G gates a head: K (one a key channel) or 1

    S_t = exp(g_t) S_{t-1} + k_t^T v_t        S [K, V], g the log decay, <= 0
    o_t = scale * q_t S_t

Every implementation is a `protocol.LinearKernel`, and must equal `recurrent`. What ranks exchange lies between them:

    scan_states(k, v, g, begin) -> Scan                          what these tokens leave, from a state of zero
    read_out(q, k, v, g, begin, scan, start_kv, scale[, kept]) -> out     given the state before the first token
    scan_gradients(q, dout, g, begin, scale) -> Scan             the start state's gradient, if the end state has none
    gradients(q, k, v, g, begin, scan, start_kv, rscan, dout, dend_kv, scale) -> dq, dk, dv, dg
    room(k, v) -> Room                                           for the states before all chunks

Backward wants the state before every chunk once more. `read_out` writes them into `kept`, if it is given that room, and
`gradients` takes that in the place of the scan: nothing is walked again, and it gives the same bits.

q, k [B, T, H, K], v [B, T, H, V]; g [B, T, H, K], [B, T, H] or None (no decay). `begin` [1 or B, T] int32 or None: the
index of the first token of my document, counted from the first token here. Below zero (or None) the document began
earlier, and its tokens see `start_kv`; from zero on the state was reset there. An interval, as every mask here: gates
of -inf would do the same and take the precision of the sums beside them along.

`start_kv` and `dend_kv` may be functions that wait for them (`now`): a kernel launches first what does not need them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ringattn.kernels import Kernel, Problem
from ringattn.kernels import select as select_from


class State(NamedTuple):
    """What some tokens do to the state before them: kv -> exp(log_decay) kv + self.kv. In float32 or float64.

    `log_decay` [B, H, G] is -inf where a document began among them; `kv` [B, H, K, V].
    """

    log_decay: Tensor
    kv: Tensor

    def after(self, kv: Tensor) -> Tensor:
        """The state behind these tokens when `kv` was the state before them."""
        return self.log_decay.exp()[..., None] * kv + self.kv


Later = Tensor | Callable[[], Tensor | None] | None


def now(x: Later) -> Tensor | None:
    """A state that is here, or on its way."""
    return x() if callable(x) else x


class Scan(NamedTuple):
    """`end`: what all the tokens do together. `saved`: what the later functions of the same kernel want of it."""

    end: State
    saved: Any = None


Room = tuple[tuple[int, ...], Any]  # the size and dtype of the states before all chunks


def compose(earlier: State, later: State) -> State:
    """Both, one after the other: associative, not commutative."""
    return State(earlier.log_decay + later.log_decay, later.after(earlier.kv))


TABLE = (
    Kernel("triton", "ringattn.kernels.triton.linear", named=("cpu",)),
    Kernel("chunkwise", "ringattn.kernels.chunkwise"),
)


def select(problem: Problem, impl: str = "auto") -> Kernel:
    """The kernel called `impl`, or the first of the table that serves the problem and is not slow there."""
    return select_from(problem, impl, TABLE)
