"""The caller is a process, too: it dies, comes back, and hears signals while it waits."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection

import pytest

from tests.contract.cluster import Cluster
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.roles import RoleGroup, wait


def leave_results(group: RoleGroup, control: Connection) -> None:
    """Make calls whose results are never fetched, and one that runs when this process dies."""
    refs = [group[0].note.call_async(("first", number)) for number in range(20)]
    wait(refs, len(refs), WAIT_TIMEOUT)
    group[0].hold.call_async("abandoned")
    for number in range(20):
        group[0].note.call_async(("queued", number))
    control.send("made")
    time.sleep(WAIT_TIMEOUT)


def call_again(group: RoleGroup, control: Connection) -> None:
    """Call the role as the trainer's next incarnation."""
    control.send(("answers", [group[0].note(("second", number)) for number in range(20)]))
    control.recv()


@pytest.mark.processes
def test_a_trainer_that_dies_leaves_nothing_behind_and_the_next_one_is_served(cluster: Cluster) -> None:
    role = cluster.role(1)
    first = cluster.trainer(0, leave_results, role)
    first.expect("made")
    role[0].expect("holding abandoned")
    eventually(lambda: role[0].ask("kept") == 21, "everything has arrived")
    first.kill()

    second = cluster.trainer(1, call_again, role)
    role[0].open("abandoned")
    assert second.expect("answers") == [("second", number) for number in range(20)]
    # Only what the new one has not acked, and what this test asks.
    eventually(lambda: role[0].ask("kept") <= 1, "the results of the dead are gone")
    second.send("go")
    ran = role.group[0].ran()
    assert [item for item in ran if item[0] == "second"] == [("second", number) for number in range(20)]
    assert len({repr(item) for item in ran}) == len(ran), "nothing ran twice"


def wait_long(group: RoleGroup, control: Connection) -> None:
    """Wait for a call, and tell of a signal meanwhile."""

    def heard(signum: int, frame: object) -> None:
        control.send("heard")
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, heard)
    try:
        group[0].hold("while signals come")
    except KeyboardInterrupt:
        control.send("interrupted")
        control.send(("echo", group[0].echo_beside.call_async(1).result(WAIT_TIMEOUT)))
        control.recv()


@pytest.mark.processes
def test_a_trainer_that_waits_for_a_result_handles_signals(cluster: Cluster) -> None:
    role = cluster.role(1)
    trainer = cluster.trainer(0, wait_long, role)
    role[0].expect("holding while signals come")
    trainer.signal(signal.SIGTERM)
    trainer.expect("heard")
    trainer.expect("interrupted")
    role[0].open("while signals come")
    assert trainer.expect("echo") == 1
    trainer.send("go")
