"""What an implementation of attention offers: each kernel module ends with one of these values, called KERNEL.

All functions of one kernel compute the same attention, with the signatures of `reference.py`, and must equal it.
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
    """Attention of the queries over their intervals, merged into `carry`; out in `out_dtype` if it is given."""

    def __call__(
        self, q_BTHD: Any, k_BSGD: Any, v_BSGV: Any, where: Intervals, /, *, scale: float, softcap: float | None = None,
        carry: Partial | None = None, out_dtype: Any = None,
    ) -> Partial: ...  # fmt: skip


def serves(problem: "Problem") -> str | None:
    """`refuses` of a kernel that takes every problem."""
    return None


@dataclass(frozen=True)
class TorchKernel:
    """A kernel for torch tensors.

    attend           -> Partial(out, lse)
    attend_backward  (q, k, v, where, dout, lse, delta) -> (dq, dk, dv) in float32, added to dq=, dk=, dv= if given
    refuses          why it cannot serve a problem, or None
    row_delta        (out, dout, dlse) -> rowsum(dout * out) - dlse, in the quickest way there is
    rounded          (dout, lse, delta) with the lse in the dtype that attend_backward computes with
    halves           as attend_backward, in two functions: one gives (dk, dv), the other dq, and each works alone. None:
                     one call finds all three
    totals           as attend_backward, as `Total`s of which nothing is added up yet. None: it adds up itself
    by_out           whether `totals` and attend_backward take out=, and make delta from it; given a delta they leave
                     the work to a kernel that takes one
    """

    attend: Attend
    attend_backward: Callable[..., tuple[Any, ...]]
    refuses: "Callable[[Problem], str | None]" = serves
    row_delta: Callable[..., Any] = row_delta
    rounded: Callable[..., tuple[Any, Any, Any]] = rounded
    halves: Callable[..., tuple[Callable[[], Any], Callable[[], Any]]] | None = None
    totals: Callable[..., tuple[Any, Any, Any]] | None = None
    by_out: bool = False


def no_options(problem: "Problem") -> dict[str, Any]:
    return {}


def as_they_are(
    q: Array, dout: Array, lse: Array, delta: Array, out: Array, dlse: Array | None = None
) -> tuple[Array, ...]:
    """`prepare` of a kernel that takes dout, lse and delta."""
    return dout, lse, delta


@dataclass(frozen=True)
class JaxKernel:
    """A kernel for JAX arrays.

    attend, attend_backward, refuses   as in torch
    options    of a problem: more keyword arguments for both functions
    prepare    (q, dout, lse, delta, out, dlse) -> these rows as every step of a backward pass takes them, made once
    parted     whether one gradient can be had without the others; if not, who wants one pays for three
    """

    attend: Attend
    attend_backward: Callable[..., tuple[Any, Any, Any]]
    refuses: "Callable[[Problem], str | None]" = serves
    options: "Callable[[Problem], dict[str, Any]]" = no_options
    prepare: Callable[..., tuple[Any, ...]] = as_they_are
    parted: bool = True


@dataclass(frozen=True)
class LinearKernel:
    """A kernel of gated linear attention; `ringattn.kernels.linear` says what its functions compute."""

    scan_states: Callable[..., Any]
    read_out: Callable[..., Any]
    scan_gradients: Callable[..., Any]
    gradients: Callable[..., Any]
    room: Callable[..., Any]
    refuses: "Callable[[Problem], str | None]" = serves
