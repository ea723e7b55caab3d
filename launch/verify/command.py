"""Prove on this machine that attention over ranks equals dense float64 attention: out, lse and every gradient.
Linear attention, gated and with the delta rule, must equal its recurrence: out, the last state and every gradient.

    ringattn verify                                            4 ranks as threads of this process
    ringattn verify backend=gloo ranks=2 cases=docs,window     real processes, some of the cases
    ringattn verify backend=nccl device=cuda dtype=bfloat16    one rank per GPU
    ringattn verify backend=gloo device=cuda                   4 ranks on the GPUs that are here, even one
    torchrun --nproc-per-node=4 -m ringattn verify             the ranks that were started
    ringattn verify random=100 seed=7                          random calls: any shape, mask, mesh, magnitude and dtype
    ringattn verify random=100 cases=balanced                  those of the balanced layout
    ringattn verify backend=jax random=300                     on JAX arrays, over the devices that jax sees
    ringattn verify model=FOLDER ranks=2 tokens=4096           a transformers model (also by name) against itself

Runs the tests' list of cases with every strategy and layout that this number of ranks allows, with NaN in the padding.
Limits of the relative error of a result (by norm): 2e-6 in float32; in lower precisions twice the error of dense
attention on one device in the same dtype; for linear attention, whose states are rounded in every chunk, 1e-3 in
float16 and 8e-3 in bfloat16. Each element of attention has a limit too, the rounding of the dtype summed for these
inputs: `element` is the worst error over this limit. For random calls, also of caches, only the latter is checked; a
failed call prints the command that repeats it. The exit status is 1 if an error is above its limit, or if auto finds no
kernel for a case. A kernel given by kernel= may refuse cases.

A model is a folder that model.save_pretrained wrote, or a config.json (random weights). The limit for its logits, loss,
hidden states and gradients is twice the error of the same model on one rank in float32, plus 5e-6. The table shows in
which layer they first differ.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ringattn import kernels
from ringattn.choosing import factored
from ringattn.comms import local, messages
from ringattn.comms.mesh import init_mesh
from ringattn.kernels import linear
from ringattn.launch import processes
from ringattn.launch.verify import attention, drawn, linear_oracle, model, oracle
from ringattn.launch.verify.cases import FEATURES, Case
from ringattn.launch.words import option
from ringattn.layouts.layout import MAKERS

DTYPES = ("float64", "float32", "bfloat16", "float16")

RARE = 100  # so many times as many random calls as are asked for are drawn, at most

AnyCase = Case | linear_oracle.Case | drawn.Call
# Each kind of case has a module with its title, table of kernels, and `truth_of`.
KINDS: dict[type, Any] = {drawn.Call: drawn, Case: attention, linear_oracle.Case: linear_oracle}


@dataclass(frozen=True)
class Options:
    ranks: int | None = option(None, "number of ranks (4; random calls on threads: 1 to 8; under torchrun: all)")
    backend: str = option(
        "threads", "threads of this process, processes, or JAX's devices", among=("threads", "gloo", "nccl", "jax")
    )
    device: str = option("cpu", "where it runs", among=("cpu", "cuda"))
    cases: tuple[str, ...] = option((), "only cases, or random calls, that have one of these words (default: all)")
    kernel: str = option("auto", "auto, or the name of a kernel")
    dtype: str | None = option(None, "float32 by default; random calls: any of them", among=DTYPES)
    timeout: float = option(300.0, "seconds after which processes that hang are ended")
    random: int = option(0, "number of random calls, which run instead of the cases")
    seed: int = option(0, "the number of the first random call; a number always gives the same call")
    model: str | None = option(None, "a folder of a transformers model, or a config.json, instead of the cases")
    tokens: int | None = option(None, "with model=: number of random tokens (4096, or the most that the model takes)")
    docs: int = option(0, "with model=: number of packed documents of random lengths (0: one)")

    @property
    def count(self) -> int:
        return self.ranks or 4

    @property
    def precision(self) -> str:
        return self.dtype or "float32"


@dataclass(frozen=True)
class Outcome:
    """One case on all ranks: the worst error of each result, the limits, or why it did not run."""

    case: AnyCase
    errors: dict[str, float]
    limits: dict[str, float]
    refused: str = ""
    broken: str = ""

    @property
    def good(self) -> bool:
        return not (self.refused or self.broken or self.over)

    @property
    def over(self) -> list[str]:
        """The results that are off by more than their limit."""
        return [name for name, error in self.errors.items() if not error <= self.limits[name]]


def run(options: Options) -> int:
    """Run the cases and print each strategy's and layout's worst errors; 0 if every one is within its limit."""
    if options.backend == "jax":
        os.environ.setdefault("XLA_FLAGS", xla_flags())  # before jax starts
        options = replace(options, dtype=options.precision)
    check(options)
    if options.model is not None:
        return model.run(options)
    started = "RANK" in os.environ
    options = joined(options) if started else options
    speaks = not started or dist.get_rank() == 0
    if speaks:
        what = "random calls" if options.random else "cases"
        print(f"{len(chosen(options))} {what} over {ranks_of(options)} ({options.backend})", file=sys.stderr)
    begun = time.perf_counter()
    try:
        outcomes = [outcome(options, *pair) for pair in zip(chosen(options), everyone(options, started), strict=True)]
    except processes.RankError as error:
        print(f"ringattn verify: {error}", file=sys.stderr)
        return 1
    good = all(o.good or (o.refused and options.kernel != "auto") for o in outcomes) and any(o.good for o in outcomes)
    if speaks:
        print("\n".join(report(options, outcomes, time.perf_counter() - begun)))
    if started:
        dist.destroy_process_group()
    return 0 if good else 1


def joined(options: Options) -> Options:
    """The options as torchrun's ranks have them: their number, and the backend of their device."""
    backend, here = "gloo", torch.cuda.device_count()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % here)
        backend = "nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= here else "gloo"
        os.environ.setdefault(processes.SHARING, "1")
    dist.init_process_group(backend)
    return replace(options, ranks=dist.get_world_size(), backend=backend)


