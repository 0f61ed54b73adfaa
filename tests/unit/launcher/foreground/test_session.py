"""Ctrl-C reaches the present master once: sent twice, it would kill the workers at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import pytest
from msgspec.structs import replace

from tests.unit.failover.job import Job
from tests.unit.rendezvous.fake_master import FakeJob
from tests.waiting import WAIT_TIMEOUT
from unirun.failover.context import ContextStore
from unirun.launcher.foreground import session as session_module
from unirun.launcher.foreground.console import Console
from unirun.launcher.foreground.session import JobFollower, StopRequests
from unirun.launcher.local import RunningJob
from unirun.rendezvous import election
from unirun.rendezvous.election import campaign, job_prefix
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.address import UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Ended, RoleChanged, Stop
from unirun.wire.reports import Message

FIRST, SECOND, THIRD = (Stop(number, f"got {number}") for number in (15, 2, 3))
HANGUP = Stop(1, "got 1")


@pytest.mark.parametrize("written", ["[]", '"a text"', "null", "{", "\xff"])
def test_an_error_file_that_is_none_of_torch_is_replaced_by_the_report(written: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    theirs.write_text(written, encoding="latin1")
    session_module.pass_on_error(Ended(3, "failed", "actor:0 failed\nmore", str(theirs)), str(ours))
    message = json.loads(ours.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("actor:0 failed", 3)


class TestStopRequests:
    def test_stop_requests_are_kept_for_the_next_master(self) -> None:
        requests = StopRequests()
        assert requests.for_next == []
        assert requests.first is None
        requests.add(FIRST)
        assert requests.first == requests.for_next[0] == replace(FIRST, urgent=False)
        assert not requests.urgent

    def test_a_second_stop_request_says_that_it_is_urgent(self) -> None:
        requests = StopRequests()
        assert requests.add(FIRST) == replace(FIRST, urgent=False)
        assert requests.add(SECOND) == replace(SECOND, urgent=True)
        assert requests.urgent

    def test_stop_requests_are_answered_with_what_follows(self) -> None:
        requests = StopRequests()
        requests.add(FIRST)
        assert requests.answer("SIGTERM", 30.0) == (
            "SIGTERM: stopping; SIGKILL follows after 30 s, or at once at SIGINT (Ctrl-C)"
        )
        requests.add(HANGUP)
        assert requests.answer("SIGHUP", 30.0) == (
            "SIGHUP: stopping already; SIGINT (Ctrl-C) kills the workers now"
        )
        for _ in range(2):
            requests.add(SECOND)
            assert requests.answer("SIGINT", 30.0) == "SIGINT: killing the workers now"

    def test_ctrl_c_is_answered_with_what_the_next_one_does(self) -> None:
        requests = StopRequests()
        requests.add(SECOND)
        assert requests.answer("SIGINT", 30.0) == (
            "SIGINT: stopping; SIGKILL follows after 30 s, or at once when it comes again"
        )

    def test_only_signals_of_the_keyboard_hurry(self) -> None:
        requests = StopRequests()
        for stop in (FIRST, FIRST, HANGUP, FIRST):
            assert requests.add(stop) == replace(stop, urgent=False)
        assert not requests.urgent
        assert requests.for_next == [replace(FIRST, urgent=False)]
        assert requests.add(THIRD) == replace(THIRD, urgent=True)

    def test_the_next_master_gets_the_first_request_and_the_first_that_hurries(self) -> None:
        requests = StopRequests()
        for stop in (FIRST, HANGUP, SECOND, THIRD):
            requests.add(stop)
        assert requests.for_next == [replace(FIRST, urgent=False), replace(SECOND, urgent=True)]


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    with FakeJob() as fake_job:
        yield fake_job


def tells(**phases: str) -> Callable[[BlockingStream], None]:
    """The first messages of a master to a command: the state of its roles."""

    def script(stream: BlockingStream) -> None:
        assert stream.receive() == Attach(owner=True)
        for name, phase in phases.items():
            stream.send(RoleChanged(name, phase, 0, 0, 1))

    return script


def session(fake_job: FakeJob, *, quiet: bool = True) -> JobFollower:
    """The command in the foreground; its processes are not children of this process."""
    roles = tuple(RoleSpec(name, 1, Entry("script", "a.py")) for name in ("actor", "rollout"))
    spec = JobSpec("job", fake_job.job_dir.run_id, roles, ("actor",), signals=("SIGINT",))
    running = RunningJob(fake_job.job_dir, spec, os.getppid(), [os.getppid()])
    return JobFollower(running, Console(quiet=quiet))


async def heard(queue: Queue[Message]) -> Message:
    return await asyncio.to_thread(queue.get, timeout=WAIT_TIMEOUT)


async def shown(following: JobFollower, roles: int) -> None:
    """Wait until a master has sent the state of its roles."""
    async with asyncio.timeout(WAIT_TIMEOUT):
        while len(following._display.roles) < roles or following._master is None:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("own", [True, False])
def test_the_end_of_a_job_in_the_store_is_not_that_of_another_one_with_its_id(
    fake_job: FakeJob, own: bool
) -> None:
    run_id = fake_job.job_dir.run_id
    term = campaign(fake_job.store, job_prefix(run_id), UnixAddress("/m", "h"), 7, ttl=60.0)
    assert term is not None
    state = Job({"actor": 1}).running().exits("actor", 0).state
    state = replace(state, uid=fake_job.job_dir.uid if own else "another")
    ContextStore(fake_job.store, run_id, term).create(state)
    found = session(fake_job)._state_in_store()
    assert (found and found.uid) == (fake_job.job_dir.uid if own else None)


def test_ctrl_c_sent_to_a_master_that_died_is_sent_again_and_is_not_urgent_then(fake_job: FakeJob) -> None:
    interrupt = Stop(int(signal.SIGINT), "got SIGINT", urgent=False)

    async def follow() -> None:
        following = session(fake_job)
        following._catch_signals()
        end = asyncio.ensure_future(following._follow_to_end())
        first = fake_job.leader(script=tells(actor="running", rollout="succeeded"))
        await shown(following, 2)
        os.kill(os.getpid(), signal.SIGINT)
        assert await heard(first.heard) == interrupt
        first.die()
        ended = Ended(130, "stopped", "")

        def successor(stream: BlockingStream) -> None:
            tells(actor="stopping", rollout="succeeded")(stream)
            assert stream.receive() == interrupt
            stream.send(ended)

        second = fake_job.leader("second", deposing=1, script=successor)
        async with asyncio.timeout(WAIT_TIMEOUT):
            assert await end == ended
        following._masters.close()
        assert second.heard.empty()

    asyncio.run(follow())


def test_ctrl_c_while_there_is_no_master_waits_for_one(fake_job: FakeJob) -> None:
    async def follow() -> None:
        following = session(fake_job)
        following._catch_signals()
        end = asyncio.ensure_future(following._follow_to_end())
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)

        def master(stream: BlockingStream) -> None:
            tells(actor="running", rollout="running")(stream)
            assert isinstance(stream.receive(), Stop)
            stream.send(Ended(130, "stopped", ""))

        fake_job.leader(script=master)
        async with asyncio.timeout(WAIT_TIMEOUT):
            assert (await end) is not None
        following._masters.close()

    asyncio.run(follow())


def test_a_session_leaves_a_hanging_master_for_the_new_leader(
    fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a hanging master does not end."""
    monkeypatch.setattr(election, "CALM_POLL_INTERVAL", 0.05)
    ended = Ended(0, "succeeded", "")

    async def follow() -> None:
        following = session(fake_job)
        end = asyncio.ensure_future(following._follow_to_end())
        first = fake_job.leader(script=tells(actor="running", rollout="running"))
        await shown(following, 2)

        def successor(stream: BlockingStream) -> None:
            tells(actor="running", rollout="running")(stream)
            stream.send(ended)

        fake_job.leader("second", deposing=1, script=successor)
        async with asyncio.timeout(WAIT_TIMEOUT):
            assert await end == ended
        following._masters.close()
        first.die()

    asyncio.run(follow())


def test_a_session_shows_once_why_there_is_no_master(
    fake_job: FakeJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session_module, "NO_MASTER_NOTICE_DELAY", 0.05)
    fake_job.job_dir.master_log.write_text(
        "unirun-master: store: it is back\nunirun-master: the context has schema 9; use another unirun\nTraceback\n"
    )

    async def follow() -> None:
        following = session(fake_job, quiet=False)
        end = asyncio.ensure_future(following._follow_to_end())
        text = ""
        async with asyncio.timeout(WAIT_TIMEOUT):
            while "nobody leads" not in text:
                await asyncio.sleep(0.01)
                text += capfd.readouterr().err
        await asyncio.sleep(0.3)
        text += capfd.readouterr().err
        assert text == "unirun: nobody leads the job: the context has schema 9; use another unirun\n"
        end.cancel()
        following._masters.close()

    asyncio.run(follow())
