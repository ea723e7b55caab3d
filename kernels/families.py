"""A kernel over several families of intervals, one after the other: partials merge, and gradients add up."""

from dataclasses import replace
from typing import Any

from ringattn.kernels.arrays import sum_of
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial
from ringattn.kernels.protocol import JaxKernel, TorchKernel
from ringattn.kernels.rows import EVERY, NO_SUMS, Rows


def over_families(kernel: TorchKernel) -> TorchKernel:
    """The kernel; intervals of one family reach it as they are."""

    def attend(
        q: Any, k: Any, v: Any, where: Intervals, *, carry: Partial | None = None, out_dtype: Any = None, **score: Any
    ) -> Partial:
        *others, last = where.families
        for family in others:
            dtype = q.dtype if carry is None and kernel.rounds(family) else None
            carry = kernel.attend(q, k, v, family, carry=carry, out_dtype=dtype, **score)
        return kernel.attend(q, k, v, last, carry=carry, out_dtype=out_dtype, **score)

    def backward(
        tensors: tuple[Any, Any, Any], where: Intervals, rows: Rows, want: tuple[int, ...] = EVERY,
        into: tuple[Any, Any, Any] = NO_SUMS, *, final: bool = False, **score: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        if not where.also:
            return kernel.backward(tensors, where, rows, want, into, final=final, **score)
        from ringattn.kernels.total import Total

        sums = [Total(x) for x in tensors]
        for family in where.families:
            places: Any = tuple(total.running if x is None else x for x, total in zip(into, sums, strict=True))
            grads = kernel.backward(tensors, family, rows, want, places, **score)
            for total, grad, target in zip(sums, grads, places, strict=True):
                if grad is not target:  # else the kernel added to it
                    total.add(grad)
                    total.fold()
        return tuple(total if total.terms else x for total, x in zip(sums, into, strict=True))  # type: ignore[return-value]

    return replace(kernel, attend=attend, backward=backward)


def over_families_in_jax(kernel: JaxKernel) -> JaxKernel:
    """As `over_families`, of a kernel for JAX arrays."""

    def attend(q: Any, k: Any, v: Any, where: Intervals, *, carry: Partial | None = None, **score: Any) -> Partial:
        for family in where.families:
            carry = Partial(*kernel.attend(q, k, v, family, carry=carry, **score))
        assert carry is not None
        return carry

    def attend_backward(
        q: Any, k: Any, v: Any, where: Intervals, *rows: Any, dq: Any = None, **score: Any
    ) -> tuple[Any, Any, Any]:
        grads: Any = None
        for family in where.families:
            dq, *new = kernel.attend_backward(q, k, v, family, *rows, dq=dq, **score)
            grads = new if grads is None else sum_of(grads, new)
        return dq, *grads

    return replace(kernel, attend=attend, attend_backward=attend_backward)