def xla_flags() -> str:
    """8 devices of a CPU, whose programs run once or twice: compiling them well takes longer than running them."""
    flags = ["--xla_force_host_platform_device_count=8"]
    if not torch.cuda.is_available():
        flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
        if version("jaxlib").startswith("0.10."):  # later ones have no such flag, and end
            flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


def check(options: Options) -> None:
    """A ValueError for options that do not go together, or not with this machine."""
    if options.backend == "jax" and (options.kernel != "auto" or options.device != "cpu" or options.model):
        raise ValueError("backend=jax runs on jax's own devices with their kernel; leave out kernel=, device=, model=")
    every = dict.fromkeys(kernel.name for kernel in (*kernels.TABLE, *linear.TABLE))
    if options.kernel not in ("auto", *every):
        raise ValueError(f"kernel={options.kernel!r}: choose one of auto, {', '.join(every)}")
    if options.count > processes.MOST:
        raise ValueError(f"ranks={options.ranks}: on this machine there can be 1 to {processes.MOST}")
    if options.backend == "nccl" and options.device != "cuda":
        raise ValueError("backend=nccl does not move tensors on cpu; use backend=gloo, or device=cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, and torch sees no GPU; use device=cpu")
    gpus = torch.cuda.device_count()
    if options.backend == "nccl" and gpus < int(os.environ.get("LOCAL_WORLD_SIZE", options.count)):
        raise ValueError(f"ranks={options.count} need as many GPUs, and torch sees {gpus}; gloo shares them")
    if options.model is not None:
        return model.check(options)
    if options.tokens or options.docs:
        raise ValueError(f"tokens={options.tokens}, docs={options.docs} are of a model; give model=FOLDER too")
    if not chosen(options):
        names = ", ".join(case.name for case in (*FEATURES, *linear_oracle.FEATURES))
        among = "random calls: give a part of their names, as gather, balanced or 2x4" if options.random else names
        raise ValueError(f"cases={','.join(options.cases)} matches none of {among}")


