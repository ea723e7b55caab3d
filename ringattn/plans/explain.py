"""What a plan says about itself: one sentence, the best candidates, and how blocks, heads and kernels go."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ringattn import kernels
from ringattn.kernels import Problem
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import raise_if
from ringattn.plans.cost import Shape
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.predict import Cost

ROWS = 10  # of the table
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


def spoken(plan: Plan) -> str:
    """The same as in a sentence."""
    ring = "gather over" if plan.strategy == "gather" else f"{plan.layout} ring of"
    inner = f"Ulysses {plan.ulysses}" * (plan.ulysses > 1)
    return " x ".join(filter(None, [f"{ring} {plan.ring}" * (plan.ring > 1), inner]))


def sentence(options: Sequence[Option], machine: Machine) -> str:
    """Why the first one, and what the most different of the others would cost."""
    best, cost = options[0].plan, options[0].cost
    if best.ring * best.ulysses == 1:
        return f"one device: {cost.seconds * 1e3:.4g} ms a layer, forward and backward"
    equal = "equal work" if cost.imbalance < 1.05 else f"the busiest rank has {cost.imbalance:.2f} of the mean work"
    text = f"{spoken(best)}: {equal}, {hidden(cost)}"
    kind = best.strategy == "gather", best.ulysses > 1
    for plan, _, other in options[1:]:
        pure = plan.ulysses == 1 or plan.ring == 1 or plan.strategy == "gather"
        if pure and (plan.strategy == "gather", plan.ulysses > 1) != kind:
            name = f"a pure {plan.strategy}" if plan.ulysses == 1 else spoken(plan)
            ratio = other.seconds / cost.seconds
            return f"{text}; {name} takes {ratio:.2f} x as long, {reason(other, cost)}" if ratio > 1.005 else text
    return text


def reason(cost: Cost, best: Cost) -> str:
    """Why it takes longer than the best one."""
    if cost.imbalance > best.imbalance + 0.05:
        return "with more work on the busiest rank"
    return hidden(cost) if cost.exposed > HIDDEN * cost.seconds else "in more and smaller steps"


def hidden(cost: Cost) -> str:
    """Which transfers nothing hides."""
    within, between = (sum(getattr(x, name) for x in (cost.forward, cost.backward)) for name in ("within", "between"))
    if not within + between:
        return "nothing travels"
    where = "between hosts" if between > within else "within hosts"
    some = "between hosts" if between else "within hosts"
    if cost.exposed > HIDDEN * cost.seconds:
        return f"{cost.exposed * 1e3:.3g} ms of its {cost.seconds * 1e3:.4g} not hidden, mostly hops {where}"
    return f"hops {some} hidden"


def table(options: Sequence[Option], machine: Machine, gpus: int, assumed: bool) -> list[str]:
    """The best candidates: at most ROWS, within 100 columns."""
    lines = [
        f"attention of a layer on {machine.name}",
        f"({machine.source})",
        f"{gpus} ranks a host" + ", unless machine= or hosts= say otherwise" * assumed,
        f"  {'':<33}forward  back exposed {'between hosts':>13} {'within a host':>13} memory work",
        f"  {'':<14} {'layout':<10} {'route':<6}" + "".join(f"{unit:>7}" for unit in UNITS),
    ]
    for plan, _, cost in options[:ROWS]:
        f, b = cost.forward, cost.backward
        route = plan.transport.route if plan.ring > 1 and plan.strategy == "ring" and plan.framework == "torch" else "-"
        sums = (f.between + b.between, f.between_bytes + b.between_bytes, f.within + b.within,
                f.within_bytes + b.within_bytes)  # fmt: skip
        cells = [f.seconds * 1e3, b.seconds * 1e3, cost.exposed * 1e3, sums[0] * 1e3, sums[1] / 1e6,
                 sums[2] * 1e3, sums[3] / 1e6]  # fmt: skip
        full = "" if cost.fits(machine.memory) else "!"
        lines.append(
            f"  {way_of(plan):<14} {plan.layout:<10} {route:<6}{''.join(f'{number(x):>7}' for x in cells)}"
            f"{number(cost.memory / 1e9) + full:>7}{cost.imbalance:>5.2f}"
        )
    if len(options) > ROWS:
        lines.append(f"  and {len(options) - ROWS} more")
    return lines


def number(x: float) -> str:
    """A few figures, in at most six characters."""
    if x < 5e-4:
        return "0"
    if x < 0.1:
        return f"{round(x, 4):g}"
    return f"{x:.3g}" if x < 1 else f"{x:.4g}" if x < 1e4 else f"{x:.0f}" if x < 1e6 else f"{x / 1e6:.4g}M"


def fits(options: Sequence[Option], machine: Machine) -> list[str]:
    """What is missing if no candidate fits in memory."""
    if any(option.cost.fits(machine.memory) for option in options):
        return []
    least = min(option.cost.memory for option in options)
    factor = least / machine.memory
    plan = options[0].plan
    ranks = plan.ring * plan.ulysses
    more = next(n for n in (ranks * 2**i for i in range(1, 64)) if n >= ranks * factor)
    return [
        f"nothing fits: attention of a layer needs {least / 1e9:.3g} GB a rank, "
        f"{(least - machine.memory) / 1e9:.3g} GB more than a GPU has; {more} ranks would do, "
        f"or {int(plan.seq_len / factor) // 1024 * 1024} tokens"
    ]


def data_of(options: Sequence[Option], machine: Machine, gpus: int) -> dict[str, Any]:
    """The same as plain values, for JSON: seconds, bytes."""
    return {
        "machine": machine.name, "source": machine.source, "gpus_a_host": gpus, "memory": machine.memory,
        "candidates": [
            {
                "ring": plan.ring, "ulysses": plan.ulysses, "strategy": plan.strategy, "layout": plan.layout,
                "route": plan.transport.route, "kernel": kernel,
                "forward": cost.forward._asdict(), "backward": cost.backward._asdict(),
                "seconds": cost.seconds, "exposed": cost.exposed, "memory": cost.memory,
                "fits": cost.fits(machine.memory), "imbalance": cost.imbalance,
            }
            for plan, kernel, cost in options
        ],
    }  # fmt: skip


def route_report(plan: Plan, nbytes: int | None) -> list[str]:
    """How blocks reach the ranks of a torch ring; `nbytes` is what one moves in backward."""
    how = plan.transport
    if plan.ring == 1 or plan.framework != "torch":
        return []
    over = f", over {plan.axes.ring.by}" if plan.axes.ring else ""
    if plan.strategy == "gather":
        return [f"gather: every rank's keys come at once{over}; in backward their gradients are scattered home"]
    come = {"direct": "straight from their owners", "relay": "from rank to rank"}.get(how.route, "host by host")
    dtype = "float32, summed on the way" if how.route == "relay" else how.grads
    back = "" if nbytes is None else f"; in backward {nbytes / 1e6:.1f} MB a block, gradients in {dtype}"
    return [f"route {how.route}: blocks come {come}{over}{back}"]


def groups_report(plan: Plan, shape: Shape | None) -> list[str]:
    """The number of groups of heads in which Ulysses and gather exchange, if it is more than one anywhere."""
    if not plan.swaps or not plan.hides_groups:
        return []
    if plan.transport.groups is not None:
        groups, why = plan.transport.groups, "as given"
    elif shape is not None:
        groups, why = plan.groups_for(shape), f"{plan.exchanged(shape) / 1e6:.1f} MB a rank"
    else:
        return ["heads exchanged in groups: pass heads and head_dim to see how many"]
    if groups == 1:
        return [f"heads exchanged all at once ({why})"]
    return [f"heads exchanged in {groups} groups ({why}): one travels while another is computed"]


def kernel_report(plan: Plan, problem: Problem | None) -> list[str]:
    """Which kernel will run, and why the others will not; raises for an unknown name."""
    from ringattn.kernels.attention import pallas as for_jax

    kind: Any = for_jax if plan.framework == "jax" else kernels
    device, kernel = plan.device, plan.kernel
    if problem is None:
        raise_if(of_choice("kernel", kernel, ("auto", *(k.name for k in kind.TABLE))))
        return [f"kernel {kernel}: give heads and head_dim to see which one that is"]
    chosen = kind.select(problem, kernel).name
    back = chosen if plan.framework == "jax" else kind.select(problem, kernel, backward=True).name
    rates = [problem.rate(name, way) for name, way in ((chosen, False), (back, True))]
    why = f", measured {rates[0]:.0f} and {rates[1]:.0f} TFLOP/s forward and backward" if all(rates) else ""
    names = chosen if chosen == back else f"{chosen}, backward {back}"
    lines = [f"kernel {kernel} -> {names} ({device}, {problem.dtype}, head dim {problem.head_dim}{why})"]
    for other in kind.TABLE:
        serves = "would serve, slowly, if named" if device in other.skipped_on else "would serve"
        if other.name not in (chosen, back, "decode"):  # which is for few queries: of no interest in a plan
            more = None if plan.framework == "jax" else kernels.gain(other, problem, chosen)
            lines.append(f"  {other.name}: {more or other.refuses(problem) or serves}")
    return lines
