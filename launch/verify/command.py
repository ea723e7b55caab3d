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
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ringattn import kernels
from ringattn.comms import local
from ringattn.comms.mesh import init_mesh
from ringattn.kernels import linear
from ringattn.launch.processes import join
from ringattn.launch.rows import Row, table
from ringattn.launch.verify import model, oracle
from ringattn.launch.verify.cases import Case, draw
from ringattn.launch.words import option

KERNELS = ("auto", *dict.fromkeys(kernel.name for kernel in (*kernels.TABLE, *linear.TABLE)))
DEVICES = "--xla_force_host_platform_device_count=8"
QUICK = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # programs run once or twice
DRAWN_LIMIT = 100  # times as many calls as are asked for, where `cases` chooses among them
mesh_of = cache(init_mesh)  # for each size, its process groups are made once


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
    refused: str = ""
    broken: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong, if anything is."""
        off = [f"{n} is off by {error:.2g} times its limit" for n, error in self.errors.items() if not error <= 1]
        return self.broken or ", ".join(off)


def run(options: Options) -> int:
    """Run the calls and print the worst errors of each kind and dtype; 0 if all are right, and some are not refused."""
    if options.backend == "jax":
        os.environ.setdefault("XLA_FLAGS", DEVICES + QUICK * (not torch.cuda.is_available()))  # before jax starts
    check(options)
    if started := "RANK" in os.environ:
        join(options.device)
        options = replace(options, ranks=dist.get_world_size())
    say: Any = print if not started or dist.get_rank() == 0 else lambda *words, **how: None
    if options.model is not None:
        options = replace(options, ranks=options.ranks or 4)
        return model.run(options, say, partial(over_ranks, options))
    cases, begun = chosen(options), time.perf_counter()
    say(f"{len(cases)} random calls over {options}", file=sys.stderr)
    found = [outcome(options, case) for case in cases]
    say("\n".join(report(options, found, time.perf_counter() - begun)))
    if started:
        dist.destroy_process_group()
    return int(any(each.wrong for each in found) or all(each.refused for each in found))


def check(options: Options) -> None:
    """A ValueError for options that do not go together, or not with this machine."""
    if options.backend == "jax" and (options.kernel != "auto" or options.device != "cpu" or options.model):
        raise ValueError("backend=jax runs on jax's own devices with their kernel; leave out kernel=, device=, model=")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, and torch sees no GPU; use device=cpu")
    if options.model is None and (options.tokens or options.docs):
        raise ValueError(f"tokens={options.tokens}, docs={options.docs} are of a model; give model=FOLDER too")
    if options.model is not None and (options.cases or options.kernel != "auto" or options.dtype):
        raise ValueError("model= is compared in float32, with kernel=auto; leave cases=, kernel=, dtype= out")


def chosen(options: Options) -> list[Case]:
    """The calls that run."""
    device = "jax" if options.backend == "jax" else options.device
    numbers = range(options.seed, options.seed + DRAWN_LIMIT * options.random)
    every = (draw(number, options.ranks, options.dtype, options.kernel, device) for number in numbers)
    if options.backend == "jax":
        import jax

        every = (case for case in every if case.ring * case.ulysses <= jax.device_count())
    fits = (c for c in every if not options.cases or any(word in c.text for word in options.cases))
    if not (cases := list(islice(fits, options.random))):
        raise ValueError(f"cases={','.join(options.cases)} matches no random call; give a part of a description")
    return cases


def over_ranks(options: Options, work: Callable[[Any], Any], ring: int, ulysses: int = 1) -> Any:
    """What `work(mesh)` gives on the first rank, over those of torchrun or threads."""
    if dist.is_initialized():
        return work(mesh_of(ring=ring, ulysses=ulysses, device_type=options.device))
    return local.run(work, 300.0 if options.model else 60.0, options.device, ring=ring, ulysses=ulysses)[0]


def outcome(options: Options, case: Case) -> Outcome:
    """A call's worst errors over the ranks. After one that breaks, the next may be right, but not over processes."""
    true = oracle.truth(case)  # the definition refuses nothing
    try:
        if options.backend == "jax":
            from ringattn.launch.verify import devices

            return Outcome(case, true.errors(devices.results(case, true.given)))
        return Outcome(case, over_ranks(options, partial(one_rank, options, case, true), case.ring, case.ulysses))
    except (ValueError, NotImplementedError) as error:
        return Outcome(case, refused=str(error))
    except Exception as error:
        if dist.is_initialized():  # the other ranks wait: name the call, and end
            raise RuntimeError(f"{repeat(options, case)}: {type(error).__name__}: {error}") from error
        return Outcome(case, broken=f"{type(error).__name__}: {error}")


def one_rank(options: Options, case: Case, true: oracle.Truth, mesh: Any) -> dict[str, float]:
    """The worst errors over the ranks; the gradient of what is the same on all is the sum of their shares."""
    plan, given = case.plan_on(mesh), {n: x.to(options.device) for n, x in true.given.items()}
    if case.steps:
        errors = true.errors({"out": torch.cat(list(case.pieces(plan, given)), 1)})
    else:
        found = oracle.run(case, plan, given)
        shared = [n for n in found if n[0] == "d" and n[1:] in oracle.WHOLE]
        found |= {n: oracle.over_axes(plan, torch.sum, found[n].double()) for n in shared}
        errors = true.errors(found, partial(oracle.local, plan))
    numbers = torch.tensor(list(errors.values()), dtype=torch.float64, device=options.device)
    return dict(zip(errors, oracle.over_axes(plan, torch.amax, numbers).tolist(), strict=True))


def report(options: Options, found: list[Outcome], seconds: float) -> list[str]:
    """A row a kind and dtype; everything that failed; what was refused; the verdict."""
    rows, columns = list[Row](), dict.fromkeys(n for each in found for n in each.errors)
    for kind in sorted({(each.case.name, each.case.dtype) for each in found}):
        calls = [each for each in found if (each.case.name, each.case.dtype) == kind]
        result = "FAIL" if any(each.wrong for each in calls) else "pass" if any(each.errors for each in calls) else "-"
        worst = {n: max((each.errors[n] for each in calls if n in each.errors), default=None) for n in columns}
        rows.append({"call": kind[0], "dtype": kind[1], "calls": len(calls), **worst, "result": result})
    lines = [f"worst errors over what the dtype allows: {options}, kernel {options.kernel}", ""]
    lines += [table(rows, ["call", "dtype", "calls", *columns, "result"]), ""]
    lines += [f"{repeat(options, each.case)}\n  {each.wrong}\n  {each.case.text}" for each in found if each.wrong]
    reasons = Counter(re.sub(r"\d+", "N", each.refused)[:100] for each in found if each.refused)
    lines += [f"refused {count} times: {why}" for why, count in reasons.most_common()]
    passed = sum(not each.refused and not each.wrong for each in found)
    return [*lines, f"{passed} of {len(found)} random calls pass, {reasons.total()} are refused, in {seconds:.1f} s"]


def repeat(options: Options, case: Case) -> str:
    """The command that runs this call again, with what the user chose."""
    named = [f for f in fields(Options) if f.name not in ("random", "seed", "cases")]
    words = [f"{f.name}={getattr(options, f.name)}" for f in named if getattr(options, f.name) != f.default]
    start = f"torchrun --nproc-per-node {options.ranks} -m " if dist.is_initialized() else ""
    return " ".join([f"{start}ringattn verify random=1", f"seed={case.seed}", *words])
