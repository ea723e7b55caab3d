"""Prove on this machine that attention over ranks equals its definition in float64: out, lse and every gradient; that
linear attention equals its recurrence; and that caches give the same.

    ringattn verify random=1000 seed=7                         more and other random calls; ranks are threads
    ringattn verify cases=balanced,linear                      those whose description has one of these words
    ringattn verify device=cuda dtype=bfloat16                 threads that share a GPU
    torchrun --nproc-per-node=4 -m ringattn verify             real processes; with device=cuda on the GPUs, even one
    ringattn verify backend=jax                                on JAX arrays, over the devices that jax sees
    ringattn verify model=FOLDER ranks=2 tokens=4096           a transformers model (also by name) against itself

Padding holds NaN. A row (the numbers of a head and token) may be off by twice the worst row of the definition itself in
that dtype, dense, on one device, and by a few roundings; a model by twice the error of one rank in float32, plus 5e-6.
Errors are shown over this limit. A call that fails prints the command that repeats it; refused ones are counted by
reason. The exit status is 1 if a call fails, or none passes.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist

from ringattn import kernels
from ringattn.comms import local, messages
from ringattn.comms.mesh import init_mesh
from ringattn.kernels import linear
from ringattn.launch.processes import join
from ringattn.launch.rows import Row, table
from ringattn.launch.verify import drawn, model, oracle
from ringattn.launch.verify.cases import Case
from ringattn.launch.words import option

KERNELS = ("auto", *dict.fromkeys(kernel.name for kernel in (*kernels.TABLE, *linear.TABLE)))
DRAWN_LIMIT = 100  # times as many calls as are asked for, where `cases` chooses among them
Errors = list[dict[str, float]]  # of each rank, over their limits


@dataclass(frozen=True)
class Options:
    ranks: int | None = option(None, "number of ranks (1 to 8 by default; a model has 4; under torchrun: all)")
    backend: str = option("threads", "threads (or torchrun's ranks), or JAX's devices", among=("threads", "jax"))
    device: str = option("cpu", "where it runs", among=("cpu", "cuda"))
    random: int = option(200, "number of random calls", least=1)
    seed: int = option(0, "the number of the first random call; a number always gives the same call")
    cases: tuple[str, ...] = option((), "only calls whose description has one of these words (default: all)")
    kernel: str = option("auto", "which kernel computes", among=KERNELS)
    dtype: str | None = option(None, "drawn by default", among=tuple(oracle.ROUNDINGS))
    model: str | None = option(None, "a folder of a transformers model, or a config.json, instead of random calls")
    tokens: int | None = option(None, "with model=: number of random tokens (4096, or the most that the model takes)")
    docs: int = option(0, "with model=: number of packed documents of random lengths (0: one)")

    def __str__(self) -> str:
        by = f"processes, {dist.get_backend()}" if dist.is_initialized() else self.backend
        return f"{self.ranks or '1 to 8'} ranks ({by}), {self.device}"


@dataclass(frozen=True)
class Outcome:
    """The worst errors of a call over their limits, over all ranks; or why there are none."""

    case: Case
    errors: dict[str, float] = field(default_factory=dict)
    refused: str | None = None
    broken: str | None = None

    @property
    def wrong(self) -> bool:
        return self.broken is not None or any(not error <= 1 for error in self.errors.values())


def run(options: Options) -> int:
    """Run the calls and print the worst errors of each kind and dtype; 0 if all are right, and some are not refused."""
    if options.backend == "jax":
        os.environ.setdefault("XLA_FLAGS", xla_flags())  # before jax starts
    check(options)
    if started := "RANK" in os.environ:
        join(options.device)
        options = replace(options, ranks=dist.get_world_size())
    speaks = not started or dist.get_rank() == 0
    if options.model is not None:
        return model.run(replace(options, ranks=options.ranks or 4), speaks)
    cases, begun = chosen(options), time.perf_counter()
    if speaks:
        print(f"{len(cases)} random calls over {options}", file=sys.stderr)
    on_ranks = caller(options)
    found = [outcome(options, case, on_ranks) for case in cases]
    if speaks:
        print("\n".join(report(options, found, time.perf_counter() - begun)))
    if started:
        dist.destroy_process_group()
    return int(any(each.wrong for each in found) or all(each.refused for each in found))


def xla_flags() -> str:
    """8 devices of a CPU, whose programs run once or twice: compiling them well takes longer than running them."""
    devices, quick = "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"
    return devices if torch.cuda.is_available() else f"{devices} {quick} --xla_llvm_disable_expensive_passes=true"


def check(options: Options) -> None:
    """A ValueError for options that do not go together, or not with this machine."""
    if options.backend == "jax" and (options.kernel != "auto" or options.device != "cpu" or options.model):
        raise ValueError("backend=jax runs on jax's own devices with their kernel; leave out kernel=, device=, model=")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, and torch sees no GPU; use device=cpu")
    if options.model is None and (options.tokens or options.docs):
        raise ValueError(f"tokens={options.tokens}, docs={options.docs} are of a model; give model=FOLDER too")
    if options.model is not None and (options.cases or options.kernel != "auto" or options.dtype):
        raise ValueError(
            "model= is compared as a whole, in float32, with kernel=auto; leave cases=, kernel=, dtype= out"
        )


def chosen(options: Options) -> list[Case]:
    """The calls that run."""
    device = "jax" if options.backend == "jax" else options.device
    numbers = range(options.seed, options.seed + DRAWN_LIMIT * options.random)
    every = (drawn.draw(number, options.ranks, options.dtype, options.kernel, device) for number in numbers)
    if options.backend == "jax":
        import jax

        every = (case for case in every if case.ring * case.ulysses <= jax.device_count())
    fits = (c for c in every if not options.cases or any(word in c.text for word in options.cases))
    if not (cases := list(islice(fits, options.random))):
        words = ",".join(options.cases)
        raise ValueError(f"cases={words} matches no random call: give a part of a description, as balanced or sinks")
    return cases


def caller(options: Options) -> Callable[[Case, oracle.Truth], Errors]:
    """What runs a call, on the processes that torchrun started, on threads, or on JAX's devices, whose results are
    whole.
    """
    if dist.is_initialized():
        mesh_of = cache(partial(init_mesh, device_type=options.device))
        return lambda case, true: messages.gather(one_rank(options, case, true, mesh_of(**case.sizes)))
    if options.backend == "threads":
        device = options.device
        return lambda case, true: local.run(partial(one_rank, options, case, true), device=device, **case.sizes)
    from ringattn.launch.verify import devices

    return lambda case, true: [true.errors(devices.results(case, true.given))]


def outcome(options: Options, case: Case, on_ranks: Callable[[Case, oracle.Truth], Errors]) -> Outcome:
    """A call's worst errors over the ranks. After one that breaks, the next may be right, but not over processes."""
    true = oracle.truth(case)  # the definition refuses nothing
    try:
        by_rank = on_ranks(case, true)
    except (ValueError, NotImplementedError) as error:
        return Outcome(case, refused=str(error))
    except Exception as error:
        if dist.is_initialized():  # the other ranks wait: name the call, and end
            raise RuntimeError(f"{repeat(options, case)}: {type(error).__name__}: {error}") from error
        return Outcome(case, broken=f"{type(error).__name__}: {error}")
    names = dict.fromkeys(name for errors in by_rank for name in errors)
    return Outcome(case, {n: max(errors[n] for errors in by_rank) for n in names})


