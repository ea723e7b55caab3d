"""Linear attention on one device: a token, a chunk or a rank maps the state by an affine map, and maps compose.

    B batch   T tokens   H value heads   G key heads, which divide H   K key dim   V value dim

    S_t = exp(g_t) S_{t-1} + k_t^T u_t        S [K, V], g the log decay, <= 0
    o_t = scale * q_t S_t

    u_t = v_t                                        gated linear attention
    u_t = beta_t (v_t - k_t exp(g_t) S_{t-1})        the delta rule

By the delta rule the state decays, then k reads it, then u is written. Given its u, it is gated linear attention.
Nothing here normalises k; with |k| <= 1 and beta in [0, 2] no map of the state enlarges it.

Every implementation is a `protocol.LinearKernel`, and must equal `recurrent`. Ranks exchange states between its calls:

    scan_states(x[, maps]) -> Scan                        the map of all tokens, unless `maps` is False
    read_out(x, scan, start[, kept]) -> out, end          given the start state; out [B, T, H, V] in q's dtype
    scan_gradients(x, dout[, maps]) -> Scan               the map from the end state's gradient to the start state's
    gradients(x, scan, start, rscan, dout, dend) -> dq, dk, dv, dg, dbeta, dstart    in the inputs' dtypes and shapes
    states_shape(k, v) -> ShapeAndDtype                   of the states before all chunks

The start state is the state before the first token, the end state the one behind the last token. One device alone
passes maps=False: it knows the start state, and the map of all tokens may cost as much as the output. The backward pass
needs the state before every chunk again. `read_out` writes them to `kept` if it is given, and `gradients` takes `kept`
in place of the scan: it then skips that work, and gives the same bits.

`start` and `dend` may be functions that wait for the state (`resolve`), so that kernels launch other work first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """The tokens of one call on one device.

    `begin` [1 or B, T] int32 or None is the index of the first token of each token's document, relative to the first
    token here. Tokens with a negative begin (or None) see the start state; the others see a state that was reset to
    zero at `begin`. Gates of -inf would do the same, but they would cost the sums of gates their precision.
    """

    q: Tensor  # [B, T, G, K]
    k: Tensor  # [B, T, G, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None  # [B, T, H, K], [B, T, H] or None: no decay
    beta: Tensor | None  # [B, T, H]: the delta rule; None: gated linear attention
    begin: Tensor | None
    scale: float


class Map(NamedTuple):
    """What some tokens do to the state: factor * state + kv, in float32 or float64.

    `factor` is a decay of each row, [B, H, K or 1, 1], and for the delta rule a matrix [B, H, K, K]. It is 0 if a
    document begins among the tokens. `kv` is [B, H, K, V]. Each column of the state is mapped independently.
    """

    factor: Tensor
    kv: Tensor

    def after(self, state: Tensor | None) -> Tensor:
        """The state behind these tokens if `state` is before them; None is a state of zero."""
        if state is None:
            return self.kv
        if self.factor.shape[-1] == 1:
            return torch.addcmul(self.kv, self.factor, state)
        kv, factor, state = (x.flatten(0, -3) for x in (self.kv, self.factor, state))  # one launch instead of two
        return torch.baddbmm(kv, factor, state).view(self.kv.shape)

    def packed(self) -> Tensor:
        """[B, H, K, 1 + V or K + V], factor and kv side by side as they travel."""
        return torch.cat([self.factor.expand(*self.kv.shape[:-1], -1), self.kv], -1)

    def then(self, later: "Map") -> "Map":
        """The composition of both maps: associative, not commutative."""
        rows = self.factor.shape[-1] == 1
        factor = later.factor * self.factor if rows else later.factor @ self.factor
        return Map(factor, later.after(self.kv))


Deferred = Tensor | Callable[[], Tensor | None] | None  # a state, or a function that waits for it


def resolve(x: Deferred) -> Tensor | None:
    """The state; waits for it if it is still travelling."""
    return x() if callable(x) else x


class Scan(NamedTuple):
    """`map`: that of all tokens together, or None. `saved`: what later functions of the same kernel need."""

    map: Map | None
    saved: Any = None


ShapeAndDtype = tuple[tuple[int, ...], Any]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]  # dq, dk, dv, dg, dbeta, dstart


def of_values(x: Tensor, heads: int, dim: int) -> Tensor:
    """q or k with each key head repeated for its value heads, along `dim`."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def of_keys(dx: Tensor, heads: int, dim: int) -> Tensor:
    """The gradient of `of_values`: the sum over the value heads of each key head."""
    if dx.shape[dim] == heads:
        return dx
    each = dx.unflatten(dim, (heads, -1))
    if each.shape[dim + 1] == 2:  # torch's sum over two numbers takes a GPU three times as long
        return each.select(dim + 1, 0) + each.select(dim + 1, 1)
    return each.sum(dim + 1)
