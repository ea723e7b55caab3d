"""The types of kernels: each kernel module ends with a value of one of these types, called KERNEL.

All kernels compute the same attention as `reference.py`, with the same signatures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ringattn.kernels.arrays import Array
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial, rounded, row_delta

if TYPE_CHECKING:
    from ringattn.kernels import Problem


class Attend(Protocol):
    """Attention of the queries over their intervals, merged into `carry`; `out` has `out_dtype` if that is given."""

    def __call__(
        self, q_BTHD: Any, k_BSGD: Any, v_BSGV: Any, where: Intervals, /, *, scale: float, softcap: float | None = None,
        carry: Partial | None = None, out_dtype: Any = None,
    ) -> Partial: ...  # fmt: skip


def serves(problem: "Problem") -> str | None:
    """`refuses` of a kernel that takes every problem."""
    return None


def in_full(where: Intervals) -> bool:
    """`rounds` of a kernel whose results are float32 (float64 for float64) if that is requested."""
    return False


@dataclass(frozen=True)
class TorchKernel:
    """A kernel for torch tensors.

    attend           -> Partial(out, lse)
    attend_backward  (q, k, v, where, dout, lse, delta) -> (dq, dk, dv) in float32; halves add to dq=, dk=, dv= if given
    refuses          why it cannot serve a problem, or None
    row_delta        (out, dout, dlse) -> rowsum(dout * out) - dlse
    rounded          (dout, lse, delta) with the lse in the dtype that attend_backward computes in
    halves           as attend_backward, but as two functions, one for (dk, dv) and one for dq, which can run alone;
                     None if only all three gradients together are possible
    totals           as attend_backward, but returns `Total`s, whose parts are not added up yet, or tensors where a
                     gradient has one part; None if not supported
    by_out           whether `totals`, `halves` and attend_backward take out= and compute delta from it. If they get
                     delta instead, some use another kernel
    delta_once       whether delta is better computed ahead of the steps, if there are several
    rounds           whether the results for these intervals have the dtype of the inputs anyway
    fills            whether its programs stay on all multiprocessors of a GPU until its end
    """

    attend: Attend
    attend_backward: Callable[..., tuple[Any, ...]]
    refuses: "Callable[[Problem], str | None]" = serves
    row_delta: Callable[..., Any] = row_delta
    rounded: Callable[..., tuple[Any, Any, Any]] = rounded
    halves: Callable[..., tuple[Callable[[], Any], Callable[[], Any]]] | None = None
    totals: Callable[..., tuple[Any, Any, Any]] | None = None
    by_out: bool = False
    delta_once: bool = False
    rounds: Callable[[Intervals], bool] = in_full
    fills: bool = False


def no_options(problem: "Problem") -> dict[str, Any]:
    return {}


def as_they_are(
    q: Array, dout: Array, lse: Array, delta: Array, out: Array, dlse: Array | None = None
) -> tuple[Array, ...]:
    """`prepare` of a kernel that uses q, dout, lse and delta unchanged."""
    return q, dout, lse, delta


@dataclass(frozen=True)
class JaxKernel:
    """A kernel for JAX arrays.

    attend, attend_backward, refuses   as in torch, without out_dtype=; dq is added to dq= if that is given
    options    (problem) -> more keyword arguments for both functions
    prepare    (q, dout, lse, delta, out, dlse) -> q and the rows that each step of a backward pass takes in the place
               of (dout, lse, delta), computed once
    halves     as attend_backward, but at the cost of only those gradients that are used; None if all three together
               are all it has
    plain      whether it is plain jax.numpy, which the compiler can cut, and which has derivatives of any order
    """

    attend: Callable[..., Partial]
    attend_backward: Callable[..., tuple[Any, Any, Any]]
    refuses: "Callable[[Problem], str | None]" = serves
    options: "Callable[[Problem], dict[str, Any]]" = no_options
    prepare: Callable[..., tuple[Any, ...]] = as_they_are
    halves: Callable[..., tuple[Any, Any, Any]] | None = None
    plain: bool = False


@dataclass(frozen=True)
class LinearKernel:
    """A kernel of gated linear attention; `ringattn.kernels.linear` documents its functions."""

    scan_states: Callable[..., Any]
    read_out: Callable[..., Any]
    scan_gradients: Callable[..., Any]
    gradients: Callable[..., Any]
    states_shape: Callable[..., Any]
    refuses: "Callable[[Problem], str | None]" = serves