@lru_cache(maxsize=1)
def chosen(options: Options) -> list[AnyCase]:
    every: Iterable[AnyCase] = (*placed(options.count), *linear_oracle.placed(options.count))
    if options.random:
        ranks = options.ranks if options.backend in ("threads", "jax") else options.count
        how = ranks, options.dtype, options.kernel, "jax" if options.backend == "jax" else options.device
        every = (drawn.draw(options.seed + i, *how) for i in range(RARE * options.random))
    if options.backend == "jax":
        from ringattn.launch.verify import devices

        every = filter(devices.runs_here, every)
    fits = (c for c in every if not options.cases or any(word in str(c) for word in options.cases))
    return list(islice(fits, options.random or None))


def placed(ranks: int) -> Iterator[Case]:
    """Every feature on every strategy and layout of every ring x ulysses that makes this many ranks."""
    for ring, ulysses in factored(ranks):
        ways = [("ulysses", "contiguous")] if ring == 1 else [(s, x) for s in ("ring", "gather") for x in MAKERS]
        for strategy, layout in ways:
            for case in FEATURES:
                if case.crossed and layout == "balanced":
                    continue
                heads = math.lcm(case.heads, ulysses)
                yield replace(case, ring=ring, ulysses=ulysses, strategy=strategy, layout=layout, heads=heads)


def everyone(options: Options, started: bool) -> list[Sequence[dict[str, Any]]]:
    """Case by case what every rank found."""
    if started:
        by_rank = messages.gather(one_process(options))
    elif options.backend in ("threads", "jax"):
        return [here(options, case) for case in chosen(options)]
    else:
        by_rank = processes.run(one_process, options.count, options, backend=options.backend, timeout=options.timeout)
    return list(zip(*by_rank, strict=True))


def here(options: Options, case: AnyCase) -> list[dict[str, Any]]:
    """One case in this process: all ranks on one device, or JAX's devices, whose results are whole."""

    def one_rank(mesh: Any) -> dict[str, Any]:
        mesh.device_type = options.device
        return one_case(options, case, mesh)

    try:
        truth = KINDS[type(case)].truth_of(case, options.precision)  # once, before every thread wants it
        if options.backend == "threads":
            return local.run(one_rank, ring=case.ring, ulysses=case.ulysses)
        from ringattn.launch.verify import devices

        return [{"errors": devices.errors(case, truth), "shares": {}}]
    except Exception as error:
        if options.random:  # the next calls may be right, and this one is to be repeated
            return [{"broken": f"{type(error).__name__}: {error}"}]
        raise


def one_process(options: Options) -> list[dict[str, Any]]:
    """This rank's part of every case, in a process group that exists."""
    mesh_of = cache(partial(init_mesh, device_type=options.device))
    results = []
    for case in chosen(options):
        try:
            results.append(one_case(options, case, mesh_of(ring=case.ring, ulysses=case.ulysses)))
        except Exception as error:
            if isinstance(case, drawn.Call):  # the other ranks wait: name the call, and end
                raise RuntimeError(f"{repeat(options, case.seed)}: {type(error).__name__}: {error}") from error
            raise
    return results


def one_case(options: Options, case: AnyCase, mesh: Any) -> dict[str, Any]:
    """One rank's errors and its share of what is the same on all; or why the kernel refuses, on all ranks alike."""
    kind = KINDS[type(case)]
    if not options.random and options.kernel not in ("auto", *(kernel.name for kernel in kind.TABLE)):
        return {"refused": f"{options.kernel}: no kernel of {'linear ' * (kind is linear_oracle)}attention"}
    truth = kind.truth_of(case, options.precision)
    given: dict[str, Any] = {n: None if x is None else x.to(options.device) for n, x in truth.given.items()}
    try:
        if isinstance(case, drawn.Call):
            results, mine = drawn.run(case, mesh, given)
        else:
            results = oracle.run(case, mesh, given, options.kernel)
            mine = partial(oracle.own, case.plan_on(mesh))
    except NotImplementedError as error:
        return {"refused": str(error)}
    shares = oracle.shares(results)
    held = {n: x for n, x in results.items() if n not in shares}
    errors = oracle.compared(held, truth, mine)
    return {"errors": errors, "shares": {n: x.double().tolist() for n, x in shares.items()}}


