"""What a plan says about itself: one sentence, the best candidates, and how blocks, heads and kernels go."""

from collections.abc import Sequence
from math import ceil, log2
from typing import Any, NamedTuple

from ringattn import kernels
from ringattn.kernels import Problem
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import raise_if
from ringattn.plans.cost import Shape
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.predict import Cost

TABLE_ROWS = 10
UNITS = "ms", "ms", "ms", "ms", "MB", "ms", "MB", "GB"
HIDDEN = 0.03  # of a call: shorter transfers count as hidden


class Option(NamedTuple):
    """A candidate: the plan, its kernel, and what it takes."""

    plan: Plan
    kernel: str
    cost: Cost


def way_of(plan: Plan) -> str:
    """The strategy and its sizes: "ring 16 x 8"."""
    if plan.ring == 1:
        return f"ulysses {plan.ulysses}"
    return f"{plan.strategy} {plan.ring}" + f" x {plan.ulysses}" * (plan.ulysses > 1)


def sentence(options: Sequence[Option]) -> str:
    """Why the first one, and what the best of another kind would cost."""
    best, _, cost = options[0]
    if best.ring * best.ulysses == 1:
        return f"one device: {cost.seconds * 1e3:.4g} ms a layer, forward and backward"
    text = f"{way_of(best)} in {best.layout} layout: {judged(cost)}"
    for plan, _, other in options:
        if (plan.strategy, plan.ulysses > 1) != (best.strategy, best.ulysses > 1):
            return f"{text}; {way_of(plan)} takes {other.seconds / cost.seconds:.2f} x as long: {judged(other)}"
    return text


def judged(cost: Cost) -> str:
    """How even the work is, and which transfers nothing hides."""
    work = "equal work" if cost.imbalance < 1.05 else f"the busiest rank has {cost.imbalance:.2f} of the mean work"
    within, between = (sum(getattr(x, name) for x in (cost.forward, cost.backward)) for name in ("within", "between"))
    if cost.exposed > HIDDEN * cost.seconds:
        where = "between hosts" if between > within else "within hosts"
        return f"{work}, {cost.exposed * 1e3:.3g} of {cost.seconds * 1e3:.4g} ms not hidden, mostly hops {where}"
    return f"{work}, hops {'between hosts' if between else 'within hosts'} hidden"


def table(options: Sequence[Option], machine: Machine, gpus: int) -> list[str]:
    """The best candidates: at most TABLE_ROWS, within 100 columns."""
    lines = [
        f"attention of a layer on {machine.name}",
        f"({machine.source})",
        f"{gpus} ranks a host",
        f"  {'':<33}forward  back exposed {'between hosts':>13} {'within a host':>13} memory work",
        f"  {'':<14} {'layout':<10} {'route':<6}" + "".join(f"{unit:>7}" for unit in UNITS),
    ]
    for plan, _, cost in options[:TABLE_ROWS]:
        f, b = cost.forward, cost.backward
        route = plan.transport.route if plan.ring > 1 and plan.strategy == "ring" and plan.framework == "torch" else "-"
        cells = [1e3 * f.seconds, 1e3 * b.seconds, 1e3 * cost.exposed]
        cells += [1e3 * (f.between + b.between), (f.between_bytes + b.between_bytes) / 1e6]
        cells += [1e3 * (f.within + b.within), (f.within_bytes + b.within_bytes) / 1e6]
        memory = number(cost.memory / 1e9) + "!" * (not cost.fits(machine.memory))
        numbers = "".join(f"{x:>7}" for x in (*map(number, cells), memory))
        lines.append(f"  {way_of(plan):<14} {plan.layout:<10} {route:<6}{numbers}{cost.imbalance:>5.2f}")
    more = len(options) - TABLE_ROWS
    return lines + [f"  and {more} more"] * (more > 0) + fits(options, machine)


