"""A machine is measured and described in a file that plans can use."""

import os

import pytest

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
    linked = calibrate.linked(base, "cpu")
    quick = linked.replace(start=(0.0, 0.0), inside=machine.Link(1e9, 0.0))  # all that a call takes is the host's
    return linked, calibrate.hosted(quick, "cpu", 32)


def test_links_and_the_host_are_measured_among_ranks(tmp_path):
    os.environ.pop("WORLD_SIZE", None)
    (first, host), (second, same) = run(two_ranks, 2)
    assert host == same and 1e-5 < sum(host.step) < 5 and 0 <= host.exchange < 5 and "launches too" in host.source
    machine.write(host, tmp_path / "mine.toml")
    assert machine.load(tmp_path / "mine.toml") == host
    assert first == second or first.inside.bandwidth == second.inside.bandwidth
    assert first.gpus == 2 and 1e5 < first.inside.bandwidth < 1e13 and 0 < first.inside.latency < 5
    assert first.between == machine.load("cpu").between


def test_a_file_of_another_version_is_ignored_with_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "machine.toml"
    path.write_text('like = "h200"\nleast = [1e-3, 2e-3]\n')
    monkeypatch.setattr(machine, "OWN", path)
    with pytest.warns(UserWarning, match="ignored until `ringattn calibrate` writes it anew: .*'least'"):
        assert machine.of_device("cuda", "NVIDIA H200") == machine.load("h200")
