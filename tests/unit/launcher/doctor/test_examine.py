"""Answers as lines, a probe that does not answer, and hosts that do not reach the first one of their job."""

from __future__ import annotations

import asyncio
import random
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json
from msgspec.structs import replace

from tests.effort import seeds
from tests.unit.launcher.doctor.sample_reports import FACTS
from unirun.errors import RendezvousError
from unirun.launcher.doctor import examine as examining
from unirun.launcher.doctor.examine import ProbeClient, examine, here
from unirun.launcher.doctor.judge import Examination, HostReport, JobPlace, JobResult, Link, broken_links
from unirun.launcher.doctor.probe import ImportTorch, Inspect, Inspected, PortOpened
from unirun.launcher.hostlist import Host
from unirun.wire.messages import Dismissed

ANSWER = Inspected(FACTS, 5.0)


def asked(program: str) -> object:
    """The answer of a probe that is `program` to the question for its facts."""

    async def ask() -> object:
        channel = await ProbeClient.start(Host("h1", "h1"), ["sh", "-c", program])
        try:
            return await channel.ask(Inspect(None, None), Inspected, 10.0)
        finally:
            await channel.close()

    return asyncio.run(ask())


def line(message: Inspected | Dismissed | PortOpened) -> str:
    return f"printf '%s\\n' '{json.encode(message).decode()}'"


@pytest.mark.starts_processes
def test_what_the_shell_prints_before_the_answer_is_no_answer() -> None:
    assert asked(f"echo Welcome; echo []; read it; {line(ANSWER)}; exec cat") == ANSWER


@pytest.mark.starts_processes
def test_a_failure_there_is_an_error_here() -> None:
    with pytest.raises(RendezvousError, match="no such interface"):
        asked(f"read it; {line(Dismissed('no such interface'))}; exec cat")
    with pytest.raises(RendezvousError, match="PortOpened"):
        asked(f"read it; {line(PortOpened(5))}; exec cat")


@pytest.mark.starts_processes
def test_an_answer_that_comes_too_late_is_none_to_the_next_question() -> None:
    async def ask() -> object:
        program = f"read it; read it; {line(PortOpened(5))}; {line(ANSWER)}; exec cat"
        channel = await ProbeClient.start(Host("h1", "h1"), ["sh", "-c", program])
        try:
            with pytest.raises(RendezvousError, match="no answer within"):
                await channel.ask(ImportTorch(store=True), PortOpened, 0.01)
            return await channel.ask(Inspect(None, None), Inspected, 10.0)
        finally:
            await channel.close()

    assert asyncio.run(ask()) == ANSWER


@pytest.mark.starts_processes
def test_a_probe_that_ends_tells_why() -> None:
    with pytest.raises(RendezvousError) as caught:
        asked("echo 'Connection refused' >&2; exit 255")
    assert (caught.value.problem, "sshd" in caught.value.remedy) == ("Connection refused", True)


@pytest.mark.starts_processes
def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(RendezvousError, match="no-such-ssh cannot be started"):
        asyncio.run(ProbeClient.start(Host("h1", "h1"), ["no-such-ssh"]))


PROBE = """
import json, sys
name, alone, *answers = sys.argv[1:]
inspected, opened, alone_result, result = map(json.loads, answers)
for line in sys.stdin:
    request = json.loads(line)
    if request["type"] == "Inspect":
        answer = inspected
    elif request["type"] == "ImportTorch":
        answer = opened
    else:
        hosts = request["hosts"]
        answer = alone_result if alone in hosts and name != hosts[0] and alone in (name, hosts[0]) else result
    print(json.dumps(answer), flush=True)
"""


def examined(alone: str) -> Examination:
    """Three hosts, of which the probes are scripts, and none has a way to or from `alone`."""
    answers = [ANSWER, PortOpened(5), JobResult(apart="timed out"), JobResult(seconds={"gloo": 0.5})]
    texts = [json.encode(each).decode() for each in answers]

    def way(host: Host) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", PROBE, host.name, alone, *texts]

    return asyncio.run(examine([Host(name, name) for name in ("h1", "h2", "h3")], way, short=True))


