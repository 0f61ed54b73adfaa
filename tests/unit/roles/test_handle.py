"""`MasterHandle`: what a worker can ask of its job and tell it."""

from __future__ import annotations

import math
import pickle
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import ConnectionLost, UsageError
from unirun.roles import MasterHandle
from unirun.roles import workload as handles
from unirun.roles.context import Context
from unirun.roles.peers import Peers, RoleInfo
from unirun.wire.blocking import BlockingStream
from unirun.wire.reports import Metrics

ROLES = {"actor": RoleInfo("actor", 2, 3), "trainer": RoleInfo("trainer", 1, 0)}


@pytest.fixture
def agent() -> Iterator[BlockingStream]:
    """The other end of the worker's link; `worker` has this one."""
    ours, theirs = socket.socketpair()
    with BlockingStream(theirs) as stream:
        stream.worker = BlockingStream(ours)  # type: ignore[attr-defined]
        yield stream
        ours.close()


def handle(link: Any = None) -> MasterHandle:
    """The handle of a worker with this link."""
    return MasterHandle(Context({}, Peers("actor", 1, ROLES, send=link.send if link else None)))


def test_job_info_without_a_launcher_is_that_of_the_environment() -> None:
    assert handle().job_info() == {
        "name": "",
        "roles": {
            "actor": {"world_size": 2, "generation": 3, "phase": "running", "kind": "script", "target": ""},
            "trainer": {"world_size": 1, "generation": 0, "phase": "running", "kind": "script", "target": ""},
        },
    }


def test_metrics_are_sent_to_the_agent(agent: Any) -> None:
    before = time.time()
    values: dict[str, Any] = {
        "loss": 0.5,
        "step": 3,
        "tensor": torch.tensor(1.5),
        "array": np.float32(2.5),
        "text": "4.5",
    }
    handle(agent.worker).report(values)
    told = agent.receive(timeout=WAIT_TIMEOUT)
    assert isinstance(told, Metrics)
    assert told.values == {"loss": 0.5, "step": 3.0, "tensor": 1.5, "array": 2.5, "text": 4.5}
    assert before <= told.time <= time.time()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metrics_that_are_not_finite_are_sent_too(agent: Any, value: float) -> None:
    handle(agent.worker).report({"loss": value})
    told = agent.receive(timeout=WAIT_TIMEOUT)
    assert isinstance(told, Metrics)
    assert told.values == {"loss": None}


@pytest.mark.parametrize(
    "value", [None, "high", [1], torch.ones(3), {}, 10**400, 10**5000], ids=lambda value: type(value).__name__
)
def test_a_metric_that_is_no_number_is_refused_by_name(agent: Any, value: Any) -> None:
    with pytest.raises(UsageError, match="metric 'loss' is a .* that is no float: .*; report floats"):
        handle(agent.worker).report({"good": 1.0, "loss": value})


def test_metrics_without_a_launcher_are_dropped() -> None:
    handle().report({"loss": 1.0})


def test_metrics_for_an_agent_that_is_gone_raise_connection_lost(agent: Any) -> None:
    agent.close()
    found = handle(agent.worker)
    with pytest.raises(ConnectionLost):
        found.report({"loss": 1.0})


@pytest.mark.parametrize(
    "state", [b"", b"bytes", bytearray(b"array"), memoryview(b"view"), pickle.dumps({"a": 1})]
)
def test_saved_states_are_kept_as_bytes(state: Any) -> None:
    found = handle()
    assert found.load_state() is None
    found.save_state(state)
    assert found.load_state() == bytes(state)


@pytest.mark.parametrize("state", ["text", None, {"a": 1}, 5], ids=repr)
def test_a_saved_state_that_is_not_bytes_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match=r"save_state got .*; give bytes, for example pickle.dumps"):
        handle().save_state(state)


class Master(Peers):
    """Peers that answer like a master, and note what they were asked."""

    def __init__(self) -> None:
        super().__init__("actor", 1, ROLES)
        self.linked = True
        self.asked: list[tuple[str, str]] = []
        self.kept: str | None = None

    def ask(self, kind: str, name: str = "", data: str = "", *, timeout: float) -> str | None:
        self.asked.append((kind, name))
        if kind == "save_state":
            self.kept = data
            return None
        return self.kept


def test_the_state_that_a_worker_saved_last_is_loaded_by_the_next_incarnation() -> None:
    master = Master()
    assert MasterHandle(Context({}, master)).load_state() is None
    for state in (b"first", b"", bytes(range(256)) * 100, b"last"):
        MasterHandle(Context({}, master)).save_state(state)
        assert MasterHandle(Context({}, master)).load_state() == state


def test_a_state_that_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MAX_STATE", 10)
    master = Master()
    with pytest.raises(
        UsageError, match="save_state got 11 bytes, and 10 is the most; keep large data in files"
    ):
        MasterHandle(Context({}, master)).save_state(b"x" * 11)
    assert master.asked == []
    MasterHandle(Context({}, master)).save_state(b"x" * 10)
    assert master.asked == [("save_state", "")]


def test_a_state_saved_without_a_launcher_is_a_copy() -> None:
    found, memory = handle(), bytearray(b"abc")
    found.save_state(memory)  # type: ignore[arg-type]
    memory[:] = b"zzz"
    assert found.load_state() == b"abc"