def number(x: float) -> str:
    """A few figures, in at most six characters."""
    if x < 5e-4:
        return "0"
    return f"{x:.{2 if x < 0.1 else 4}g}" if x < 1e4 else f"{x:.0f}" if x < 1e6 else f"{x / 1e6:.4g}M"


def fits(options: Sequence[Option], machine: Machine) -> list[str]:
    """What is missing if no candidate fits in memory."""
    if any(option.cost.fits(machine.memory) for option in options):
        return []
    plan, least = options[0].plan, min(option.cost.memory for option in options)
    factor = least / machine.memory
    return [
        f"nothing fits: attention of a layer needs {least / 1e9:.3g} GB a rank, and a GPU has "
        f"{machine.memory / 1e9:.3g}; {plan.ring * plan.ulysses * 2 ** max(1, ceil(log2(factor)))} ranks would do, "
        f"or {int(plan.seq_len / factor) // 1024 * 1024} tokens"
    ]


def data_of(options: Sequence[Option], machine: Machine, gpus: int) -> dict[str, Any]:
    """The same as plain values, for JSON: seconds, bytes."""
    of_plan, of_cost = ("ring", "ulysses", "strategy", "layout"), ("seconds", "exposed", "memory", "imbalance")
    candidates = [
        {name: getattr(plan, name) for name in of_plan}
        | {"route": plan.transport.route, "kernel": kernel}
        | {"forward": cost.forward._asdict(), "backward": cost.backward._asdict()}
        | {name: getattr(cost, name) for name in of_cost}
        | {"fits": cost.fits(machine.memory)}
        for plan, kernel, cost in options
    ]
    about = {"machine": machine.name, "source": machine.source, "gpus_a_host": gpus, "memory": machine.memory}
    return about | {"candidates": candidates}


def ways_report(plan: Plan, shape: Shape | None) -> list[str]:
    """How blocks reach the ranks of a torch ring, and in how many groups heads are exchanged."""
    how, lines = plan.transport, []
    if plan.ring > 1 and plan.framework == "torch":
        over = f", over {plan.axes.ring.by}" if plan.axes.ring else ""
        come = {"direct": "straight from their owners", "relay": "from rank to rank"}.get(how.route, "host by host")
        dtype = "the dtype of the inputs" if how.grads == "input" and how.route != "relay" else "float32"
        lines = [f"route {how.route}: blocks come {come}{over}; in backward gradients in {dtype}"]
        if plan.strategy == "gather":
            lines = [f"gather: every rank's keys come at once{over}; in backward their gradients are scattered home"]
    if plan.swaps and plan.hides_groups and shape is not None:
        groups, sent = plan.groups_for(shape), f"{plan.exchanged(shape) / 1e6:.1f} MB a rank"
        lines.append(f"heads exchanged {'all at once' if groups == 1 else f'in {groups} groups'} ({sent})")
    return lines


def kernel_report(plan: Plan, problem: Problem | None) -> list[str]:
    """Which kernel will run, and why the others will not; raises for an unknown name."""
    from ringattn.kernels.attention import pallas as for_jax

    kind: Any = for_jax if plan.framework == "jax" else kernels
    if problem is None:
        raise_if(of_choice("kernel", plan.kernel, ("auto", *(k.name for k in kind.TABLE))))
        return [f"kernel {plan.kernel}: give heads and head_dim to see which one that is"]
    chosen = kind.select(problem, plan.kernel).name
    back = chosen if plan.framework == "jax" else kind.select(problem, plan.kernel, backward=True).name
    names = chosen if chosen == back else f"{chosen}, backward {back}"
    lines = [f"kernel {plan.kernel} -> {names} ({plan.device}, {problem.dtype}, head dim {problem.head_dim})"]
    for other in kind.TABLE:
        if other.name not in (chosen, back, "decode"):  # which is for few queries: of no interest in a plan
            more = None if plan.framework == "jax" else kernels.gain(other, problem, chosen)
            lines.append(f"  {other.name}: {more or other.refuses(problem) or 'would serve, if named'}")
    return lines
