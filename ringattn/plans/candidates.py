"""The candidates of a plan: every legal strategy, split, layout and route, with its kernel and what it takes."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ringattn import kernels
from ringattn.kernels.attention import pallas
from ringattn.kernels.rates import key_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape
from ringattn.plans.explain import Option
from ringattn.plans.machine import ITEMS, Machine
from ringattn.plans.mask import Mask
from ringattn.plans.plan import Plan
from ringattn.plans.predict import Rates, predict
from ringattn.plans.recipe import Recipe
from ringattn.plans.sizes import Transport

ALIKE, EVEN = 1.02, 1.03  # times over the fastest, and work over the mean, that make no difference
# kernels that round gradients to 16 bits, so that they can travel as such
LOW_PRECISION = {name for name, kernel in kernels.BY_NAME.items() if kernel.low_precision}


class Asked(NamedTuple):
    """What candidates follow from."""

    alone: Plan  # on one device
    sizes: tuple[tuple[int, int], ...]
    gpus: int | None  # of a host, if known
    strategy: str
    layout: str
    spec: AttentionSpec
    docs: Docs | None
    dtype: str
    transport: Transport
    measured: int = 0  # which rates of kernels are known

    @property
    def machine(self) -> Machine:
        return self.alone.machine

    @property
    def shape(self) -> Shape | None:
        return self.alone.shape(ITEMS[self.dtype])

    def problem(self, plan: Plan, shape: Shape) -> kernels.Problem:
        arch = self.machine.arch if plan.device == self.machine.device else ()
        return problem_of(plan, shape, self.spec, self.dtype, self.docs, arch)


@lru_cache(maxsize=64)
def compared(asked: Asked) -> tuple[Option, ...]:
    """The candidates that fit in memory first, of these the fastest; with documents, of equals what receives least."""
    shape, options = asked.shape, []
    assert shape is not None
    for plan in candidates(asked):
        kernel, rates = rates_of(asked.problem(plan, shape), plan, asked.machine)
        hosts = asked.transport.hosts if plan.ring > 1 else None
        gpus = plan.ring * plan.ulysses // hosts if hosts else asked.gpus or asked.machine.gpus
        machine = asked.machine.replace(gpus=gpus)
        for way in routed(plan, asked, rates.low_precision):
            options.append(Option(way, kernel, predict(way, shape, asked.spec, asked.docs, machine, rates)))
    least = min(option.cost.seconds for option in options)

    def order(option: Option) -> tuple[Any, ...]:
        cost = option.cost
        alike = asked.docs is not None and cost.seconds <= ALIKE * least and cost.imbalance <= EVEN
        return not cost.fits(asked.machine.memory), not alike, cost.received if alike else cost.seconds

    return tuple(sorted(options, key=order))


def rates_of(problem: kernels.Problem, plan: Plan, machine: Machine) -> tuple[str, Rates]:
    """The kernel that would run forward for a problem, and rates of both passes on the machine."""
    names = [chosen(problem, plan, backward) for backward in (False, True)]

    def rates(mask: str) -> tuple[float, float]:
        each = replace(problem, mask=mask)
        forward, backward = (rate_of(name, each, machine, i > 0) for i, name in enumerate(names))
        return forward, backward

    by_keys = None if problem.rectangles or problem.mask == "packed" else (rates("short"), rates("long"))
    return names[0], Rates(*rates(problem.mask), names[1] in LOW_PRECISION, names[1], by_keys)


def chosen(problem: kernels.Problem, plan: Plan, backward: bool) -> str:
    """The name of the kernel of a pass; "none" if all refuse, which the report or the call says."""
    table = pallas.TABLE if plan.framework == "jax" else kernels.TABLE
    try:
        return kernels.select(problem, plan.kernel, table, backward).name
    except NotImplementedError:
        return "none"


def rate_of(name: str, problem: kernels.Problem, machine: Machine, backward: bool) -> float:
    """Flops a second: of the description's row for this kernel, else as measured, else of the kernel's or any dtype."""
    mask = "rectangles" if problem.rectangles else problem.mask
    key = key_of(name, (0, 0), mask, (problem.head_dim, problem.value_dim)).split("/", 1)[1]
    if ITEMS[problem.dtype] == 2:
        if key in machine.rates:
            return machine.rates[key][backward] * 1e12
        if measured := problem.rate(name, backward):
            return measured * 1e12
    return machine.rate((f"{name}/{problem.dtype}", problem.dtype, "float32"))[backward]


def routed(plan: Plan, asked: Asked, rounded: bool) -> list[Plan]:
    """The plan with each route that it may take over the hosts that its ring lies on, with every choice made.

    Gradients travel in the dtype of the inputs if the kernel rounds them to it.
    """
    how = asked.transport
    hosts = 1 if plan.ring == 1 else how.hosts or hosts_of_ring(plan, asked.gpus)
    if how.grads == "auto":
        how = how.replace(grads="input" if rounded and plan.ring > 1 and plan.framework == "torch" else "float32")
    routes = [how.route]
    if how.route == "auto" and hosts == 1:
        routes = ["direct"]
    elif how.route == "auto":
        routes = ["levels", "relay"] if hosts is not None and hosts < plan.ring else ["relay"]
    if plan.strategy == "gather":
        routes = routes[:1]
    return [plan.replace(transport=how.replace(route=route, hosts=hosts or 1)) for route in routes]


def first(asked: Asked) -> Plan:
    """The first candidate, where no heads are given by which to compare; its kernel is guessed from typical ones."""
    plan, name = candidates(asked)[0], asked.alone.kernel
    if name == "auto" and plan.ring > 1 and plan.device == "cuda" and plan.framework == "torch":
        typical = Shape(plan.seq_len, plan.keys.seq_len, 32, 8, 128, 128)
        name = chosen(asked.problem(plan, typical), plan, True)
    return routed(plan, asked, name in LOW_PRECISION)[0]


def hosts_of_ring(plan: Plan, gpus: int | None) -> int | None:
    """On how many hosts a ring lies, if each has equally many of its ranks; None if not, or if nothing is known."""
    if gpus is None or plan.framework == "jax":
        return None
    each = max(1, gpus // plan.ulysses)
    return 1 if plan.ring <= each else plan.ring // each if plan.ring % each == 0 else None


def candidates(asked: Asked) -> list[Plan]:
    """Every plan that spreads `alone` over one of the sizes; strategy and layout vary if they are "auto"."""
    alone, sizes, _, strategy, layout, spec, docs, *_ = asked
    plans = []
    for ring, ulysses in sizes:
        if len(sizes) > 1 and (
            (alone.heads is not None and alone.heads[0] % ulysses) or (strategy == "ulysses" and ring > 1)
        ):
            continue
        names = ("ulysses",) if ring == 1 else ("ring", "gather")
        layouts = ("contiguous",) if ring == 1 or not spec.causal else ("zigzag", "contiguous")
        if spec.window is not None or spec.chunk is not None:
            layouts = layouts[::-1]  # of those predicted the same, one that cuts the sequence into fewer ranges
        if ring > 1 and docs is not None:
            layouts = (*layouts, "striped")  # equal work for any documents
            if alone.framework == "torch" and docs.first is not None:
                layouts = (*layouts, "balanced")
        work = {"docs": docs, "work": spec.replace(softcap=None, scale=None)}
        plans += [
            alone.replace(ring=ring, ulysses=ulysses, strategy=s, layout=each, **work if each == "balanced" else {})
            for s in (names if strategy == "auto" else (strategy,))
            for each in (layouts if layout == "auto" else (layout,))
        ]
    if not plans:
        raise ValueError(
            f"strategy={strategy!r} over {sizes[0][0] * sizes[0][1]} ranks, which do not divide the query heads, "
            f"{alone.heads and alone.heads[0]}; use strategy='ring', 'gather' or 'auto'"
        )
    return plans


def factored(size: int) -> list[tuple[int, int]]:
    """Every (ring, ulysses) whose product is `size`."""
    return [(size // u, u) for u in range(1, size + 1) if size % u == 0]


def problem_of(
    plan: Plan, shape: Shape, spec: AttentionSpec, dtype: str, docs: Docs | None, arch: tuple[int, ...]
) -> kernels.Problem:
    """The problem of one rank, as far as a plan knows it."""
    whole = spec.window is None and spec.chunk is None and docs is None  # stripes may still make too many rectangles
    gpu = (arch[0], arch[1]) if arch else None
    mask = Mask(plan, spec, docs)
    return Recipe(mask, shape, plan.device, dtype, gpu, deterministic=plan.deterministic).problem(whole)