def outcome(options: Options, case: AnyCase, results: Sequence[dict[str, Any]]) -> Outcome:
    """A case's worst error over the ranks; the gradient of what is the same on all is the sum of their shares."""
    truth = KINDS[type(case)].truth_of(case, options.precision)
    for why in ("refused", "broken"):
        if texts := [each[why] for each in results if why in each]:
            return Outcome(case, {}, truth.limits, **{why: texts[0]})
    by_rank = [each["errors"] for each in results]
    for name in results[0]["shares"]:
        total = torch.tensor([each["shares"][name] for each in results], dtype=torch.float64).sum(0)
        by_rank.append(oracle.compared({name: total}, truth))
    names = dict.fromkeys(name for errors in by_rank for name in errors)
    return Outcome(case, {n: max(errors[n] for errors in by_rank if n in errors) for n in names}, truth.limits)


def report(options: Options, outcomes: list[Outcome], seconds: float) -> list[str]:
    """A row a strategy, mesh and layout, or a kind of random calls; everything that failed; the verdict."""
    dtype = "any dtype" if options.random and options.dtype is None else options.precision
    where = f"{ranks_of(options)} ({options.backend}), {options.device}, {dtype}, kernel {options.kernel}"
    lines: list[str] = []
    for kind, module in KINDS.items():
        if these := [o for o in outcomes if isinstance(o.case, kind)]:
            title = module.TITLE if lines else f"{module.TITLE}: {where}"
            lines += [title, "", *rows(these, getattr(module, "RESULTS", None)), ""]
    lines += [failure(options, o) for o in outcomes if not o.good and not o.refused]
    for why, refused in Counter(o.refused for o in outcomes if o.refused).items():
        lines.append(f"refused in {refused} cases: {why}")
    passed = sum(o.good for o in outcomes)
    what = "random calls" if options.random else "cases"
    return [*lines, f"{passed} of {len(outcomes)} {what} pass, in {seconds:.1f} s"]


def ranks_of(options: Options) -> str:
    drawn_too = options.random and options.backend == "threads" and options.ranks is None
    return "1 to 8 ranks" if drawn_too else f"{options.count} ranks"


def rows(outcomes: list[Outcome], results: Sequence[str] | None) -> list[str]:
    """The table: the worst error of each result at each place, or in each kind of random calls."""
    names = results or dict.fromkeys(n for o in outcomes for n in o.errors)
    head = f"{'ring ulysses strategy layout':<34}" if results else "call       dtype     "
    lines = [f"{head}{'cases':>6}" + "".join(f"{n:>9}" for n in names) + "  result"]
    by_place: dict[str, list[Outcome]] = {}
    for o in outcomes:
        by_place.setdefault(o.case.table_row, []).append(o)
    for where, here in by_place.items() if results else sorted(by_place.items()):
        worst = [max((o.errors[n] for o in here if n in o.errors), default=None) for n in names]
        cells = "".join(f"{'-':>9}" if w is None else f"{w:>9.1e}" for w in worst)
        refused = sum(bool(o.refused) for o in here)
        verdict = "FAIL" if any(not o.good and not o.refused for o in here) else "pass" if refused < len(here) else "-"
        lines.append(f"{where}{len(here):>6}{cells}  {verdict}" + (f" ({refused} refused)" if refused else ""))
    return lines


def repeat(options: Options, seed: int) -> str:
    """The command that runs this call again, with what the user chose."""
    named = [f for f in fields(Options) if f.name not in ("random", "seed", "cases", "timeout")]
    words = [f"{f.name}={getattr(options, f.name)}" for f in named if getattr(options, f.name) != f.default]
    return " ".join(["ringattn verify random=1", f"seed={seed}", *words])


def failure(options: Options, outcome: Outcome) -> str:
    """What is wrong in one case; of a random call first the line that repeats it."""
    case, errors, limits = outcome.case, outcome.errors, outcome.limits
    if isinstance(case, drawn.Call):
        times = ", ".join(f"{n} is off by {errors[n]:.2g} times what rounding allows" for n in outcome.over)
        return f"{repeat(options, case.seed)}\n  {outcome.broken or times}\n  {case}"
    return f"{case}: " + ", ".join(f"{n} is off by {errors[n]:.1e} (limit {limits[n]:.1e})" for n in outcome.over)