@pytest.mark.starts_processes
def test_a_first_host_that_no_other_reaches_is_left_out() -> None:
    found = examined("h1")
    assert {(link.source, link.target) for link in found.links} == {
        ("h1", "h2"),
        ("h2", "h1"),
        ("h1", "h3"),
        ("h3", "h1"),
    }
    [fault] = broken_links(found)
    assert (fault.hosts, fault.stops) == (("h1",), True)
    [reduced] = found.all_reduces
    assert (reduced.hosts, reduced.seconds) == (("h2", "h3"), 0.5)


@pytest.mark.starts_processes
def test_a_host_that_does_not_reach_the_first_one_is_left_out() -> None:
    found = examined("h3")
    assert {(link.source, link.target) for link in found.links} == {("h1", "h3"), ("h3", "h1")}
    [reduced] = found.all_reduces
    assert (reduced.hosts, reduced.seconds) == (("h1", "h2"), 0.5)


@pytest.mark.starts_processes
def test_hosts_of_one_network_work_together() -> None:
    """Two probes on this host, with real torch."""
    found = asyncio.run(examine([Host(name, name) for name in ("h1", "h2")], here, interface="lo"))
    assert [(link.source, link.target, link.problem) for link in found.links] == [
        ("h2", "h1", ""),
        ("h1", "h2", ""),
    ]
    assert all(0 < link.rtt < 1 and link.bandwidth > 1e6 for link in found.links)
    assert [host.shared for host in found.hosts] == [("cwd", "home"), ("cwd", "home")]
    [reduced] = found.all_reduces
    assert (reduced.hosts, reduced.problems) == (("h1", "h2"), {})


class Far:
    """A host whose clock is `ahead` by so many seconds, in simulated time: each question and each answer takes its time."""

    def __init__(self, ahead: float, trips: list[tuple[float, float]]) -> None:
        self.now, self._ahead, self._trips = 1000.0, ahead, trips
        self._asked = 0

    def time(self) -> float:
        return self.now

    async def ask(self, *_: Any) -> Inspected:
        there, back = self._trips[self._asked % len(self._trips)]
        self._asked += 1
        self.now += there
        answer = Inspected(FACTS, self.now + self._ahead)
        self.now += back
        return answer


TRIPS = st.tuples(st.floats(0.001, 0.5), st.floats(0.001, 0.5))


@given(st.floats(-60.0, 60.0), st.lists(TRIPS, min_size=1, max_size=examining.TICKS))
def test_the_clock_of_a_host_is_known_within_its_uncertainty_by_the_soonest_answer(
    ahead: float, trips: list[tuple[float, float]]
) -> None:
    far = Far(ahead, trips)
    examiner = examining._Examiner([Host("h1", "h1")], lambda _: [])
    examiner._reports["h1"] = HostReport("h1", FACTS)
    examiner._channels["h1"] = far  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examining, "time", SimpleNamespace(time=far.time, perf_counter=far.time))
        asyncio.run(examiner.read_clocks())
    clock = examiner.found.hosts[0].clock
    assert clock is not None
    assert clock.uncertainty == pytest.approx(min(map(sum, trips)) / 2)
    assert abs(clock.offset - ahead) <= clock.uncertainty + 1e-6


