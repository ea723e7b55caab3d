"""Calls that repeat run as graphs, without a GPU: a tape stands in for CUDA's, and threads for GPUs.

As on a GPU, what lanes do while a call is captured happens only in replays, all of it in the memory of the capture.
"""

import gc
import json
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import product
from weakref import WeakSet

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.comms import memory, script, watch
from ringattn.comms.local import Board, LocalMesh
from ringattn.kernels.attention import tiled
from ringattn.kernels.protocol import Disjoint
from ringattn.plans import plan as plans
from ringattn.plans.graphs import why_not
from ringattn.plans.machine import load
from ringattn.plans.ranks import Ranks
from ringattn.torch.attention import call as calls
from ringattn.torch.attention import graphs
from tests import test_symmetric as lanes

HERE = threading.local()  # the tape that a rank records


def tape():
    return getattr(HERE, "tape", None)


class Tape(TorchDispatchMode):
    """The operators and the lanes' work of a capture; a replay does the same with the same memory."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        made = tree_leaves(results)
        if not made or any(isinstance(x, torch.Tensor) and x.data_ptr() for x in made):  # else it has no memory
            self.steps.append(partial(self.again, func, args, kwargs or {}, results))
        return results

    def again(self, func, args, kwargs, results):
        for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
            if isinstance(old, torch.Tensor) and old.shape == new.shape and old.data_ptr() != new.data_ptr():
                old.fill_(torch.nan if old.is_floating_point() else -1) if "empty" in str(func) else old.copy_(new)

    def replay(self):
        for step in self.steps:
            step()

    def instantiate(self): ...


class TapeNode(graphs.Node):
    """It copies in the place on the tape where it was captured."""

    def __init__(self, way, to, source, stream):
        self.way, self.mine = way, to if way == self.INTO else source
        tape().steps.append(self.copy)

    def of(self, x, graph):
        self.x = x.detach()

    def copy(self):
        self.mine.copy_(self.x) if self.way == self.INTO else self.x.copy_(self.mine)


class TapeLanes(lanes.ThreadLanes):
    """Its work goes onto the tape while there is one."""

    queued = ()

    def put(self, lane, work):
        self.now_or_later(partial(super().put, lane, work))

    def precede(self, lane):
        self.now_or_later(partial(super().precede, lane))

    def finish(self):
        ends = []
        self.now_or_later(lambda: ends.append(super(TapeLanes, self).finish()))
        return Ends(self, ends)

    def now_or_later(self, work):
        tape().steps.append(work) if tape() else work()

    def capturing(self):
        return tape() is not None

    def flush(self, lane):
        pass


class Ends:
    def __init__(self, of, ends):
        self.of, self.ends = of, ends

    def wait(self):
        self.of.now_or_later(lambda: self.ends[-1].wait())

    def settle(self):
        if not self.ends:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        self.ends[-1].wait()


class TapeMemory(graphs.Memory):
    def __init__(self, device):
        self.graphs, self.problem, self.stream = WeakSet(), None, None

    nbytes = 0

    @contextmanager
    def capturing(self):
        HERE.tape = Tape()
        try:
            with HERE.tape:
                yield HERE.tape
        finally:
            HERE.tape = None

    def segments(self):
        return [range(2**62)]


@pytest.fixture(autouse=True)
def on_tapes(monkeypatch):
    """Only `graphs="auto"` decides, not the device; and the kernel does not look at numbers, as no GPU's does."""
    monkeypatch.setattr(tiled, "product", lambda weights, x, hidden: weights @ x)
    monkeypatch.setattr(script, "InKernel", lanes.one_by_one)
    monkeypatch.setattr(memory, "SLOT", 512)  # several batches; outboxes of full slots would take 10 GB
    monkeypatch.setattr(graphs, "Memory", TapeMemory)
    monkeypatch.setattr(graphs, "Node", TapeNode)
    monkeypatch.setattr(
        calls, "why_not", lambda plan, shape, spec, docs: None if plan.graphs == "auto" and docs is None else "no"
    )


