"""What a plan says about itself: one sentence, the best candidates, and how blocks, heads and kernels go."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ringattn import kernels
from ringattn.kernels import Problem
from ringattn.kernels.attention import pallas
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import raise_if
from ringattn.plans.cost import Shape
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.predict import Cost

TABLE_ROWS = 10
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
    """The first one: how even its work is, and which transfers nothing hides."""
    plan, _, cost = options[0]
    ms = cost.seconds * 1e3
    host = f"; the host takes {cost.host * 1e3:.3g} ms of {ms:.4g}" if cost.host else ""
    if plan.ring * plan.ulysses == 1:
        return f"one device: {ms:.4g} ms a layer, forward and backward{host}"
    work = "equal work" if cost.imbalance < 1.05 else f"the busiest rank has {cost.imbalance:.2f} of the mean work"
    hidden = f"of {ms:.4g} ms {cost.exposed * 1e3:.3g} not hidden" if cost.exposed > HIDDEN * cost.seconds else "hidden"
    where = "between" if cost.received[0] else "within"
    return f"{way_of(plan)} in {plan.layout} layout: {work}, hops {where} hosts {hidden}{host}"


def table(options: Sequence[Option], machine: Machine, gpus: int) -> list[str]:
    """The best candidates: at most TABLE_ROWS, within 100 columns."""
    lines = [
        f"attention of a layer on {machine.name}, {gpus} ranks a host",
        f"({machine.source})",
        f"  {'ms, MB between and within hosts, GB':<35} forward    back exposed  between   within  memory  work",
    ]
    for plan, _, cost in options[:TABLE_ROWS]:
        route = plan.transport.route if plan.ring > 1 and plan.strategy == "ring" and plan.framework == "torch" else "-"
        times = (f"{number(1e3 * x):>8}" for x in (cost.forward.seconds, cost.backward.seconds, cost.exposed))
        moved = (f"{number(x / 1e6):>9}" for x in cost.received)
        memory = number(cost.memory / 1e9) + "!" * (not cost.fits(machine.memory))
        numbers = f"{''.join(times)}{''.join(moved)}{memory:>8}{cost.imbalance:>6.2f}"
        lines.append(f"  {way_of(plan):<16} {plan.layout:<11}{route:<7}{numbers}")
    if (more := len(options) - TABLE_ROWS) > 0:
        lines.append(f"  and {more} more")
    if (factor := min(option.cost.memory for option in options) / machine.memory) > 1:
        tokens = int(options[0].plan.seq_len / factor) // 1024 * 1024
        lines.append(f"nothing fits: it takes {factor:.3g} times the memory of a GPU; {tokens} tokens would do")
    return lines


def number(x: float) -> str:
    return "0" if x < 5e-4 else f"{x:.3g}" if x < 100 else f"{x:.0f}"


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
        dtype = "the dtype of the inputs" if how.grads == "input" and how.route != "relay" else "float32"
        come = "blocks come all at once" if plan.strategy == "gather" else f"blocks come by route {how.route}"
        lines = [f"{come}{over}; in backward gradients in {dtype}"]
    if plan.swaps and shape is not None:
        groups, sent = plan.groups_for(shape), f"{plan.exchanged(shape) / 1e6:.1f} MB a rank"
        lines.append(f"heads exchanged {'all at once' if groups == 1 else f'in {groups} groups'} ({sent})")
    return lines


def kernel_report(plan: Plan, problem: Problem | None) -> list[str]:
    """Which kernel will run, and why the others will not; raises for an unknown name."""
    table = pallas.TABLE if plan.framework == "jax" else kernels.TABLE
    if problem is None:
        raise_if(of_choice("kernel", plan.kernel, ("auto", *(k.name for k in table))))
        return [f"kernel {plan.kernel}: give heads and head_dim to see which one that is"]
    chosen = kernels.select(problem, plan.kernel, table).name
    back = chosen if plan.framework == "jax" else kernels.select(problem, plan.kernel, backward=True).name
    names = chosen if chosen == back else f"{chosen}, backward {back}"
    lines = [f"kernel {plan.kernel} -> {names} ({plan.device}, {problem.dtype}, head dim {problem.head_dim})"]
    for other in table:
        if other.name not in (chosen, back, "decode"):  # which is for few queries: of no interest in a plan
            more = None if plan.framework == "jax" else kernels.gain(other, problem, chosen)
            lines.append(f"  {other.name}: {more or other.refuses(problem) or 'would serve, if named'}")
    return lines
