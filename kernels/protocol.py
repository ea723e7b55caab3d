"""The types of kernels: each kernel module ends with a value of one of these types, called KERNEL.

All kernels compute the same attention as `reference.py`, with the same signatures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ringattn.kernels.intervals import Intervals, Rectangle
from ringattn.kernels.partial import Partial
from ringattn.kernels.rows import EVERY, NO_SUMS, Rows, with_delta

if TYPE_CHECKING:
    from ringattn.kernels import Problem


class Disjoint(NamedTuple):
    """How a kernel attends in steps of which no query has keys in two: it writes results, and merges none.

    The intervals of a step are few sequences (`kernels/sequences.py`), of one batch row.

    allocate   (q, value dim) -> memory for a partial
    write      (q, k, v, where, into, scale=, softcap=): writes the rows of `into` of queries that see a key
    finish     (into, the intervals of all steps, the partial to start from or None) -> the partial, after all steps
    backward   (tensors, where, rows, dq, scale=, softcap=) -> (dk, dv): writes the rows of `dq` of queries that see a
               key
    clear      (x, the intervals of all steps): zeros in the rows of `x` of queries that see no key
    """

    allocate: Callable[[Any, int], Partial]
    write: Callable[..., None]
    finish: Callable[[Partial, Sequence[Intervals], Partial | None], Partial]
    backward: Callable[..., tuple[Any, Any]]
    clear: Callable[[Any, Sequence[Intervals]], None]


@dataclass(frozen=True)
class TorchKernel:
    """A kernel for torch tensors.

    attend     (q, k, v, where, scale=, softcap=, carry=, out_dtype=) -> Partial(out, lse): attention of the queries
               over their intervals, merged into `carry`. Values that a query does not see do not reach it, not even
               NaN. Tensors may require gradients: `backward` has them
    backward   ((q, k, v), where, rows, want, into, scale=, softcap=, final=) -> (dq, dk, dv) of these keys, each a
               tensor, or a `Total` whose terms are not added up yet, or the tensor of `into`, if the kernel added to
               that. `rows` are those of `prepare`. One that is `separable` may leave out (None) what is not in `want`.
               With `final` nothing will be added, so they may be rounded to the dtypes of q, k and v
    refuses    why it cannot serve a problem, or None; by default it serves all
    prepare    (dout, lse, delta, out) -> the `Rows` of a backward pass. delta or out may be None; out is given only if
               delta is that of out alone
    separable     whether some gradients can be computed without the others, at their cost alone
    rounds     whether the results for these intervals have the dtype of the inputs anyway
    fills      whether its programs stay on all multiprocessors of a GPU until its end
    disjoint   how it attends in steps of which no query has keys in two, if it prefers such steps
    """

    attend: Callable[..., Partial]
    backward: Callable[..., tuple[Any, Any, Any]]
    refuses: "Callable[[Problem], str | None]" = lambda problem: None
    prepare: Callable[..., Rows] = with_delta
    separable: bool = False
    rounds: Callable[[Intervals], bool] = lambda where: False
    fills: bool = False
    disjoint: Disjoint | None = None


def at_once(attend_backward: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    """`backward` of a function (q, k, v, where, dout, lse, delta) -> (dq, dk, dv)."""

    def backward(
        tensors: tuple[Any, Any, Any], where: Intervals, rows: Rows, want: tuple[int, ...] = EVERY,
        into: tuple[Any, Any, Any] = NO_SUMS, *, final: bool = False, **score: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        return attend_backward(*tensors, where, rows.dout, rows.lse, rows.delta, **score)

    return backward


@dataclass(frozen=True)
class JaxKernel:
    """A kernel for JAX arrays.

    attend, attend_backward, refuses   as in torch, without out_dtype=; dq is added to dq= if that is given. What is no
               sum may have the dtype of the inputs
    options    (problem) -> more keyword arguments for both functions
    prepare    (q, dout, lse, delta, out, dlse) -> q and the rows that each step of a backward pass takes in the place
               of (dout, lse, delta), computed once
    separable  whether attend_backward takes apart=True, by which only those gradients that are used cost something
    plain      whether it is plain jax.numpy, which the compiler can cut, and which has derivatives of any order
    cut        (begin, end, number of keys) -> rectangles that it can run, from intervals that are known, or None
    """

    attend: Callable[..., Partial]
    attend_backward: Callable[..., tuple[Any, Any, Any]]
    refuses: "Callable[[Problem], str | None]" = lambda problem: None
    options: "Callable[[Problem], dict[str, Any]]" = lambda problem: {}
    prepare: Callable[..., tuple[Any, ...]] = lambda q, dout, lse, delta, out, dlse=None: (q, dout, lse, delta)
    separable: bool = False
    plain: bool = False
    cut: "Callable[..., tuple[Rectangle, ...] | None] | None" = None


@dataclass(frozen=True)
class LinearKernel:
    """A kernel of linear attention; `kernels/linear/maps.py` documents its functions.

    gated      the kernel that serves without beta, if it is another one
    """

    scan_states: Callable[..., Any]
    read_out: Callable[..., Any]
    scan_gradients: Callable[..., Any]
    gradients: Callable[..., Any]
    states_shape: Callable[..., Any]
    refuses: "Callable[[Problem], str | None]" = lambda problem: None
    gated: "LinearKernel | None" = None
