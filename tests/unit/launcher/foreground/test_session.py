"""Ctrl-C reaches the present master once: sent twice, it would kill the workers at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import pytest

from tests.unit.rendezvous.standin import PATIENCE, Place
from unirun.launcher.foreground import session as session_module
from unirun.launcher.foreground.console import Console
from unirun.launcher.foreground.session import Session, StopRequests
from unirun.launcher.local import Processes, RunningJob
from unirun.rendezvous import seat
from unirun.spec import Entry, JobSpec, RoleSpec
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Ended, Message, RoleChanged, Stop

FIRST, SECOND, THIRD = (Stop(number, f"got {number}") for number in (2, 15, 3))
RUNNING, STOPPING = ("running", "succeeded"), ("stopping", "succeeded")


class TestStopRequests:
    def test_stop_requests_that_no_master_got_are_sent(self) -> None:
        requests = StopRequests()
        assert requests.for_next(RUNNING) == []
        assert requests.first is None
        requests.add(FIRST, told=False)
        assert requests.first == FIRST
        assert not requests.urgent
        assert requests.for_next(RUNNING) == [FIRST]

    @pytest.mark.parametrize(("phases", "again"), [(RUNNING, [FIRST]), (STOPPING, [])])
    def test_stop_requests_that_died_with_a_master_are_sent_again(
        self, phases: tuple[str, ...], again: list[Stop]
    ) -> None:
        requests = StopRequests()
        requests.add(FIRST, told=True)
        assert requests.for_next(phases) == again

    @pytest.mark.parametrize("phase", ["waiting", "starting", "running", "restarting", "reforming"])
    def test_stop_requests_are_sent_again_while_one_role_is_not_stopping(self, phase: str) -> None:
        requests = StopRequests()
        requests.add(FIRST, told=True)
        assert requests.for_next(["stopping", phase, "failed"]) == [FIRST]

    @pytest.mark.parametrize(("phases", "again"), [(RUNNING, [FIRST, SECOND]), (STOPPING, [SECOND])])
    @pytest.mark.parametrize("told", [True, False])
    def test_a_second_stop_request_is_not_sent_as_the_first(
        self, phases: tuple[str, ...], again: list[Stop], told: bool
    ) -> None:
        requests = StopRequests()
        requests.add(FIRST, told=True)
        requests.add(SECOND, told=told)
        assert requests.urgent
        assert requests.for_next(phases) == again

    def test_stop_requests_are_answered_with_what_follows(self) -> None:
        requests = StopRequests()
        requests.add(FIRST, told=True)
        assert requests.answer("SIGINT", 30.0) == (
            "SIGINT: stopping; SIGKILL follows after 30 s, or at once when it comes again"
        )
        for _ in range(2):
            requests.add(SECOND, told=True)
            assert requests.answer("SIGTERM", 30.0) == "SIGTERM: killing the workers now"

    def test_stop_requests_that_no_master_got_are_sent_to_a_stopping_job(self) -> None:
        requests = StopRequests()
        requests.add(FIRST, told=False)
        assert requests.for_next(STOPPING) == [FIRST]

    def test_stop_requests_after_the_second_are_not_sent(self) -> None:
        requests = StopRequests()
        for stop in (FIRST, SECOND, THIRD):
            requests.add(stop, told=True)
        assert requests.for_next(RUNNING) == [FIRST, SECOND]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path))
    with Place() as place:
        yield place


def tells(**phases: str) -> Callable[[BlockingStream], None]:
    """The first messages of a master to a command: the state of its roles."""

    def script(stream: BlockingStream) -> None:
        assert stream.receive() == Attach(owner=True)
        for name, phase in phases.items():
            stream.send(RoleChanged(name, phase, 0, 0, 1))

    return script


def session(place: Place, *, quiet: bool = True) -> Session:
    """The command in the foreground; its processes are not children of this process."""
    roles = tuple(RoleSpec(name, 1, Entry("script", "a.py")) for name in ("actor", "rollout"))
    spec = JobSpec("job", place.job.run_id, roles, ("actor",), signals=("SIGINT",))
    running = RunningJob(place.job, spec, Processes(os.getppid(), [os.getppid()]))
    return Session(running, Console(quiet=quiet))


async def heard(queue: Queue[Message]) -> Message:
    return await asyncio.to_thread(queue.get, timeout=PATIENCE)


async def shown(following: Session, roles: int) -> None:
    """Wait until a master has sent the state of its roles."""
    async with asyncio.timeout(PATIENCE):
        while len(following._display.roles) < roles or following._master is None:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("written", "again"), [(False, True), (True, False)])
def test_ctrl_c_sent_to_a_master_that_died_is_sent_again_unless_the_job_stops(
    place: Place, written: bool, again: bool
) -> None:
    interrupt = Stop(int(signal.SIGINT), "got SIGINT")

    async def follow() -> None:
        following = session(place)
        following._catch_signals()
        end = asyncio.ensure_future(following._follow_to_end())
        first = place.leader(script=tells(actor="running", rollout="succeeded"))
        await shown(following, 2)
        os.kill(os.getpid(), signal.SIGINT)
        assert await heard(first.heard) == interrupt
        first.die()
        ended = Ended(130, "stopped", "")

        def successor(stream: BlockingStream) -> None:
            tells(actor="stopping" if written else "running", rollout="succeeded")(stream)
            if again:
                assert stream.receive() == interrupt
            stream.send(ended)

        second = place.leader("second", deposing=1, script=successor)
        async with asyncio.timeout(PATIENCE):
            assert await end == ended
        following._masters.close()
        assert second.heard.empty()

    asyncio.run(follow())


def test_ctrl_c_while_there_is_no_master_waits_for_one(place: Place) -> None:
    async def follow() -> None:
        following = session(place)
        following._catch_signals()
        end = asyncio.ensure_future(following._follow_to_end())
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)

        def master(stream: BlockingStream) -> None:
            tells(actor="running", rollout="running")(stream)
            assert isinstance(stream.receive(), Stop)
            stream.send(Ended(130, "stopped", ""))

        place.leader(script=master)
        async with asyncio.timeout(PATIENCE):
            assert (await end) is not None
        following._masters.close()

    asyncio.run(follow())


def test_a_session_leaves_a_hanging_master_for_the_new_leader(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a hanging master does not end."""
    monkeypatch.setattr(seat, "CALM", 0.05)
    ended = Ended(0, "succeeded", "")

    async def follow() -> None:
        following = session(place)
        end = asyncio.ensure_future(following._follow_to_end())
        first = place.leader(script=tells(actor="running", rollout="running"))
        await shown(following, 2)

        def successor(stream: BlockingStream) -> None:
            tells(actor="running", rollout="running")(stream)
            stream.send(ended)

        place.leader("second", deposing=1, script=successor)
        async with asyncio.timeout(PATIENCE):
            assert await end == ended
        following._masters.close()
        first.die()

    asyncio.run(follow())


def test_a_session_shows_once_why_there_is_no_master(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session_module, "QUIET", 0.05)
    place.job.master_log.write_text(
        "unirun-master: store: it is back\nunirun-master: the context has schema 9; use another unirun\nTraceback\n"
    )

    async def follow() -> None:
        following = session(place, quiet=False)
        end = asyncio.ensure_future(following._follow_to_end())
        text = ""
        async with asyncio.timeout(PATIENCE):
            while "nobody leads" not in text:
                await asyncio.sleep(0.01)
                text += capfd.readouterr().err
        await asyncio.sleep(0.3)
        text += capfd.readouterr().err
        assert text == "unirun: nobody leads the job: the context has schema 9; use another unirun\n"
        end.cancel()
        following._masters.close()

    asyncio.run(follow())
