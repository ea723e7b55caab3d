"""Prove on this machine that attention over ranks equals its definition in float64: out, lse and every gradient; that
linear attention equals its recurrence; and that caches give the same.

    ringattn verify                                            200 random calls; ranks are threads of this process
    ringattn verify random=1000 seed=7                         more of them, and others
    ringattn verify cases=balanced,linear                      those whose description has one of these words
    ringattn verify kernel=tiled                               those that this kernel computes
    ringattn verify device=cuda dtype=bfloat16                 threads that share a GPU
    torchrun --nproc-per-node=4 -m ringattn verify             real processes; with device=cuda on the GPUs, even one
    ringattn verify backend=jax                                on JAX arrays, over the devices that jax sees
    ringattn verify model=FOLDER ranks=2 tokens=4096           a transformers model (also by name) against itself

Each call is drawn with all public arguments together. Padding holds NaN. A row (the numbers of a head and token) may be
off by twice the worst row of the definition itself in that dtype, dense, on one device, and by a few roundings; errors
are shown over this limit. A call that fails prints the command that repeats it; refused ones are counted by reason. The
exit status is 1 if a call fails, or none passes.

A model is a folder that model.save_pretrained wrote, or a config.json (random weights). The limit for its logits, loss,
hidden states and gradients is twice the error of the same model on one rank in float32, plus 5e-6. The table shows in
which layer they first differ.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache, partial
from itertools import islice
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

DTYPES = ("float64", "float32", "bfloat16", "float16")
DRAWN_AT_MOST = 100  # so many times as many calls as are asked for, where `cases` chooses among them


@dataclass(frozen=True)
class Options:
    ranks: int | None = option(None, "number of ranks (1 to 8 by default; a model has 4; under torchrun: all)")
    backend: str = option(
        "threads", "threads (unless torchrun started ranks), or JAX's devices", among=("threads", "jax")
    )
    device: str = option("cpu", "where it runs", among=("cpu", "cuda"))
    random: int = option(200, "number of random calls", least=1)
    seed: int = option(0, "the number of the first random call; a number always gives the same call")
    cases: tuple[str, ...] = option((), "only calls whose description has one of these words (default: all)")
    kernel: str = option("auto", "auto, or the name of a kernel")
    dtype: str | None = option(None, "drawn by default", among=DTYPES)
    model: str | None = option(None, "a folder of a transformers model, or a config.json, instead of random calls")
    tokens: int | None = option(None, "with model=: number of random tokens (4096, or the most that the model takes)")
    docs: int = option(0, "with model=: number of packed documents of random lengths (0: one)")

    def draw(self, number: int) -> Case:
        return drawn.draw(number, self.ranks, self.dtype, self.kernel, "jax" if self.backend == "jax" else self.device)

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


@lru_cache(maxsize=2)  # all threads want it
def truth_of(options: Options, number: int) -> oracle.Truth:
    return oracle.truth(options.draw(number))


def run(options: Options) -> int:
    """Run the calls and print the worst errors of each kind and dtype; 0 if all are right, and some are not refused."""
    if options.backend == "jax":
        os.environ.setdefault("XLA_FLAGS", xla_flags())  # before jax starts
        options = replace(options, dtype=options.dtype or "float32")
    check(options)
    if started := "RANK" in os.environ:
        join(options.device)
        options = replace(options, ranks=dist.get_world_size())
    speaks = not started or dist.get_rank() == 0
    if options.model is not None:
        return model.run(replace(options, ranks=options.ranks or 4), speaks)
    if not chosen(options):
        words = ",".join(options.cases)
        raise ValueError(f"cases={words} matches no random call: give a part of a description, as balanced or sinks")
    if speaks:
        print(f"{len(chosen(options))} random calls over {options}", file=sys.stderr)
    begun = time.perf_counter()
    found = (in_processes if started else in_this_one)(options)
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
    every = dict.fromkeys(kernel.name for kernel in (*kernels.TABLE, *linear.TABLE))
    if options.kernel not in ("auto", *every):
        raise ValueError(f"kernel={options.kernel!r}: choose one of auto, {', '.join(every)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, and torch sees no GPU; use device=cpu")
    if options.model is not None:
        return model.check(options)
    if options.tokens or options.docs:
        raise ValueError(f"tokens={options.tokens}, docs={options.docs} are of a model; give model=FOLDER too")


@lru_cache(maxsize=1)
def chosen(options: Options) -> list[Case]:
    """The calls that run."""
    every: Iterable[Case] = map(options.draw, range(options.seed, options.seed + DRAWN_AT_MOST * options.random))
    if options.backend == "jax":
        from ringattn.launch.verify import devices

        every = filter(devices.runs_here, every)
    fits = (c for c in every if not options.cases or any(word in c.text for word in options.cases))
    return list(islice(fits, options.random))


def in_this_one(options: Options) -> list[Outcome]:
    """Ranks are threads on one device, or JAX's devices, whose results are whole."""
    if options.backend == "threads":

        def by_rank(case: Case) -> list[dict[str, float]]:
            return local.run(partial(one_rank, options, case), device=options.device, **case.sizes)
    else:
        from ringattn.launch.verify import devices

        def by_rank(case: Case) -> list[dict[str, float]]:
            true = truth_of(options, case.seed)
            return [true.errors(devices.results(case, true.given))]

    return [outcome(options, case, by_rank) for case in chosen(options)]


