"""A call can be printed, and what it prints is what every rank carries out."""

from types import SimpleNamespace

import pytest
import torch

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.comms.local import run
from ringattn.launch.bench.masks import case_of
from ringattn.plans import recipe
from ringattn.plans.cost import Shape
from ringattn.plans.mask import Mask
from ringattn.plans.recipe import Recipe

DOCS = ra.Docs.from_lengths([20, 3, 30], pad_to=60)
CASES = {
    "zigzag": ({"ring": 4}, {}),
    "striped, documents": ({"ring": 3}, {"layout": "striped", "docs": DOCS}),
    "balanced, several blocks a step": (
        {"ring": 4}, {"layout": "balanced", "docs": DOCS, "transport": ra.Transport(together=3)},
    ),
    "rectangles": ({"ring": 2}, {"kernel": "sdpa_cpu"}),
    "two hosts": ({"ring": 4}, {"transport": ra.Transport("levels", 2)}),
    "relay": ({"ring": 3}, {"transport": ra.Transport("relay")}),
    "gather, in groups": ({"ring": 2, "ulysses": 2}, {"strategy": "gather", "transport": ra.Transport(groups=2)}),
    "one device": ({"ring": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_the_recipe_that_a_plan_makes_without_a_device(name):
    sizes, choices = CASES[name]
    docs = choices.get("docs")

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=60, **{"strategy": "ring"} | choices if sizes["ring"] > 1 else {})
        q, k, v = (torch.randn(1, plan.local_len, h, 8, requires_grad=True) for h in (8, 4, 4))
        ra.attention(q, k, v, plan, docs=docs).sum().backward()
        (call,) = plan.calls.values()
        return plan, str(call.recipe), call.recipe

    shape = Shape(60, 60, 8, 4, 8, 8, 4)
    results = run(one_rank, **sizes)
    passes: dict[str, dict[int, recipe.Pass]] = {"forward": {}, "backward": {}}
    for plan, text, mine in results:
        other = Recipe(Mask(plan, ra.AttentionSpec(), docs), shape, "cpu", "float32", rank=plan.ring_axis.rank)
        assert mine == other and hash(mine) == hash(other) and text == str(other)
        for which, ranks in passes.items():
            ranks[other.rank] = getattr(other, which)
    if plan.strategy == "gather":
        assert "in 2 groups" in text and "step 1: keys [0, 60)" in text
        return
    for ranks in passes.values():  # what one rank receives is what the other sends, at the same step
        steps = [(rank, j, step) for rank, each in ranks.items() for j, step in enumerate(each.steps)]
        received = {(j, source, rank): sum(map(len, places.at))
                    for rank, j, step in steps for source, places in step.receive.items()}  # fmt: skip
        sent = {(j, rank, to): sum(map(len, ranges)) for rank, j, step in steps for to, ranges in step.send.items()}
        assert received == sent


@pytest.mark.parametrize(("tokens", "halves"), [(2**15, True), (2**12, False)])
def test_half_of_the_heads_at_home_come_first_in_backward_where_shards_are_long(tokens, halves):
    plan = ra.Plan(tokens, 2, strategy="ring", layout="zigzag", kernel="sdpa_cpu")
    made = Recipe(Mask(plan, ra.AttentionSpec()), Shape(tokens, tokens, 8, 4, 8, 8, 4), "cpu", "float32", rank=0)
    text, first, last = str(made), (slice(4), slice(2)), (slice(4, None), slice(2, None))
    assert [step.heads for step in made.backward.steps] == ([first, None, last] if halves else [None, None])
    assert ("query heads 0 to 4" in text) == halves


@pytest.mark.parametrize("slower, once", [(1, 8), (2, 4), (100, 0)])
def test_queries_are_visited_once_unless_a_rank_would_wait_longer_for_their_keys(slower, once, monkeypatch):
    """Ranks that hold hardly any documents of their own have nothing to hide the transfer, and visit them once too."""
    kernel = SimpleNamespace(load=lambda: SimpleNamespace(disjoint=True, separable=False))
    monkeypatch.setattr(Recipe, "kernel", lambda *_, **__: kernel)
    case = case_of("lognormal:2048:1.4", 65536)
    plan = ra.plan(
        elsewhere("cuda", [(8, 1)], gpus=8), seq_len=65536, heads=(64, 8), head_dim=128, layout="balanced",
        strategy="ring", **case.asked,
    )  # fmt: skip
    link = plan.machine.inside.replace(bandwidth=plan.machine.inside.bandwidth / slower)
    plan = plan.replace(machine=plan.machine.replace(inside=link))
    mask, shape = Mask(plan, ra.AttentionSpec(), plan.docs), Shape(65536, 65536, 64, 8, 128, 128)
    steps = [Recipe(mask, shape, "cuda", "bfloat16", rank=rank).forward.steps for rank in range(8)]
    assert sum(first.queries is not None for first, *_ in steps) == once
    assert (once < 8) or any(first.where is None for first, *_ in steps), "a rank with no documents of its own"