def one_rank(options: Options, case: Case, true: oracle.Truth, mesh: Any) -> dict[str, float]:
    """One rank's errors; the gradient of what is the same on all is the sum of their shares."""
    plan, given = case.plan_on(mesh, case.kernel), {n: x.to(options.device) for n, x in true.given.items()}
    if case.steps:
        return true.errors({"out": torch.cat(list(case.pieces(plan, given)), 1)})
    found = oracle.run(case, mesh, given, case.kernel, plan)
    for name in [n for n in found if n[0] == "d" and n[1:] in oracle.WHOLE]:
        for axis in (plan.ring_axis, plan.ulysses_axis):
            found[name] = axis.all_gather(found[name].double()[None]).wait().sum(0)
    return true.errors(found, partial(oracle.local, plan))


def report(options: Options, found: list[Outcome], seconds: float) -> list[str]:
    """A row a kind and dtype; everything that failed; what was refused; the verdict."""

    def kind(each: Outcome) -> tuple[str, str]:
        return each.case.name, each.case.dtype

    rows, columns = list[Row](), dict.fromkeys(n for each in found for n in each.errors)
    for (call, dtype), some in groupby(sorted(found, key=kind), kind):
        calls = list(some)
        result = "FAIL" if any(each.wrong for each in calls) else "pass" if any(each.errors for each in calls) else "-"
        worst = {n: max((each.errors[n] for each in calls if n in each.errors), default=None) for n in columns}
        rows.append({"call": call, "dtype": dtype, "calls": len(calls), **worst, "result": result})
    lines = [f"worst errors over what the dtype allows: {options}, kernel {options.kernel}", ""]
    lines += [table(rows, ["call", "dtype", "calls", *columns, "result"]), ""]
    lines += [failure(options, each) for each in found if each.wrong]
    reasons = Counter(re.sub(r"\d+", "N", each.refused)[:100] for each in found if each.refused is not None)
    lines += [f"refused {count} times: {why}" for why, count in reasons.most_common()]
    passed = sum(each.refused is None and not each.wrong for each in found)
    verdict = f"{passed} of {len(found)} random calls pass, {reasons.total()} are refused"
    return [*lines, f"{verdict}, in {seconds:.1f} s"]


def repeat(options: Options, case: Case) -> str:
    """The command that runs this call again, with what the user chose."""
    named = [f for f in fields(Options) if f.name not in ("random", "seed", "cases")]
    words = [f"{f.name}={getattr(options, f.name)}" for f in named if getattr(options, f.name) != f.default]
    start = f"torchrun --nproc-per-node {options.ranks} -m " if dist.is_initialized() else ""
    return " ".join([f"{start}ringattn verify random=1", f"seed={case.seed}", *words])


def failure(options: Options, found: Outcome) -> str:
    """The line that repeats a call that is wrong, and what is wrong."""
    off = [f"{n} is off by {error:.2g} times its limit" for n, error in found.errors.items() if not error <= 1]
    return f"{repeat(options, found.case)}\n  {found.broken or ', '.join(off)}\n  {found.case.text}"
