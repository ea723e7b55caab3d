"""A machine is measured and described in a file that plans can use."""

import os

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.comms import process_group
from ringattn.launch import words
from ringattn.launch.bench import timing
from ringattn.launch.commands import calibrate
from ringattn.launch.processes import run
from ringattn.plans import machine


def test_a_calibrated_file_describes_this_machine_and_plans_take_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "here" / "mine.toml"
    monkeypatch.setattr(calibrate, "SIZES", {"cpu": (128, 32, 64), "cuda": (1024, 256, 512)})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert words.main(["calibrate", f"out={path}", "repeats=1"]) == 0
    assert "measured by ringattn calibrate" in capsys.readouterr().out
    result = machine.load(path)
    assert result.memory > 2**28 and result.products > 0 and "measured" in result.source
    measured = {"float32", "tiled/float32", "bfloat16"} if result.device == "cpu" else {"bfloat16"}
    assert all(result.rates[n] != machine.assumed(result.device).rates.get(n) and n in result.source for n in measured)
    plan = ra.plan(elsewhere(result.device, [(4, 1)]), seq_len=4096, heads=4, head_dim=64, machine=path)
    assert result.name in plan.explain()
    monkeypatch.setattr(machine, "OWN", path)
    assert machine.of_device(result.device) == result


def two_ranks():
    base = machine.load("cpu")
    return calibrate.linked(base, "cpu", 2)


def test_links_are_measured_among_ranks():
    os.environ.pop("WORLD_SIZE", None)
    first, second = run(two_ranks, 2)
    assert first == second or first.inside.bandwidth == second.inside.bandwidth
    assert first.gpus == 2 and 1e5 < first.inside.bandwidth < 1e13 and 0 < first.inside.latency < 5
    assert first.between == machine.load("cpu").between


def two_ranks_of_a_busy_machine():
    calibrate.timed, calibrate.slowest = lambda call, repeats: 1.0, lambda call, device, repeats: 4.0
    calibrate.measured = lambda *options: machine.load("cpu")
    return calibrate.among_ranks("cpu", 1)


def test_ranks_that_are_slower_together_share_cores():
    first, second = run(two_ranks_of_a_busy_machine, 2)
    assert first == second and first.gpus == 2 and first.cores == 0.5


def two_hosts():
    process_group.hosts_of = lambda group: 2
    timing.median_ms = lambda call, repeats, warmup: 1000.0
    return calibrate.linked(machine.load("cpu"), "cpu", 1)


def test_a_link_between_hosts_is_shared_by_the_ranks_of_one_host():
    """Not by those of all hosts: here by one, which got all of it."""
    result = run(two_hosts, 2)[0]
    assert result.gpus == 1 and result.between.bandwidth == calibrate.BYTES["cpu"] / 1e-6
