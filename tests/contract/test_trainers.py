"""The caller is a process, too: it dies, comes back, and hears signals while it waits."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection

import pytest

from tests.contract.stage import SOON, Stage, eventually
from unirun.roles import RoleGroup, wait


def leave_results(group: RoleGroup, control: Connection) -> None:
    """Make calls whose results are never fetched, and one that runs when this process dies."""
    refs = [group[0].note.call_async(("first", number)) for number in range(20)]
    wait(refs, len(refs), SOON)
    group[0].hold.call_async("abandoned")
    for number in range(20):
        group[0].note.call_async(("queued", number))
    control.send("made")
    time.sleep(SOON)


def call_again(group: RoleGroup, control: Connection) -> None:
    """Call the role as the trainer's next incarnation."""
    control.send(("answers", [group[0].note(("second", number)) for number in range(20)]))
    control.recv()


@pytest.mark.processes
def test_a_trainer_that_dies_leaves_nothing_behind_and_the_next_one_is_served(stage: Stage) -> None:
    cast = stage.role(1)
    first = stage.trainer(0, leave_results, cast)
    first.hear("made")
    cast[0].hear("holding abandoned")
    eventually(lambda: cast[0].ask("kept") == 21, "everything has arrived")
    first.kill()

    second = stage.trainer(1, call_again, cast)
    cast[0].open("abandoned")
    assert second.hear("answers") == [("second", number) for number in range(20)]
    # Only what the new one has not acked, and what this test asks.
    eventually(lambda: cast[0].ask("kept") <= 1, "the results of the dead are gone")
    second.say("go")
    ran = cast.group[0].ran()
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
        control.send(("echo", group[0].echo_beside.call_async(1).result(SOON)))
        control.recv()


@pytest.mark.processes
def test_a_trainer_that_waits_for_a_result_handles_signals(stage: Stage) -> None:
    cast = stage.role(1)
    trainer = stage.trainer(0, wait_long, cast)
    cast[0].hear("holding while signals come")
    trainer.signal(signal.SIGTERM)
    trainer.hear("heard")
    trainer.hear("interrupted")
    cast[0].open("while signals come")
    assert trainer.hear("echo") == 1
    trainer.say("go")