def meshes(ring, ulysses=1, **more):
    """A mesh for each rank, whose axes are over lanes."""
    rings = [lanes.axes(ring, kind=TapeLanes, **more) for _ in range(ulysses)]
    swaps, made = [lanes.axes(ulysses, kind=TapeLanes) for _ in range(ring)], []
    for r, u in product(range(ring), range(ulysses)):
        mesh = LocalMesh(Board(), {"ring": ring, "ulysses": ulysses}, r * ulysses + u)
        mesh.made |= {"ring": rings[u][r]} if ring > 1 else {}
        mesh.made |= {"ulysses": swaps[r][u]} if ulysses > 1 else {}
        made.append(mesh)
    return made


def on_ranks(function, *sizes, **more):
    return lanes.on_ranks(function, meshes(*sizes, **more))


def drawn(plan, seed, heads=(4, 2), sinks=False):
    """In every other draw q, k and v lie side by side, as of one projection."""
    generator = torch.Generator().manual_seed(10 * seed + plan.ring_axis.rank)
    whole = torch.randn(1, plan.local_len, heads[0] + 2 * heads[1], 8, generator=generator)
    tensors = whole.split((heads[0], heads[1], heads[1]), 2)
    tensors = [x if seed % 2 else x.contiguous() for x in tensors]
    return [x.requires_grad_() for x in tensors + [torch.ones(heads[0])] * sinks]


def layers(plan, given, q, k, v, sinks=None):
    """Two layers and one that is recomputed, all in flight at once; their results and gradients."""
    layer = partial(ra.attention, plan=plan, sinks=sinks, **given)
    first = layer(q, k, v)
    second = layer(first, k, v)
    third = checkpoint(layer, second, k, v, use_reentrant=False)
    leaves = [q, k, v, *([] if sinks is None else [sinks])]
    return [first, second, third, *torch.autograd.grad((third + first).square().sum(), leaves)]


def graphs_of(plan):
    return [call.graphs for call in plan.calls.values() if call.graphs is not None]


