"""Short calls that repeat run as CUDA graphs: the same numbers, lost ranks named, memory returned."""

import gc
import os
import signal
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.launch.processes import RankError
from ringattn.launch.processes import run as run_processes
from tests.test_gpu import backend_for

pytestmark = pytest.mark.gpu
SPECS = {"causal": ra.AttentionSpec(), "window": ra.AttentionSpec(window=300), "full": ra.AttentionSpec(causal=False)}
PLACES = {"ring": (2, 1), "gather": (2, 1), "ulysses": (1, 2), "ring of 4": (4, 1), "hybrid": (2, 2)}


def planned(place, graphs="auto", **asked):
    ring, ulysses = PLACES[place]
    mesh = ra.init_mesh(ring=ring, ulysses=ulysses, device_type="cuda")
    strategy = place if place in ("gather", "ulysses") else "ring"
    asked = {"seq_len": 2048, "heads": (8, 4), "head_dim": 64, "strategy": strategy} | asked
    return ra.plan(mesh, **asked, graphs=graphs)


def drawn(plan, sinks=False, dtype=torch.bfloat16):
    tensors = [torch.randn(1, plan.local_len, h, 64, device="cuda", dtype=dtype) for h in (8, 4, 4)]
    tensors += [torch.randn(8, device="cuda")] if sinks else []
    return [x.requires_grad_() for x in tensors]


def layers(plan, spec, inputs):
    """Two layers and one that is recomputed, and their gradients, all in flight at once."""
    q, k, v, *sinks = inputs
    given = {"spec": spec, "sinks": sinks[0] if sinks else None}
    out = ra.attention(ra.attention(q, k, v, plan, **given), k, v, plan, **given)
    again = checkpoint(lambda x: ra.attention(x, k, v, plan, **given), out, use_reentrant=False)
    return [again, *torch.autograd.grad(again.float().square().sum(), inputs)]


def replayed(place, name, sinks, compiled=False):
    """The largest difference between captured calls and others, in turns on two streams, and the captured passes."""
    plan, plain = (planned(place, graphs) for graphs in ("auto", "off"))
    run = torch.compile(layers) if compiled else layers
    torch.manual_seed(torch.distributed.get_rank())
    side, gap = torch.cuda.Stream(), 0.0
    for turn in range(6):
        inputs = drawn(plan, sinks)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
            mine, expected = run(plan, SPECS[name], inputs), layers(plain, SPECS[name], inputs)
        torch.cuda.current_stream().wait_stream(side)
        gap = max(gap, *[float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, expected, strict=True)])
    found = [call.graphs.captured for call in plan.calls.values() if call.graphs is not None]
    return gap, sorted(name for each in found for name, graph in each.items() if graph is not None), plan.explain()


@pytest.mark.parametrize(
    "place, name, sinks, compiled", [*product(PLACES, SPECS, [False, True], [False]), ("ring", "causal", False, True)]
)
def test_replays_equal_calls(place, name, sinks, compiled):
    ring, ulysses = PLACES[place]
    backend = backend_for(ring * ulysses, "symmetric")
    for gap, captured, text in run_processes(
        replayed, ring * ulysses, place, name, sinks, compiled, backend=backend, timeout=200 if compiled else 120
    ):
        assert sorted(set(captured) if compiled else captured) == ["backward", "forward"], text
        assert gap <= 1e-2


def steps(deterministic):
    """Memory after 100 and after 200 steps, and when the calls are gone; and whether all numbers are finite."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    plan, memory, finite = planned("ring"), [], True
    for step in range(200):
        finite &= all(bool(x.isfinite().all()) for x in layers(plan, SPECS["causal"], drawn(plan)))
        if step in (99, 199):
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_allocated())
    held = plan.axes.kept["graphs"].nbytes
    plan.calls.clear()
    gc.collect()
    return *memory, torch.cuda.memory_allocated(), held, len(plan.axes.kept["graphs"].graphs), finite


@pytest.mark.parametrize("deterministic", [False, True])
def test_200_steps_hold_no_more_memory_and_the_end_of_calls_returns_it(deterministic):
    for middle, end, after, held, graphs, finite in run_processes(
        steps, 2, deterministic, backend=backend_for(2, "symmetric"), timeout=200
    ):
        assert finite and graphs == 0 and abs(end - middle) < 2**20 and 0 < held < 2**28 and after < end


def one_dies(folder, place, victim, graphs):
    """Calls, or replays, without end; one rank is killed between two, the others write down their error and when."""
    rank, plan = torch.distributed.get_rank(), planned(place, graphs)
    q, k, v = (x.detach() for x in drawn(plan))
    for i in range(1000):
        if i == 6:
            torch.cuda.synchronize()
            start = time.monotonic()
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            ra.attention(q, k, v, plan)
            torch.cuda.synchronize()
        except ConnectionError as error:
            Path(folder, str(rank)).write_text(f"{time.monotonic() - start:.1f} {error}")
            break
    time.sleep(20)  # until all are ended


@pytest.mark.parametrize("graphs", ["off", "auto"])
@pytest.mark.parametrize("place, victim", [("ring", 1), ("ring of 4", 0), ("ring of 4", 2)])
def test_a_rank_that_is_killed_is_named_by_all_others_in_time(place, victim, graphs, tmp_path):
    ranks = PLACES[place][0]
    with pytest.raises(RankError):
        run_processes(
            one_dies, ranks, str(tmp_path), place, victim, graphs,
            backend=backend_for(ranks, "symmetric"), collective_timeout=5.0, grace=12.0,
        )  # fmt: skip
    output = {int(p.name): p.read_text() for p in tmp_path.iterdir()}
    assert sorted(output) == [r for r in range(ranks) if r != victim]
    for text in output.values():
        seconds, error = text.split(" ", 1)
        assert float(seconds) < 12 and f"rank {victim} within 5 s (keys of step" in error, text
