"""Prove on this machine that attention over ranks equals dense float64 attention: out, lse and every gradient.
And that linear attention, gated and by the delta rule, equals its recurrence: out, the state behind the last token and
every gradient.

    ringattn verify                                            4 ranks as threads of this process
    ringattn verify backend=gloo ranks=2 cases=docs,window     real processes, some of the cases
    ringattn verify backend=nccl device=cuda dtype=bfloat16    one rank a GPU
    ringattn verify backend=gloo device=cuda                   4 ranks on the GPUs that are here, even one
    torchrun --nproc-per-node=4 -m ringattn verify             the ranks that were started
    ringattn verify random=100 seed=7                          random calls: any shape, mask, mesh, magnitude and dtype
    ringattn verify model=FOLDER ranks=2 tokens=4096           a transformers model beside itself on one rank

Runs the tests' list of cases on every strategy and layout that this number of ranks allows, with NaN in the padding.
A float32 result may be off by 2e-6 of its norm, a lower precision by twice what one device is off by, dense, in the
same dtype; of linear attention, whose states are rounded in every chunk, by 1e-3 in float16 and 8e-3 in bfloat16. And
no single element of attention may be off by more than the dtype's rounding adds up to for these inputs: `element` is
the worst error over that. Random calls, of caches too, are held to the latter alone; a call that fails is repeated by
the line that is printed. The exit status is 1 if any is off by more. A kernel that is named may refuse cases; auto may
not.

A model is a folder that model.save_pretrained wrote, or a config.json (random weights). Its logits, loss, hidden states
and gradients may be off by twice what it is off by on one rank in float32; the table says in which layer they part.
"""

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import kernels
from ringattn.comms import local, messages
from ringattn.comms.mesh import init_mesh
from ringattn.kernels import linear
from ringattn.launch import processes
from ringattn.launch.verify import drawn, linear_oracle, model, oracle, rounding
from ringattn.launch.verify.cases import FEATURES, Case
from ringattn.launch.words import option
from ringattn.layout import LAYOUTS

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks", "element")
LIMITS = {"float64": 1e-12, "float32": 2e-6}
LINEAR_LIMITS = {**LIMITS, "float16": 1e-3, "bfloat16": 8e-3}
DTYPES = ("float64", "float32", "bfloat16", "float16")


AnyCase = Case | linear_oracle.Case | drawn.Call


@dataclass(frozen=True)
class Options:
    ranks: int | None = option(None, "how many (4; random calls on threads: 1 to 8; under torchrun: as were started)")
    backend: str = option("threads", "threads of this process, or processes with gloo or nccl")
    device: str = option("cpu", "cpu or cuda")
    cases: tuple[str, ...] = option((), "only cases whose name holds one of these words (default: all)")
    kernel: str = option("auto", "auto, or the name of a kernel")
    dtype: str | None = option(None, "float64, float32, bfloat16 or float16 (float32; random calls: any of them)")
    timeout: float = option(300.0, "seconds after which processes that hang are ended")
    random: int = option(0, "so many random calls instead of the cases")
    seed: int = option(0, "the number of the first random call; each one follows from its own number alone")
    model: str | None = option(None, "a folder of a transformers model, or a config.json, instead of the cases")
    tokens: int | None = option(None, "of the model: so many random tokens (4096, or as many as it takes)")
    docs: int = option(0, "of the model: so many packed documents of random lengths (0: one)")

    @property
    def count(self) -> int:
        return self.ranks or 4

    @property
    def precision(self) -> str:
        return self.dtype or "float32"


@dataclass(frozen=True)
class Outcome:
    """One case on all ranks: the worst error of each result over its limit, or why it did not run."""

    case: AnyCase
    errors: dict[str, float]
    limits: dict[str, float]
    refused: str = ""
    broken: str = ""

    @property
    def good(self) -> bool:
        return (
            not self.refused and not self.broken and all(self.errors[name] <= self.limits[name] for name in self.errors)
        )