CASES = {
    "ring": (3, 1, {}, {}),
    "window": (2, 1, {}, {"spec": ra.AttentionSpec(window=5)}),
    "padded": (2, 1, {"seq_len": 19}, {}),
    "ulysses": (1, 2, {"transport": ra.Transport(groups=2)}, {}),
    "gather": (2, 1, {"strategy": "gather"}, {}),
    "hybrid": (2, 2, {}, {"spec": ra.AttentionSpec(causal=False)}),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_replays_have_the_bits_of_calls(case, sinks, fresh_scores):
    """Of other numbers each time, beside calls that are not captured, and what they returned is not written again."""
    ring, ulysses, asked, given = CASES[case]
    if case == "padded":  # backward gets the keys that arrived, as with FlashAttention-4
        fresh_scores(tiled, disjoint=Disjoint(*[tiled.attend] * 5))

    def one_rank(mesh):
        plan, plain = auto(mesh, **asked), auto(mesh, **asked, graphs="off")
        results = []
        for seed in range(sinks, 4 + sinks):  # the first one's tensors are dense, or k and v are not
            inputs = drawn(plan, seed, sinks=sinks)
            results += zip(layers(plan, given, *inputs), layers(plain, given, *inputs), strict=True)
        (mine,) = graphs_of(plan)
        assert all(torch.equal(a, b) for a, b in results)
        assert plan.axes.kept["graphs"].problem is None and set(mine.captured) == {"forward", "backward"}
        assert all(call.recipe.keeps == (case == "padded") for call in plan.calls.values())

    on_ranks(one_rank, ring, ulysses)


def auto(mesh, **asked):
    return ra.plan(mesh, **{"seq_len": 24, "kernel": "tiled", "graphs": "auto"} | asked)


def test_the_third_run_of_each_pass_of_each_kind_is_captured():
    """Kinds are dtypes, lengths, and whether gradients are wanted; what is not to be captured is not counted."""

    def one_rank(mesh):
        plan = auto(mesh)
        seen = []
        for seed in range(3):
            q, k, v = drawn(plan, seed)
            ra.attention(q, k, v, plan).sum().backward()
            ra.attention(q, k, v, plan, docs=ra.Docs.from_lengths([24]))
            ra.attention(q, k, v, plan, return_lse=True)
            HERE.tape = Tape()  # a user's own graph
            ra.attention(q, k, v, plan)
            HERE.tape = None
            double = [x.detach().double() for x in (q, k, v)]
            with torch.inference_mode(seed == 2):  # whose tensors no other call could write
                for _ in range(seed):
                    ra.attention(*double, plan)
            (with_grad, *without) = graphs_of(plan)
            seen.append((sorted(with_grad.captured), *[sorted(each.captured) for each in without]))
        assert seen == [([],), ([], []), (["backward", "forward"], ["forward"])]
        memory = plan.axes.kept["graphs"]
        assert "3 passes" in plan.explain()
        expected = ra.attention(*double, auto(mesh, graphs="off"))
        assert ra.attention(*double, plan).equal(expected) and not ra.attention(*double, plan).is_inference()
        del with_grad, without
        plan.calls.clear()
        gc.collect()
        assert not memory.graphs and "0 passes" in plan.explain()

    on_ranks(one_rank, 2)


@pytest.mark.parametrize("cause", ["error", "memory", "pool"])
def test_all_ranks_go_on_with_calls_if_one_cannot_capture(cause, monkeypatch):
    made = graphs.Graph.__init__

    def init(self, run, tensors, axes, memory):
        made(self, no_memory if cause == "error" and axes[0].rank == 1 else run, tensors, axes, memory)

    def no_memory(*tensors):
        raise torch.OutOfMemoryError("out of memory\nmore")

    monkeypatch.setattr(graphs.Graph, "__init__", init)
    monkeypatch.setattr(graphs, "MAX_BYTES", -1 if cause == "memory" else 2**62)
    monkeypatch.setattr(TapeMemory, "segments", lambda self: [range(2**62)] * (cause != "pool"))

    def one_rank(mesh):
        plan, plain = auto(mesh), auto(mesh, graphs="off")
        for seed in range(4):
            inputs = drawn(plan, seed)
            for a, b in zip(layers(plan, {}, *inputs), layers(plain, {}, *inputs), strict=True):
                assert torch.equal(a, b)
        (mine,) = graphs_of(plan)
        assert mine.captured == {"forward": None, "backward": None}
        gc.collect()
        assert not plan.axes.kept["graphs"].graphs
        why = {"error": "out of memory", "memory": "other graphs have more", "pool": "memory is"}[cause]
        assert f"not captured: {why}" in plan.explain()

    on_ranks(one_rank, 2)


def test_ranks_that_do_not_capture_the_same_call_all_say_so():
    """One may have run its backward pass twice; the ranks compare what they capture before they rely on it."""

    def one_rank(mesh):
        plan = auto(mesh)
        for _ in range(2):
            q, k, v = drawn(plan, 0)
            ra.attention(q, k, v, plan)
            ra.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), plan)
        dtype = torch.float32 if plan.ring_axis.rank else torch.bfloat16
        with pytest.raises(ValueError, match=r"the ranks do not make the same call: q: .*bfloat16, ring rank 1 has"):
            ra.attention(q.to(dtype), k.to(dtype), v.to(dtype), plan)

    on_ranks(one_rank, 2)


