"""Whether calls that repeat run as CUDA graphs, and why not: the same on all ranks, since all replay or none."""

from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape
from ringattn.plans.mask import Mask, table_of
from ringattn.plans.plan import Plan

LONGEST = 5.5  # a GPU that computes so many times as long as the host launches gains nothing (two and four H200s)


def why_not(plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None = None) -> str | None:
    """Why such calls are not captured; None if they are, where the GPU would wait for the host."""
    ranks, machine = plan.ring * plan.ulysses, plan.machine
    if plan.graphs == "off" or plan.framework == "jax":
        return "graphs='off'"
    if plan.device != "cuda" or ranks == 1:
        return "nothing travels between GPUs"
    if docs is not None or plan.docs is not None:
        return "documents are others in every batch"
    there = ["several hosts"] * (ranks > machine.gpus)
    others = [x.by for x in plan.axes if x.size > 1 and not x.replayable] if plan.axes.here else there
    if others:
        return f"transfers over {others[0]} cannot be replayed, only those over symmetric memory"
    pairs = int(work_of(spec, shape.seq_len, shape.key_len).below(shape.seq_len))
    computes = shape.flops_a_pair * pairs / ranks / machine.flops(shape.itemsize, ranks)
    gathers = plan.strategy == "gather"
    steps = 1 if gathers else table_of(Mask(plan, spec), plan.hosts, plan.together(shape, back=False)).count
    launches = steps * (machine.step[0] + machine.library) + (2 * (plan.ulysses > 1) + gathers) * machine.exchange
    launches *= plan.groups_for(shape) if plan.swaps else 1
    if computes >= LONGEST * launches:
        return f"a GPU computes for {1e3 * computes:.3g} ms forward, which the host launches in {1e3 * launches:.2g} ms"
    return None


def in_words(plan: Plan, shape: Shape | None, spec: AttentionSpec, docs: Docs | None) -> list[str]:
    """What `explain` says where graphs may be."""
    if plan.graphs == "off" or plan.device != "cuda" or plan.framework == "jax":
        return []
    why = "give heads and head_dim" if shape is None else why_not(plan, shape, spec, docs)
    return [f"CUDA graphs: {f'none ({why})' if why else 'a call that repeats is captured in its third run'}"]