def run(options: Options) -> int:
    """Run the cases and print each strategy's and layout's worst errors; 0 if every one is within its limit."""
    problem = wrong(options)
    if problem:
        print(f"ringattn verify: {problem}", file=sys.stderr)
        return 2
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
        outcomes = summed(options, everyone(options, started))
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


def wrong(options: Options) -> str | None:
    if options.backend not in ("threads", "gloo", "nccl"):
        return f"backend={options.backend!r}: choose threads, gloo or nccl"
    if options.device not in ("cpu", "cuda"):
        return f"device={options.device!r}: choose cpu, or cuda for GPUs"
    if options.precision not in DTYPES:
        return f"dtype={options.dtype!r}: choose one of {', '.join(DTYPES)}"
    known = dict.fromkeys(kernel.name for kernel in (*kernels.TABLE, *linear.TABLE))
    if options.kernel not in ("auto", *known):
        return f"kernel={options.kernel!r}: choose one of auto, {', '.join(known)}"
    if not 1 <= options.count <= processes.MOST:
        return f"ranks={options.ranks}: on this machine there can be 1 to {processes.MOST}"
    if options.backend == "nccl" and options.device != "cuda":
        return f"backend=nccl does not move tensors on {options.device}; use backend=gloo, or device=cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "device=cuda, and torch sees no GPU; use device=cpu"
    if options.backend == "nccl" and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", options.count)):
        return f"ranks={options.count} need as many GPUs, and torch sees {torch.cuda.device_count()}; gloo shares them"
    if options.model is None and options.random and options.cases:
        return f"random={options.random} draws its own cases; leave cases={','.join(options.cases)} out, or random"
    if options.model is not None:
        return model.wrong(options)
    if options.tokens or options.docs:
        return f"tokens={options.tokens}, docs={options.docs} are of a model; say model=FOLDER too"
    if not chosen(options):
        names = ", ".join(case.name for case in (*FEATURES, *linear_oracle.FEATURES))
        return f"cases={','.join(options.cases)} matches none of {names}"
    return None


def chosen(options: Options) -> list[AnyCase]:
    if options.random:
        ranks = options.ranks if options.backend == "threads" else options.count
        how = ranks, options.dtype, options.kernel, options.device
        return [drawn.draw(options.seed + i, *how) for i in range(options.random)]
    every: tuple[AnyCase, ...] = (*placed(options.count), *linear_oracle.placed(options.count))
    return [c for c in every if not options.cases or any(word in str(c) for word in options.cases)]


def placed(ranks: int) -> Iterator[Case]:
    """Every feature on every strategy and layout of every ring x ulysses that makes this many ranks."""
    for ulysses in (u for u in range(1, ranks + 1) if ranks % u == 0):
        ring = ranks // ulysses
        places = [("ulysses", "contiguous")] if ring == 1 else [(s, x) for s in ("ring", "gather") for x in LAYOUTS]
        for strategy, layout in places:
            for case in FEATURES:
                heads = math.lcm(case.heads, ulysses)
                yield replace(case, ring=ring, ulysses=ulysses, strategy=strategy, layout=layout, heads=heads)


def everyone(options: Options, started: bool) -> list[list[dict[str, Any]]]:
    """Case by case what every rank found."""
    if started:
        return turned(messages.gather(one_process(options)))
    if options.backend == "threads":
        return threads(options)
    return turned(processes.run(one_process, options.count, options, backend=options.backend, timeout=options.timeout))


def turned(ranks: list[list[Any]]) -> list[list[Any]]:
    return [list(found) for found in zip(*ranks, strict=True)]


