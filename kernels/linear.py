"""Gated linear attention on one device: a chunk maps the state before it to the state behind it, and maps compose.

    B batch   T tokens   H heads   K key dim   V value dim   G gates a head: K (one a key channel) or 1

    S_t = exp(g_t) S_{t-1} + k_t^T v_t        S [K, V], g the log decay, <= 0
    o_t = scale * q_t S_t

Every implementation is a `protocol.LinearKernel`, and must equal `recurrent`. Ranks exchange states between its calls:

    scan_states(k, v, g, begin) -> Scan                          the end state, from a start state of zero
    read_out(q, k, v, g, begin, scan, start_kv, scale[, kept]) -> out     given the start state
    scan_gradients(q, dout, g, begin, scale) -> Scan             the start state's gradient, if the end state's is zero
    gradients(q, k, v, g, begin, scan, start_kv, rscan, dout, dend_kv, scale) -> dq, dk, dv, dg
    states_shape(k, v) -> ShapeAndDtype                          of the states before all chunks

The start state is the state before the first token, the end state the one behind the last token. The backward pass
needs the state before every chunk again. `read_out` writes them to `kept` if it is given, and `gradients` takes `kept`
in place of the scan: it then skips that work, and gives the same bits.

q, k [B, T, H, K], v [B, T, H, V]; g [B, T, H, K], [B, T, H] or None (no decay). `begin` [1 or B, T] int32 or None is
the index of the first token of each token's document, relative to the first token here. Tokens with a negative begin
(or None) see `start_kv`; the others see a state that was reset at `begin`. Gates of -inf would do the same, but they
would cost the sums of gates their precision.

`start_kv` and `dend_kv` may be functions that wait for the state (`resolve`), so that kernels launch other work first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ringattn.kernels import Kernel, Problem
from ringattn.kernels import select as select_from


class State(NamedTuple):
    """The map of the state by some tokens: kv -> exp(log_decay) kv + self.kv, in float32 or float64.

    `log_decay` [B, H, G] is -inf if a document begins among the tokens; `kv` is [B, H, K, V].
    """

    log_decay: Tensor
    kv: Tensor

    def after(self, kv: Tensor) -> Tensor:
        """The state behind these tokens if `kv` is the state before them."""
        return self.log_decay.exp()[..., None] * kv + self.kv


Deferred = Tensor | Callable[[], Tensor | None] | None  # a state, or a function that waits for it


def resolve(x: Deferred) -> Tensor | None:
    """The state; waits for it if it is still travelling."""
    return x() if callable(x) else x


class Scan(NamedTuple):
    """`end`: the map of all tokens together. `saved`: what later functions of the same kernel need."""

    end: State
    saved: Any = None


ShapeAndDtype = tuple[tuple[int, ...], Any]


def compose(earlier: State, later: State) -> State:
    """The composition of both maps: associative, not commutative."""
    return State(earlier.log_decay + later.log_decay, later.after(earlier.kv))


TABLE = (
    Kernel("triton", "ringattn.kernels.triton.linear", named=("cpu",)),
    Kernel("chunkwise", "ringattn.kernels.chunkwise"),
)


def select(problem: Problem, impl: str = "auto") -> Kernel:
    """`ringattn.kernels.select` from this table."""
    return select_from(problem, impl, TABLE)
