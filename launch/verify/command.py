"""Prove on this machine that attention over ranks equals its definition in float64: out, lse and every gradient; that
linear attention equals its recurrence; and that caches give the same.

    ringattn verify                                            200 random calls; ranks are threads of this process
    ringattn verify random=1000 seed=7                         more of them, and others
    ringattn verify cases=balanced,linear                      those whose description has one of these words
    ringattn verify kernel=tiled                               those that this kernel computes
    ringattn verify backend=gloo ranks=2                       real processes
    ringattn verify backend=nccl device=cuda dtype=bfloat16    one rank per GPU
    ringattn verify backend=gloo device=cuda                   4 ranks on the GPUs that are here, even one
    torchrun --nproc-per-node=4 -m ringattn verify             the ranks that were started
    ringattn verify backend=jax                                on JAX arrays, over the devices that jax sees
    ringattn verify model=FOLDER ranks=2 tokens=4096           a transformers model (also by name) against itself

Each call is drawn with all public arguments together: shapes, masks, documents, layouts, strategies, routes, kernels,
dtypes and magnitudes. Padding holds NaN. A row (the numbers of a head and token) may be off by twice the worst row of
the definition itself in that dtype, dense, on one device, and by a few roundings; errors are shown over this limit. A
call that fails prints the command that repeats it; refused ones are counted by reason. The exit status is 1 if a call
fails, or none passes.

A model is a folder that model.save_pretrained wrote, or a config.json (random weights). The limit for its logits, loss,
hidden states and gradients is twice the error of the same model on one rank in float32, plus 5e-6. The table shows in
which layer they first differ.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ringattn import kernels
from ringattn.comms import local, messages
from ringattn.comms.mesh import init_mesh
from ringattn.kernels import linear
from ringattn.launch import processes
from ringattn.launch.verify import drawn, model, oracle
from ringattn.launch.verify.cases import Case
from ringattn.launch.words import option

DTYPES = ("float64", "float32", "bfloat16", "float16")
BACKENDS = ("threads", "gloo", "nccl", "jax")
DRAWN_AT_MOST = 100  # so many times as many calls as are asked for, where `cases` chooses among them
Found = dict[str, Any]  # of a rank: errors, and shares of what is the same on all ranks; or refused, or broken


@dataclass(frozen=True)
class Options:
    ranks: int | None = option(None, "number of ranks (threads and jax: 1 to 8; processes: 4; under torchrun: all)")
    backend: str = option("threads", "threads of this process, processes, or JAX's devices", among=BACKENDS)
    device: str = option("cpu", "where it runs", among=("cpu", "cuda"))
    random: int = option(200, "number of random calls", least=1)
    seed: int = option(0, "the number of the first random call; a number always gives the same call")
    cases: tuple[str, ...] = option((), "only calls whose description has one of these words (default: all)")
    kernel: str = option("auto", "auto, or the name of a kernel")
    dtype: str | None = option(None, "drawn by default", among=DTYPES)
    timeout: float = option(300.0, "seconds after which processes that hang are ended")
    model: str | None = option(None, "a folder of a transformers model, or a config.json, instead of random calls")
    tokens: int | None = option(None, "with model=: number of random tokens (4096, or the most that the model takes)")
    docs: int = option(0, "with model=: number of packed documents of random lengths (0: one)")

    @property
    def count(self) -> int:
        return self.ranks or 4

    @property
    def anywhere(self) -> bool:
        """Whether each call may have its own number of ranks."""
        return self.backend in ("threads", "jax")

    def draw(self, number: int) -> Case:
        ranks, device = self.ranks if self.anywhere else self.count, "jax" if self.backend == "jax" else self.device
        return drawn.draw(number, ranks, self.dtype, self.kernel, device)

    def __str__(self) -> str:
        ranks = "1 to 8 ranks" if self.anywhere and self.ranks is None else f"{self.count} ranks"
        return f"{ranks} ({self.backend})"


@lru_cache(maxsize=2)  # all threads want it
def truth_of(options: Options, number: int) -> oracle.Truth:
    return oracle.truth(options.draw(number))


def run(options: Options) -> int:
    """Run the calls and print the worst errors of each kind and dtype; 0 if all are right, and some are not refused."""
    if options.backend == "jax":
        os.environ.setdefault("XLA_FLAGS", xla_flags())  # before jax starts
        options = replace(options, dtype=options.dtype or "float32")
    check(options)
    if options.model is not None:
        return model.run(options)
    started = "RANK" in os.environ
    options = joined(options) if started else options
    speaks = not started or dist.get_rank() == 0
    if speaks:
        print(f"{len(chosen(options))} random calls over {options}", file=sys.stderr)
    begun = time.perf_counter()
    try:
        found = [outcome(options, *pair) for pair in zip(chosen(options), everyone(options, started), strict=True)]
    except processes.RankError as error:
        print(f"ringattn verify: {error}", file=sys.stderr)
        return 1
    if speaks:
        print("\n".join(report(options, found, time.perf_counter() - begun)))
    if started:
        dist.destroy_process_group()
    return int(any(map(is_wrong, found)) or all("refused" in each for each in found))


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
        words = ",".join(options.cases)
        raise ValueError(f"cases={words} matches no random call: give a part of a description, as balanced or sinks")


@lru_cache(maxsize=1)
def chosen(options: Options) -> list[Case]:
    """The calls that run."""
    every: Iterable[Case] = map(options.draw, range(options.seed, options.seed + DRAWN_AT_MOST * options.random))
    if options.backend == "jax":
        from ringattn.launch.verify import devices

        every = filter(devices.runs_here, every)
    fits = (c for c in every if not options.cases or any(word in c.text for word in options.cases))
    return list(islice(fits, options.random))


def everyone(options: Options, started: bool) -> Iterable[list[Found]]:
    """Call by call what every rank found."""
    if started:
        by_rank = messages.gather(one_process(options))
    elif options.anywhere:
        return (here(options, case) for case in chosen(options))
    else:
        by_rank = processes.run(one_process, options.count, options, backend=options.backend, timeout=options.timeout)
    return map(list, zip(*by_rank, strict=True))


def here(options: Options, case: Case) -> list[Found]:
    """One call in this process: all ranks on one device, or JAX's devices, whose results are whole."""
    true = truth_of(options, case.seed)
    try:
        if options.backend == "threads":
            return local.run(partial(one_call, options, case), device=options.device, **case.sizes)
        from ringattn.launch.verify import devices

        return [{"errors": true.errors(devices.results(case, true.given)), "shares": {}}]
    except (ValueError, NotImplementedError) as error:
        return [{"refused": str(error)}]
    except Exception as error:  # the next calls may be right, and this one is to be repeated
        return [{"broken": f"{type(error).__name__}: {error}"}]


