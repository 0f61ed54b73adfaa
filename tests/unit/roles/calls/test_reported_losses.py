"""Each death of a worker is told once, by the call that it broke or by the next one."""

from __future__ import annotations

import pytest

from unirun.roles.calls.caller import ReportedLosses
from unirun.roles.peers import Peer, Peers
from unirun.values import WorkerId


class Directory(Peers):
    """The incarnations of a role's ranks, and which of them are gone."""

    def __init__(self, *incarnations: int) -> None:
        self.incarnations, self.gone = list(incarnations), set[int]()

    def size(self, role: str) -> int:
        return len(self.incarnations)

    def find(self, role: str, rank: int) -> Peer:
        return Peer(WorkerId(role, rank, self.incarnations[rank]), gone=rank in self.gone)

    def when_changed(self, listener: object) -> None:
        raise AssertionError("nobody listens")


@pytest.fixture
def directory() -> Directory:
    return Directory(0, 0)


def called(directory: Directory) -> ReportedLosses:
    losses = ReportedLosses(directory, restarted=False)
    for rank in (0, 1):
        losses.called(WorkerId("actor", rank, 0))
    return losses


def test_nothing_is_told_of_workers_that_live(directory: Directory) -> None:
    assert called(directory).report("actor", [0, 1]) == ""


def test_a_loss_is_told_once_whoever_holds_the_rank_meanwhile(directory: Directory) -> None:
    losses = called(directory)
    directory.gone = {1}
    assert losses.report("actor", [0, 1]) == "actor:1"
    directory.gone, directory.incarnations[1] = set(), 1
    assert losses.report("actor", [0, 1]) == ""
    directory.incarnations[1] = 2
    assert losses.report("actor", [0, 1]) == "actor:1"


def test_what_a_call_has_told_is_not_told_again(directory: Directory) -> None:
    losses = called(directory)
    losses.reported(WorkerId("actor", 1, 0))
    directory.incarnations = [0, 1]
    assert losses.report("actor", [0, 1]) == ""
    directory.incarnations = [0, 2]
    assert losses.report("actor", [0, 1]) == "actor:1"


def test_what_comes_late_of_an_earlier_loss_makes_no_other_known_again(directory: Directory) -> None:
    losses = called(directory)
    losses.reported(WorkerId("actor", 1, 4))
    losses.reported(WorkerId("actor", 1, 2))
    directory.incarnations = [0, 5]
    assert losses.report("actor", [0, 1]) == ""


def test_all_that_are_lost_count_as_told_with_the_first(directory: Directory) -> None:
    losses = called(directory)
    directory.incarnations = [1, 3]
    assert losses.report("actor", [0, 1]) == "actor:0"
    assert losses.report("actor", [1]) == ""


def test_a_rank_that_was_never_called_is_nobodys_loss(directory: Directory) -> None:
    directory.incarnations = [5, 5]
    assert ReportedLosses(directory, restarted=False).report("actor", [0, 1]) == ""


def test_a_restarted_caller_is_told_of_what_was_before_it(directory: Directory) -> None:
    losses = ReportedLosses(directory, restarted=True)
    losses.called(WorkerId("actor", 1, 1))
    directory.incarnations = [0, 1]
    assert losses.report("actor", [0, 1]) == "actor:1"
    assert losses.report("actor", [0, 1]) == ""
