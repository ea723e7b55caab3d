"""Ranks that are processes of this machine: none is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from ringattn.launch.processes import RankError, run


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
    with pytest.raises(OSError, match="no more of these"):
        run(print, 4, ForTwoRanks())
    assert ForTwoRanks.given == 3
    assert multiprocessing.active_children() == before


def die(_: None) -> None:
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_said_with_its_signal_rather_than_what_others_heard_of_it():
    with pytest.raises(RankError, match=r"^rank 1: ended without a word: killed by signal 9 \(SIGKILL\)$"):
        run(die, 2, None)


def test_a_terminals_interrupt_is_answered_in_a_line_while_things_are_imported(tmp_path):
    words = ["train", f"folder={tmp_path}", "run=a", "picture=false", "steps=2000"]
    command = subprocess.Popen(
        [sys.executable, "-m", "ringattn", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert "writes to" in command.stdout.readline()  # from now on the fork server imports torch
    os.killpg(command.pid, signal.SIGINT)
    said, _ = command.communicate(timeout=60)
    assert "stopped" in said.splitlines()[-1] and "Traceback" not in said