def one_process(options: Options) -> list[Found]:
    """This rank's part of every call, in a process group that exists."""
    mesh_of, found = cache(partial(init_mesh, device_type=options.device)), list[Found]()
    for case in chosen(options):
        try:
            found.append(one_call(options, case, mesh_of(**case.sizes)))
        except (ValueError, NotImplementedError) as error:
            found.append({"refused": str(error)})  # on all ranks alike
        except Exception as error:  # the other ranks wait: name the call, and end
            raise RuntimeError(f"{repeat(options, case)}: {type(error).__name__}: {error}") from error
    return found


def one_call(options: Options, case: Case, mesh: Any) -> Found:
    """One rank's errors, and its share of what is the same on all."""
    true, plan = truth_of(options, case.seed), case.plan_on(mesh, case.kernel)
    given = {n: x.to(options.device) for n, x in true.given.items()}
    if case.steps:
        return {"errors": true.errors({"out": torch.cat(list(case.pieces(plan, given)), 1)}), "shares": {}}
    found = oracle.run(case, mesh, given, case.kernel, plan)
    shares = {n: found.pop(n).double().tolist() for n in list(found) if n[0] == "d" and n[1:] in oracle.WHOLE}
    return {"errors": true.errors(found, partial(oracle.own, plan)), "shares": shares}


def outcome(options: Options, case: Case, results: list[Found]) -> Found:
    """A call's worst error over the ranks; the gradient of what is the same on all is the sum of their shares."""
    if bad := [each for each in results if "errors" not in each]:
        return {"case": case, **bad[0]}
    by_rank, true = [each["errors"] for each in results], truth_of(options, case.seed)
    for name in results[0]["shares"]:
        total = torch.tensor([each["shares"][name] for each in results], dtype=torch.float64).sum(0)
        by_rank.append(true.errors({name: total}))
    names = dict.fromkeys(name for errors in by_rank for name in errors)
    return {"case": case, "errors": {n: max(errors[n] for errors in by_rank if n in errors) for n in names}}


def is_wrong(found: Found) -> bool:
    return "broken" in found or any(not error <= 1 for error in found.get("errors", {}).values())


def report(options: Options, found: list[Found], seconds: float) -> list[str]:
    """A row a kind and dtype; everything that failed; what was refused; the verdict."""
    names = list(dict.fromkeys(n for each in found for n in each.get("errors", ())))
    lines = [f"worst errors over what the dtype allows: {options}, {options.device}, kernel {options.kernel}", ""]
    lines.append(f"{'call':<11}{'dtype':<10}{'calls':>6}" + "".join(f"{n:>8}" for n in names) + "  result")
    kinds: dict[str, list[Found]] = {}
    for each in found:
        kinds.setdefault(f"{each['case'].name:<11}{each['case'].dtype:<10}", []).append(each)
    for kind, these in sorted(kinds.items()):
        errors = [each["errors"] for each in these if "errors" in each]
        worst = [max((e[n] for e in errors if n in e), default=None) for n in names]
        cells = "".join(f"{'-':>8}" if w is None else f"{w:>8.2g}" for w in worst)
        verdict = "FAIL" if any(map(is_wrong, these)) else "pass" if errors else "-"
        lines.append(f"{kind}{len(these):>6}{cells}  {verdict}")
    lines += ["", *(failure(options, each) for each in found if is_wrong(each))]
    reasons = Counter(re.sub(r"\d+", "N", each["refused"])[:100] for each in found if "refused" in each)
    lines += [f"refused {count} times: {why}" for why, count in reasons.most_common()]
    passed, refused = sum("errors" in each and not is_wrong(each) for each in found), sum(reasons.values())
    return [*lines, f"{passed} of {len(found)} random calls pass, {refused} are refused, in {seconds:.1f} s"]


def repeat(options: Options, case: Case) -> str:
    """The command that runs this call again, with what the user chose."""
    named = [f for f in fields(Options) if f.name not in ("random", "seed", "cases", "timeout")]
    words = [f"{f.name}={getattr(options, f.name)}" for f in named if getattr(options, f.name) != f.default]
    return " ".join(["ringattn verify random=1", f"seed={case.seed}", *words])


def failure(options: Options, found: Found) -> str:
    """The line that repeats a call that is wrong, and what is wrong."""
    errors = found.get("errors", {})
    off = [f"{n} is off by {errors[n]:.2g} times its limit" for n in errors if not errors[n] <= 1]
    return f"{repeat(options, found['case'])}\n  {found.get('broken') or ', '.join(off)}\n  {found['case'].text}"