def threads(options: Options) -> list[list[dict[str, Any]]]:
    """All ranks in this process, on one device."""

    def one(mesh: Any, case: AnyCase) -> dict[str, Any]:
        mesh.device_type = options.device
        return one_case(options, case, mesh)

    by_case = []
    for case in chosen(options):
        truth_of(case, options)  # once, before every thread wants it
        work = partial(local.run, partial(one, case=case), ring=case.ring, ulysses=case.ulysses)
        if not isinstance(case, drawn.Call):
            by_case.append(work())
            continue
        try:
            by_case.append(work())
        except Exception as error:  # the next calls may be right, and this one is to be repeated
            by_case.append([{"broken": f"{type(error).__name__}: {error}"}])
    return by_case


def one_process(options: Options) -> list[dict[str, Any]]:
    """This rank's part of every case, in a process group that exists."""
    meshes: dict[tuple[int, int], Any] = {}
    found = []
    for case in chosen(options):
        at = (case.ring, case.ulysses)
        if at not in meshes:
            meshes[at] = init_mesh(ring=case.ring, ulysses=case.ulysses, device_type=options.device)
        try:
            found.append(one_case(options, case, meshes[at]))
        except Exception as error:
            if isinstance(case, drawn.Call):  # the other ranks wait: say which call it was, and end
                raise RuntimeError(f"{repeat(options, case)}: {type(error).__name__}: {error}") from error
            raise
    return found


def one_case(options: Options, case: AnyCase, mesh: Any) -> dict[str, Any]:
    """One rank's errors and its share of what is the same on all; or why the kernel refuses, on all ranks alike."""
    if isinstance(case, drawn.Call):
        try:
            return drawn.one(case, mesh, options.device)
        except NotImplementedError as error:
            return {"refused": str(error)}
    table = kernels.TABLE if isinstance(case, Case) else linear.TABLE
    if options.kernel not in ("auto", *(kernel.name for kernel in table)):
        return {"refused": f"{options.kernel}: no kernel of {'' if isinstance(case, Case) else 'linear '}attention"}
    return (one_attention if isinstance(case, Case) else one_linear)(options, case, mesh)  # type: ignore[arg-type]


def one_linear(options: Options, case: linear_oracle.Case, mesh: Any) -> dict[str, Any]:
    given = linear_oracle.inputs(case.seq_len, case.gate, getattr(torch, options.precision), **case.rule)
    given = {name: None if x is None else x.to(options.device) for name, x in given.items()}
    exact = {name: x.to(options.device) for name, x in truth_of(case, options).items()}
    how = {"layout": case.layout, "scan": case.strategy, "kernel": options.kernel}
    docs = linear_oracle.docs_of(case.lengths, case.seq_len)
    errors, share = linear_oracle.errors(mesh, given, exact, docs, **how)
    return {"errors": errors, "share": share.double().tolist()}


def one_attention(options: Options, case: Case, mesh: Any) -> dict[str, Any]:
    given = {name: x.to(options.device) for name, x in inputs(*feature(case), options.precision).items()}
    try:
        found = oracle.run(case, mesh, given, options.kernel)
    except NotImplementedError as error:
        return {"refused": str(error)}
    share = found.get("dsinks")
    exact = truth(*feature(case), options.precision)
    errors = oracle.errors(case, mesh, found, exact)
    allowed = allowances(*feature(case), options.precision)
    errors["element"] = max(rounding.locally(case, mesh, found, exact, allowed).values())
    return {"errors": errors, "share": None if share is None else share.double().tolist()}


def truth_of(case: AnyCase, options: Options) -> dict[str, Tensor]:
    if isinstance(case, drawn.Call):
        return drawn.known(case)[1]
    if isinstance(case, Case):
        return truth(*feature(case), options.precision)
    dtype = getattr(torch, options.precision)
    return linear_oracle.truth(case.seq_len, case.gate, case.lengths, dtype, **case.rule)


def limits_of(case: AnyCase, options: Options) -> dict[str, float]:
    if isinstance(case, drawn.Call):
        return dict.fromkeys((*RESULTS, *linear_oracle.RESULTS), 1.0)
    if isinstance(case, Case):
        return {**limits(*feature(case), options.precision), "element": 1.0}
    return dict.fromkeys(linear_oracle.RESULTS, LINEAR_LIMITS[options.precision])


