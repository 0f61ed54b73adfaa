"""Who waits for others is told at once when one of them cannot come any more."""

from __future__ import annotations

import pytest

from unirun.roles.absence import never_comes
from unirun.wire.messages import RoleView, WorkerView


def role(name: str, phase: str, *workers: str) -> RoleView:
    ranks = tuple(WorkerView(rank, 0, each, {}) for rank, each in enumerate(workers))
    return RoleView(name, len(workers), 0, "h:1", phase, ranks)


ACTOR = role("actor", "running", "running", "running")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (role("rollout", "running", "running", "running"), ""),
        (role("rollout", "starting", "starting", "running"), ""),
        (role("rollout", "succeeded", "ended", "ended"), "role rollout has ended with exit code 0"),
        (role("rollout", "running", "running", "ended"), "rollout:1 has ended with exit code 0"),
        (role("rollout", "starting", "ended", "starting"), "rollout:0 has ended with exit code 0"),
        (role("rollout", "running", "lost", "running"), ""),
        (role("rollout", "restarting", "ended", "lost"), ""),
        (role("rollout", "reforming", "ended", "starting"), ""),
        (role("rollout", "stopping", "ended", "running"), ""),
        (role("rollout", "failed", "lost", "lost"), "role rollout has failed"),
        (role("rollout", "stopped", "ended", "lost"), "role rollout has stopped"),
    ],
)
def test_a_role_whose_ranks_have_ended_well_does_not_come_again(other: RoleView, says: str) -> None:
    assert never_comes([ACTOR, other], lambda role, rank: True) == says


def test_a_rank_that_was_there_before_it_ended_has_come() -> None:
    other = role("rollout", "running", "ended", "running")
    assert never_comes([ACTOR, other], lambda role, rank: (role, rank) != ("rollout", 0)) == ""
