"""A machine is measured and described in a file that plans can use."""

import os

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.launch import words
from ringattn.launch.commands import calibrate
from ringattn.launch.processes import run
from ringattn.plans import machine


def test_a_calibrated_file_describes_this_machine_and_plans_take_it(tmp_path, monkeypatch):
    path = tmp_path / "here" / "mine.toml"
    monkeypatch.setattr(calibrate, "SIZES", {"cpu": (128, 32, 64), "cuda": (1024, 256, 512)})
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert words.main(["calibrate", f"out={path}"]) == 0
    result = machine.load(path)
    assert result.memory > 2**28 and result.products > 0 and "measured" in result.source
    measured = {"float32", "tiled/float32"} if result.device == "cpu" else {"bfloat16"}
    assert all(result.rates[n] != machine.assumed(result.device).rates.get(n) and n in result.source for n in measured)
    plan = ra.plan(elsewhere(result.device, [(4, 1)]), seq_len=4096, heads=4, head_dim=64, machine=path)
    assert result.name in plan.explain()
    monkeypatch.setattr(machine, "OWN", path)
    assert machine.of_device(result.device) == result


def two_ranks():
    base = machine.load("cpu")
    return calibrate.linked(base, "cpu")


def test_links_are_measured_among_ranks():
    os.environ.pop("WORLD_SIZE", None)
    first, second = run(two_ranks, 2)
    assert first == second or first.inside.bandwidth == second.inside.bandwidth
    assert first.gpus == 2 and 1e5 < first.inside.bandwidth < 1e13 and 0 < first.inside.latency < 5
    assert first.between == machine.load("cpu").between