def feature(case: Case) -> tuple[str, int]:
    """What the inputs and the truth depend on: the case without its ranks."""
    return case.name, case.heads


@lru_cache(maxsize=128)
def inputs(name: str, heads: int, dtype: str) -> dict[str, Tensor]:
    return oracle.inputs(one_device(name, heads), getattr(torch, dtype))


@lru_cache(maxsize=128)
def truth(name: str, heads: int, dtype: str) -> dict[str, Tensor]:
    return oracle.dense(one_device(name, heads), inputs(name, heads, dtype))


@lru_cache(maxsize=128)
def allowances(name: str, heads: int, dtype: str) -> dict[str, Tensor]:
    return rounding.allowances(one_device(name, heads), inputs(name, heads, dtype))


@lru_cache(maxsize=128)
def limits(name: str, heads: int, dtype: str) -> dict[str, float]:
    """How far each result may be off: a constant, or twice the error of the same dtype, dense, on one device."""
    if dtype in LIMITS:
        return dict.fromkeys(RESULTS, LIMITS[dtype])
    exact = truth(name, heads, dtype)
    single = oracle.dense(one_device(name, heads), inputs(name, heads, dtype), getattr(torch, dtype))
    return {result: 2 * off(single[result], exact[result]) + 1e-6 for result in exact}


def one_device(name: str, heads: int) -> Case:
    return replace(next(case for case in FEATURES if case.name == name), heads=heads)


def off(found: Tensor, exact: Tensor) -> float:
    return oracle.error(found, exact, float(torch.nan_to_num(exact, neginf=0).norm()))


def summed(options: Options, by_case: list[list[dict[str, Any]]]) -> list[Outcome]:
    """Every case's worst error over the ranks; the gradient of what is the same on all is the sum of their shares."""
    outcomes = []
    for case, found in zip(chosen(options), by_case, strict=True):
        refused = next((one["refused"] for one in found if "refused" in one), "")
        broken = next((one["broken"] for one in found if "broken" in one), "")
        errors: dict[str, float] = {}
        if not refused and not broken:
            errors = {n: max(one["errors"][n] for one in found) for n in found[0]["errors"]}
            if found[0]["share"] is not None:
                errors |= of_shares(case, options, [one["share"] for one in found], errors)
        outcomes.append(Outcome(case, errors, limits_of(case, options), refused, broken))
    return outcomes


def of_shares(case: AnyCase, options: Options, shares: list[Any], errors: dict[str, float]) -> dict[str, float]:
    """The errors of the sum of all ranks' shares of dsinks or dstate."""
    if isinstance(case, drawn.Call):
        return {case.shared: drawn.of_shares(case, shares)}
    shared = "dsinks" if isinstance(case, Case) else "dstate"
    total, exact = torch.tensor(shares, dtype=torch.float64).sum(0), truth_of(case, options)[shared]
    found = {shared: off(total, exact)}
    if isinstance(case, Case):
        allowed = allowances(*feature(case), options.precision)[shared]
        found["element"] = max(errors["element"], rounding.over(total, exact, allowed))
    return found


def report(options: Options, outcomes: list[Outcome], seconds: float) -> list[str]:
    """A row a strategy, mesh and layout, of attention and of linear attention; everything that failed; the verdict."""
    where = f"{ranks_of(options)} ({options.backend}), {options.device}, {precision(options)}, kernel {options.kernel}"
    lines = []
    if options.random:
        lines = [f"worst errors of an element over what rounding allows it: {where}", "", *random_rows(outcomes), ""]
    for kind, names, title in (
        (Case, RESULTS, f"worst relative errors against dense float64: {where}"),
        (linear_oracle.Case, linear_oracle.RESULTS, "linear attention, against its recurrence in float64"),
    ):
        if these := [o for o in outcomes if isinstance(o.case, kind)]:
            lines += [title, "", *rows(these, names), ""]
    lines += [failure(options, o) for o in outcomes if not o.good and not o.refused]
    for why in dict.fromkeys(o.refused for o in outcomes if o.refused):
        refused = sum(o.refused == why for o in outcomes)
        lines.append(f"refused in {refused} cases: {why}")
    passed = sum(o.good for o in outcomes)
    what = "random calls" if options.random else "cases"
    return [*lines, f"{passed} of {len(outcomes)} {what} pass, in {seconds:.1f} s"]


