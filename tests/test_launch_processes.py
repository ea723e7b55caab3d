"""Ranks that are processes of this machine: none is left behind."""

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ringattn.launch import processes
from ringattn.launch.processes import RankError, run
from ringattn.launch.train import ray

ROOT = Path(__file__).parent.parent


class ForTwoRanks:
    """An argument that the third rank cannot be given."""

    given = 0

    def __reduce__(self):
        ForTwoRanks.given += 1
        if ForTwoRanks.given > 2:
            raise OSError("no more of these")
        return ForTwoRanks, ()


def test_if_a_rank_cannot_be_started_those_before_it_are_ended():
    before = multiprocessing.active_children()
    with pytest.raises(OSError):
        run(print, 4, ForTwoRanks())
    assert ForTwoRanks.given == 3
    assert multiprocessing.active_children() == before


def die(_: None) -> None:
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_reported_with_its_signal_rather_than_the_errors_of_others():
    with pytest.raises(RankError, match=r"^rank 1: ended without a word: killed by signal 9 \(SIGKILL\)$"):
        run(die, 2, None)


def wait(folder: str) -> None:
    Path(folder, "rank").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_a_rank_ends_with_the_process_that_started_it_however_that_ended(tmp_path):
    code = f"from tests.test_launch_processes import run, wait; run(wait, 1, {str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    rank = tmp_path / "rank"
    until(lambda: rank.exists() and rank.read_text())
    parent.kill()
    until(lambda: not Path("/proc", rank.read_text()).exists())
    parent.wait()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("seq_len=0"), 2),
        (OSError(errno.ENOENT, "no such file"), 2),
        (RankError(1, "PermissionError: runs cannot be written to"), 2),
        (OSError(errno.ENOSPC, "no space left"), 1),
        (RankError(1, "OSError: could not save step 3"), 1),
        (RankError(1, "ConnectionError: rank 0 is gone"), 1),
        (RankError(1, "ended without a word: killed by signal 9"), 1),
    ],
)
def test_the_exit_status_says_whether_another_attempt_may_help(error, status):
    assert processes.status(error) == status


def test_what_the_driver_of_ray_opens_on_the_loopback_listens_nowhere_else():
    with ray.listener("127.0.0.1") as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):  # another address of this machine
            socket.create_connection(("127.0.0.2", port))


@pytest.mark.parametrize("before", [None, 0o644])
def test_rays_token_is_its_owners_alone(before, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / ".ray" / "auth_token"
    if before:
        token.parent.mkdir(mode=0o777)
        token.write_text("0" * 64)
        token.chmod(before)
    ray.keep_token_private()
    assert len(token.read_text()) == 64 and [p.name for p in token.parent.iterdir()] == ["auth_token"]
    assert token.stat().st_mode & 0o777 == 0o600 and not token.parent.stat().st_mode & 0o022


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def test_a_signal_that_a_run_was_started_to_ignore_stays_ignored():
    """nohup has it ignore a hangup, and a script has its background jobs ignore Ctrl-C."""
    caught = []
    for before, count in ((signal.SIG_IGN, 0), (signal.SIG_DFL, 1)):
        usual = signal.signal(signal.SIGHUP, before)
        with processes.handling(lambda number, frame: caught.append(number), signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
        assert len(caught) == count and signal.signal(signal.SIGHUP, usual) is before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_in_a_line_while_things_are_imported(number, tmp_path):
    words = ["train", f"folder={tmp_path}", "run=a", "picture=false", "steps=2000"]
    command = subprocess.Popen(
        [sys.executable, "-m", "ringattn", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert "writes to" in command.stdout.readline()  # from now on the fork server imports torch
    os.killpg(command.pid, number)
    output, _ = command.communicate(timeout=60)
    assert "stopped" in output.splitlines()[-1] and "Traceback" not in output