def test_a_rank_that_is_lost_is_named_with_the_step_of_a_replay(monkeypatch):
    """Also to the replay that comes after the error: none is launched that nobody would release."""
    monkeypatch.setattr(watch, "with_first_loss", lambda mine: mine)

    def one_rank(mesh):
        plan = auto(mesh)
        for seed in range(4):
            ra.attention(*[x.detach() for x in drawn(plan, seed)], plan)
        if plan.ring_axis.rank == 1:
            return
        start = time.monotonic()
        step = {0: 3, 2: 2}[plan.ring_axis.rank]  # in which its keys are needed
        with pytest.raises(ConnectionError, match=rf"came from rank 1 within 0.5 s \(keys of step {step} of 3"):
            while time.monotonic() < start + 20:
                ra.attention(*[x.detach() for x in drawn(plan, 9)], plan)
        with pytest.raises(ConnectionError):
            ra.attention(*[x.detach() for x in drawn(plan, 9)], plan)
        assert time.monotonic() < start + 10

    on_ranks(one_rank, 3, timeout=0.5)


def test_only_short_calls_over_memory_that_gpus_share_are_captured(monkeypatch):
    def planned(tokens, ring=2, device="cuda", **asked):
        given = {"seq_len": tokens, "heads": (32, 8), "head_dim": 128, "machine": "h200", "graphs": "auto", **asked}
        return ra.plan(elsewhere(device, [(ring, 2 // ring)]), **given)

    def why(plan, **given):
        return why_not(plan, plan.shape(2), given.pop("spec", ra.AttentionSpec()), **given)

    assert why(planned(8192)) is why(planned(8192, strategy="ulysses", ring=1)) is None
    assert "computes for" in why(planned(32768)) and why(planned(32768), spec=ra.AttentionSpec(window=512)) is None
    assert "documents" in why(planned(8192), docs=ra.Docs.from_lengths([8192]))
    assert "nothing travels" in why(planned(8192, device="cpu")) and why(planned(8192, graphs="off")) == "graphs='off'"
    mesh, plan = LocalMesh(Board(), {"ring": 2, "ulysses": 1}, 0), planned(8192)
    threads = plan.replace(axes=Ranks(mesh.axis("ring"), mesh.axis("ulysses"), device="cuda"))
    assert "over threads cannot be replayed" in why(threads)
    texts = [planned(n, graphs=word).explain() for n, word in ((8192, "auto"), (32768, "auto"), (8192, "off"))]
    assert [("captured in its third run" in t, "none (a GPU computes" in t, "graph" in t) for t in texts] == [
        (True, False, True), (False, True, True), (False, False, False)]  # fmt: skip
    assert ra.plan(seq_len=8).graphs == plans.GRAPHS
    with pytest.raises(ValueError, match="graphs='on': choose auto"):
        ra.plan(seq_len=8, graphs="on")
    monkeypatch.setattr(plans, "GRAPHS", "off")  # a default is refused nowhere
    with pytest.raises(ValueError, match="in torch alone, or off"):
        ra.plan(elsewhere("cuda", [(2, 1)], framework="jax"), seq_len=8, graphs="auto")


def test_the_predicted_memory_counts_inputs_and_results_once_more_and_no_seconds_of_the_host():
    """q, its result and the gradients of both, keys and values and theirs, and the lse of either pass."""
    given = {"seq_len": 8192, "heads": (8, 8), "head_dim": 64, "machine": "h200"}
    costs, hosts = [], []
    for word in ("off", "auto"):
        plan = ra.plan(elsewhere("cuda", [(2, 1)]), **given, strategy="ring", graphs=word)
        (option,) = json.loads(plan.explain(json=True))["candidates"][:1]
        costs.append(option["memory"])
        hosts.append([option[name]["host"] for name in ("forward", "backward")])
        assert option["forward"]["seconds"] >= hosts[-1][0]
    q, lse = 4096 * 8 * 64 * 2, 4096 * 8 * 4
    assert costs[1] - costs[0] == 2 * (3 * q + 2 * q + lse) + 2 * q
    assert hosts[1] == [*load("h200").replay] and hosts[0][0] > 3 * hosts[1][0]