def ranks_of(options: Options) -> str:
    drawn_too = options.random and options.backend == "threads" and options.ranks is None
    return "1 to 8 ranks" if drawn_too else f"{options.count} ranks"


def precision(options: Options) -> str:
    return "any dtype" if options.random and options.dtype is None else options.precision


def random_rows(outcomes: list[Outcome]) -> list[str]:
    """The worst error of each kind of call and dtype."""
    names = tuple(dict.fromkeys(n for o in outcomes for n in o.errors))
    lines = [f"{'call':<11}{'dtype':<10}{'calls':>6}" + "".join(f"{n:>8}" for n in names) + "  result"]
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        assert isinstance(outcome.case, drawn.Call)
        kinds.setdefault((outcome.case.kind, str(outcome.case.dtype).removeprefix("torch.")), []).append(outcome)
    for (kind, dtype), here in sorted(kinds.items()):
        worst = [max((o.errors[n] for o in here if n in o.errors), default=None) for n in names]
        cells = "".join(f"{'-':>8}" if w is None else f"{w:>8.2g}" for w in worst)
        verdict = "pass" if all(o.good for o in here) else "FAIL"
        lines.append(f"{kind:<11}{dtype:<10}{len(here):>6}{cells}  {verdict}")
    return lines


def rows(outcomes: list[Outcome], names: tuple[str, ...]) -> list[str]:
    """The table: the worst error of each result at each place."""
    lines = [f"{'ring ulysses strategy layout':<34}{'cases':>6}" + "".join(f"{n:>9}" for n in names) + "  result"]
    by_place: dict[tuple[int, int, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        case: Any = outcome.case
        by_place.setdefault((case.ring, case.ulysses, case.strategy, case.layout), []).append(outcome)
    for place, here in by_place.items():
        ring, ulysses, strategy, layout = place
        worst = [max((o.errors[n] for o in here if n in o.errors), default=None) for n in names]
        cells = "".join(f"{'-':>9}" if w is None else f"{w:>9.1e}" for w in worst)
        refused = sum(bool(o.refused) for o in here)
        verdict = "FAIL" if any(not o.good and not o.refused for o in here) else "pass" if refused < len(here) else "-"
        lines.append(
            f"{ring:>4} {ulysses:>7} {strategy:<8} {layout:<12}{len(here):>6}{cells}  {verdict}"
            + (f" ({refused} refused)" if refused else "")
        )
    return lines


def repeat(options: Options, call: drawn.Call) -> str:
    """The command that runs this call again, with what the user chose."""
    named = [f for f in fields(Options) if f.name not in ("random", "seed", "cases", "timeout")]
    words = [f"{f.name}={getattr(options, f.name)}" for f in named if getattr(options, f.name) != f.default]
    return " ".join(["ringattn verify random=1", f"seed={call.seed}", *words])


def failure(options: Options, outcome: Outcome) -> str:
    """What is wrong in one case; of a random call first the line that repeats it."""
    over = [(n, e, outcome.limits[n]) for n, e in outcome.errors.items() if not e <= outcome.limits[n]]
    found = ", ".join(f"{n} is off by {e:.1e} (limit {limit:.1e})" for n, e, limit in over)
    if isinstance(outcome.case, drawn.Call):
        times = ", ".join(f"{n} is off by {e:.2g} times what rounding allows" for n, e, _ in over)
        return f"{repeat(options, outcome.case)}\n  {outcome.broken or times}\n  {outcome.case}"
    return f"{outcome.case}: {found}"
