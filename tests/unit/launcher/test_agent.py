"""An agent that cannot handle an event stops its workers and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.wire.endpoints import Endpoint, fail_on_refusal
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.errors import Refused
from unirun.launcher import core, events
from unirun.launcher.agent import Agent, EarlySpawners, LineFilters, handles_of
from unirun.launcher.environment import SpawnerKey, for_workers
from unirun.launcher.events import AgentState, Command, Event, Phase, Worker
from unirun.launcher.orders import Orders
from unirun.observe.jobdir import JobDir
from unirun.rendezvous.creation import create_job
from unirun.rendezvous.election import campaign, job_prefix
from unirun.rendezvous.store.url import open_store
from unirun.spec.job import Entry, JobSpec, LogSpec, RoleSpec
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.aio import Stream, StreamServer, connect
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, StartRole, StartWorker
from unirun.wire.reports import Spawn


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    job, lock = create_job("run-1", new_token())
    spec = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))
    made = asyncio.run(_made(job, spec, lock))
    yield made
    os.close(lock)


async def _made(job: object, spec: JobSpec, lock: int) -> Agent:
    return Agent(job, AgentTask(spec, "n0", ("n0",), "/", ""), {}, lock)  # type: ignore[arg-type]


class Bug:
    """Replaces the core's step, and raises for some events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kinds: type, error: Exception) -> None:
        self.kinds, self.error = kinds, error
        self.seen: list[Event] = []
        self._step = core.step
        monkeypatch.setattr(core, "step", self.step)

    def step(self, state: AgentState, event: Event) -> tuple[AgentState, list[Command]]:
        self.seen.append(event)
        if isinstance(event, self.kinds):
            raise self.error
        return self._step(state, event)


def test_an_agent_leaves_after_an_internal_error(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = Bug(monkeypatch, events.Led, error=KeyError("x"))
    agent._apply(events.Led(1))
    assert [type(event) for event in bug.seen] == [events.Led, events.Abandon]
    assert "KeyError('x')" in str(bug.seen[-1])
    assert agent._left.is_set(), "it had no workers"


def test_an_agent_leaves_also_when_stopping_its_workers_fails(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(monkeypatch, events.Led, events.Abandon, error=KeyError("x"))
    agent._apply(events.Led(1))
    assert [type(event) for event in bug.seen] == [events.Led, events.Abandon]
    assert agent._left.is_set()


@pytest.mark.starts_processes
def test_an_agent_whose_node_may_have_been_given_up_kills_its_workers_and_leaves(agent: Agent) -> None:
    async def play() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "100", start_new_session=True)
        key: SpawnerKey = ()
        spawn = Spawn(1, "actor:0", "script", "a.py", (), False, {}, "/", "/logs", "actor/0/0")
        worker = Worker(1, WorkerId("actor", 0, 0), key, spawn, Phase.ALIVE, process.pid)
        agent._state = replace(agent._state, workers={1: worker}, spawners={key: True})
        agent._fenced()
        assert await asyncio.wait_for(process.wait(), WAIT_TIMEOUT) == -signal.SIGKILL
        assert agent._state.leaving
        assert agent._state.workers[1].sent == signal.SIGKILL

    asyncio.run(play())


@pytest.mark.parametrize("terms", [1, 2])
def test_an_agent_that_was_stopped_starts_nothing_for_a_master_that_was_replaced(
    agent: Agent, tmp_path: Path, terms: int
) -> None:
    """The order has waited in its socket, and the end of the stream behind it."""
    endpoint = Endpoint("unix", tmp_path)
    agent._state = replace(agent._state, spawners=dict.fromkeys(agent._orders.spawners, True))
    with contextlib.closing(open_store(agent._job.store_url)) as store:
        for epoch in range(1, terms + 1):
            address = UnixAddress.here(tmp_path / f"{epoch}.sock")
            assert campaign(store, job_prefix("run-1"), address, epoch, ttl=60.0, deposing=epoch - 1)

    async def master(stream: Stream) -> None:
        member = StartWorker(0, 0, 0, None, None, 1.0)
        stream.send(StartRole("actor", 0, 0, 1, 1, 0, 1, "127.0.0.1:1", (member,)))
        await stream.close()

    async def play() -> None:
        server = StreamServer(endpoint.listen(), endpoint.credentials, master, fail_on_refusal)
        stream = await connect(endpoint.address, endpoint.credentials)
        agent._apply(events.Led(1))
        await asyncio.wait_for(agent._handle_messages(1, stream), WAIT_TIMEOUT)
        stream.abort()
        server.close()

    asyncio.run(play())
    assert len(agent._state.workers) == (1 if terms == 1 else 0)


def test_an_event_that_the_agent_refuses_changes_nothing(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bug(monkeypatch, events.Led, error=Refused("no"))
    before = agent._state
    agent._apply(events.Led(1))
    assert agent._state is before
    assert not agent._left.is_set()
    (told,) = agent._unsent.take()
    assert b"refused Led: no" in told


@pytest.mark.starts_processes
def test_an_agent_without_a_task_starts_the_spawner_that_it_most_likely_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRUN_WARM", "0")
    spec = JobSpec("job", "run-1", (RoleSpec("actor", 1, Entry("script", "a.py")),), ("actor",))
    task = AgentTask(spec, "n0", (), str(tmp_path), "127.0.0.1")
    early = EarlySpawners(task)
    orders = Orders(JobDir(tmp_path), task, for_workers(os.environ))
    (key,) = orders.spawners
    want = orders.spawner_request(key, early.descriptors, handles_of(early.sockets.values()))
    assert early.take(key, replace(want, modules=("json",))) is None
    early.start(task, early.sockets.values())
    taken = early.take(key, want)
    assert taken is not None, "it is as the task wants it, so that no other was started"
    stream, popen = taken
    assert popen.poll() is None
    popen.kill()
    popen.wait()
    stream.close()
    other = EarlySpawners(task)
    other.close()
    assert other.take(key, want) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    other.start(task, other.sockets.values())
    orders = Orders(JobDir(tmp_path), task, for_workers(os.environ))
    (key,) = orders.spawners
    assert ("OMP_NUM_THREADS", "3") in key
    found = other.take(
        key, orders.spawner_request(key, other.descriptors, handles_of(other.sockets.values()))
    )
    assert found is not None, "the environment of the job is known"
    found[0].close()
    found[1].wait(WAIT_TIMEOUT)
    for each in (*early.sockets.values(), *other.sockets.values()):
        each.close()


def test_of_each_rank_the_last_worker_alone_is_followed_and_all_matching_lines_come_once(
    tmp_path: Path,
) -> None:
    job = JobDir(tmp_path)
    job.logs.mkdir()
    filters = LineFilters(job, LogSpec(duplicate_stdout_filters=("loss", ""), duplicate_stderr_filters=()))
    expected = []
    for incarnation in range(4):
        for rank in range(2):
            who = WorkerId("actor", rank, incarnation)
            logs = job.worker_logs(who)
            logs.mkdir(parents=True)
            (logs / "stdout.log").write_text(f"loss {incarnation}\nother\n")
            expected.append(f"[actor:{rank}] loss {incarnation}")
            filters.follow(who)
    assert filters._follower is not None
    about = Path(f"/proc/self/fdinfo/{filters._follower._inotify}")
    eventually(lambda: about.read_text().count("inotify wd:") == 2, "two files are watched")
    filters.finish()
    assert sorted((job.logs / "filtered_stdout.log").read_text().splitlines()) == sorted(expected)
