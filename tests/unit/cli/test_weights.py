"""The table that ``unirun weights`` makes of the metrics of ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.unit.cli.in_process import run_cli
from unirun.cli.status import moves, versions
from unirun.observe.status import JobStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token


def status(**roles: list[dict[str, float]]) -> JobStatus:
    def worker(rank: int, metrics: dict[str, float]) -> dict[str, Any]:
        known = {"rank": rank, "node": "n0", "phase": "running", "incarnation": 0, "pid": None, "exit": ""}
        return known | {"metrics": metrics}

    def role(name: str, some: list[dict[str, float]]) -> dict[str, Any]:
        workers = [worker(rank, metrics) for rank, metrics in enumerate(some)]
        known = {"name": name, "phase": "running", "generation": 0, "restarts": 0, "max_restarts": 0}
        return known | {"workers": workers}

    known = {
        "run_id": "j",
        "name": "j",
        "phase": "running",
        "reason": "",
        "started": 0.0,
        "ended": None,
        "code": None,
    }
    return JobStatus.from_json(known | {"roles": [role(name, some) for name, some in roles.items()]})


def test_ranks_are_told_by_channel_and_version_the_latest_first() -> None:
    job = status(
        actor=[{"policy/version": 3.0, "loss": 1.0}] * 2,
        rollout=[
            {"policy/version": 3.0},
            {"policy/version": 2.0},
            {"policy/version": 2.0, "critic/version": 1.0},
        ],
        reward=[{}],
    )
    assert versions(job) == {
        ("critic", 1): "rollout:2",
        ("policy", 3): "actor:0-1, rollout:0",
        ("policy", 2): "rollout:1-2",
    }
    assert [channel for channel, _ in versions(job)] == ["critic", "policy", "policy"]


def test_what_came_from_whom_is_told_by_path_and_what_no_longer_comes_is_left_out() -> None:
    job = status(
        rollout=[
            {"policy/from/actor:0/socket": 64.0, "policy/from/actor:1/socket": 0.0, "policy/version": 1.0},
            {"policy/from/rollout:0/neighbour": 64.0},
            {"policy/from/actor:0/shared memory": 32.0, "from": 1.0},
        ]
    )
    assert moves(job) == [
        ("policy", "rollout:1", "rollout:0", "neighbour", 64.0),
        ("policy", "rollout:2", "actor:0", "shared memory", 32.0),
        ("policy", "rollout:0", "actor:0", "socket", 64.0),
    ]


def test_weights_that_nobody_has_received_have_not_moved(capsys: pytest.CaptureFixture[str]) -> None:
    job, lock = create_job("j", new_token())
    os.close(lock)
    write_status(job, status(actor=[{"policy/version": 3.0}]))
    assert run_cli("weights", "j", "--plan") == 0
    assert capsys.readouterr() == ("", "unirun: job j has moved no weights yet\n")
