"""Ranks that are processes of this machine: none is left behind."""

import multiprocessing

import pytest

from ringattn.launch.processes import run


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