class Together:
    """Hosts of which some cannot import torch, at once or later, end in the job, or do not reach the first one of it."""

    def __init__(self, rng: random.Random) -> None:
        self.names = [f"h{number}" for number in range(rng.randint(1, 5))]
        self.torch = {name: rng.random() < 0.9 for name in self.names}
        self.loads_until = {name: rng.choice((0, 1, 2, 9, 9, 9, 9)) for name in self.names}
        self.alone = rng.choice((*self.names, "", "", ""))
        self.ends = {name: rng.random() < 0.1 for name in self.names}
        self.loaded = dict.fromkeys(self.names, 0)
        self.unready: set[str] = set()
        self.jobs: list[JobPlace] = []

    async def ask(self, name: str, request: Any, *_: Any) -> Any:
        if isinstance(request, ImportTorch):
            self.loaded[name] += 1
            if self.loaded[name] > self.loads_until[name]:
                self.unready.add(name)
                raise RendezvousError(f"{name} has no torch")
            return PortOpened(5 if request.store else 0)
        assert isinstance(request, JobPlace)
        self.jobs.append(request)
        assert request.hosts[request.rank] == name
        if (
            self.alone in request.hosts
            and name != request.hosts[0]
            and self.alone in (name, request.hosts[0])
        ):
            return JobResult(apart="timed out")
        if self.ends[name]:
            raise RendezvousError(f"{name} has ended")
        links = tuple(Link(other, name, 0.5) for other in request.hosts if other != name)
        return JobResult(links, seconds={"gloo": 0.5})


@pytest.mark.parametrize("seed", seeds(200))
def test_hosts_work_together_without_those_that_cannot_and_each_of_these_is_told(seed: int) -> None:
    hosts = Together(random.Random(seed))
    examiner = examining._Examiner([Host(name, name) for name in hosts.names], lambda _: [])
    for name in hosts.names:
        facts = FACTS if hosts.torch[name] else replace(FACTS, torch="")
        examiner._reports[name] = HostReport(name, facts)
        examiner._channels[name] = SimpleNamespace(ask=partial(hosts.ask, name))  # type: ignore[assignment]
    asyncio.run(examiner.work_together(short=True))
    last = hosts.jobs[-1].hosts if hosts.jobs else ()
    if not hosts.unready.isdisjoint(last):
        # They have run it, and then none could load torch again.
        last = ()
    problems = {name: f"{name} has no torch" for name in hosts.unready}
    problems |= {name: f"{name} has ended" for name in last if hosts.ends[name]}
    assert {problem for each in examiner.found.all_reduces for problem in each.problems.items()} == set(
        problems.items()
    )
    worked = {name for name in last if name not in problems and name != hosts.alone}
    assert {name for each in examiner.found.all_reduces for name in each.hosts} >= worked | problems.keys()
    measured = {(each.source, each.target) for each in examiner.found.links if not each.problem}
    assert measured == {(other, name) for name in worked for other in last if other != name}


@pytest.mark.parametrize("unreached", [(), ("h1",), ("h2",), ("h1", "h2"), ("h1", "h2", "h3")])
@pytest.mark.parametrize("interface", [None, "ib0"])
def test_the_first_host_that_is_reached_is_the_one_to_which_the_others_find_their_way(
    interface: str | None, unreached: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[Inspect]] = {}

    class Probe:
        def __init__(self, name: str) -> None:
            self.name = name

        async def ask(self, request: Inspect, *_: Any) -> Inspected:
            asked.setdefault(self.name, []).append(request)
            return Inspected(replace(FACTS, address=f"10.0.0.{self.name[1]}"), 5.0)

    async def start(host: Host, _: object) -> Probe:
        if host.name in unreached:
            raise RendezvousError(f"no route to {host.name}")
        return Probe(host.name)

    monkeypatch.setattr(examining, "ProbeClient", SimpleNamespace(start=start))
    examiner = examining._Examiner([Host(name, name) for name in ("h1", "h2", "h3")], lambda _: [])
    asyncio.run(examiner.look(interface))
    first, *others = [name for name in ("h1", "h2", "h3") if name not in unreached] or [""]
    again = [] if interface else [Inspect(None, f"10.0.0.{first[-1:]}")]
    expected = {first: [Inspect(interface, None)]} if first else {}
    assert asked == expected | {name: [Inspect(interface, None), *again] for name in others}
    assert [host.name for host in examiner.found.hosts if host.problem] == [*unreached]