def in_processes(options: Options) -> list[Outcome]:
    """The same over the ranks that torchrun started."""
    mesh_of, found = cache(partial(init_mesh, device_type=options.device)), list[Outcome]()
    for case in chosen(options):
        found.append(outcome(options, case, lambda c: messages.gather(one_rank(options, c, mesh_of(**c.sizes)))))
        if broken := found[-1].broken:  # the other ranks wait: name the call, and end
            raise RuntimeError(f"{repeat(options, case)}: {broken}")
    return found


def outcome(options: Options, case: Case, call: Callable[[Case], list[dict[str, float]]]) -> Outcome:
    """A call's worst errors over the ranks. After one that breaks, the next may be right."""
    truth_of(options, case.seed)  # the definition refuses nothing
    try:
        by_rank = call(case)
    except (ValueError, NotImplementedError) as error:
        return Outcome(case, refused=str(error))
    except Exception as error:
        return Outcome(case, broken=f"{type(error).__name__}: {error}")
    names = dict.fromkeys(name for errors in by_rank for name in errors)
    return Outcome(case, {n: max(errors[n] for errors in by_rank) for n in names})


def one_rank(options: Options, case: Case, mesh: Any) -> dict[str, float]:
    """One rank's errors; the gradient of what is the same on all is the sum of their shares."""
    true, plan = truth_of(options, case.seed), case.plan_on(mesh, case.kernel)
    given = {n: x.to(options.device) for n, x in true.given.items()}
    if case.steps:
        return true.errors({"out": torch.cat(list(case.pieces(plan, given)), 1)})
    found = oracle.run(case, mesh, given, case.kernel, plan)
    for name in [n for n in found if n[0] == "d" and n[1:] in oracle.WHOLE]:
        for axis in (plan.ring_axis, plan.ulysses_axis):
            found[name] = axis.all_gather(found[name].double()[None]).wait().sum(0)
    return true.errors(found, partial(oracle.local, plan))


def report(options: Options, found: list[Outcome], seconds: float) -> list[str]:
    """A row a kind and dtype; everything that failed; what was refused; the verdict."""
    rows, columns = dict[tuple[str, str], Row](), dict.fromkeys(n for each in found for n in each.errors)
    for each in sorted(found, key=lambda each: (each.case.name, each.case.dtype)):
        start = {"call": each.case.name, "dtype": each.case.dtype, "calls": 0, "result": "-"}
        row = rows.setdefault((each.case.name, each.case.dtype), start)
        row |= {n: max(error, row.get(n, 0.0)) for n, error in each.errors.items()} | {"calls": row["calls"] + 1}
        row["result"] = "FAIL" if each.wrong or row["result"] == "FAIL" else "pass" if each.errors else row["result"]
    lines = [f"worst errors over what the dtype allows: {options}, kernel {options.kernel}", ""]
    lines += [table([*rows.values()], ["call", "dtype", "calls", *columns, "result"]), ""]
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
