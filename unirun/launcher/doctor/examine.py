"""The examination: what is asked of which host, and in what order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import DecodeError, json
from msgspec.structs import replace

from unirun.errors import RendezvousError
from unirun.launcher.doctor.judge import (
    AllReduce,
    Clock,
    Examination,
    HostReport,
    JobPlace,
    JobResult,
    Link,
    bad_hosts,
)
from unirun.launcher.doctor.probe import (
    Answer,
    ImportTorch,
    Inspect,
    Inspected,
    PortOpened,
    Request,
)
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts.connection import RemoteNode, on_host
from unirun.wire.messages import Dismissed

# Probes on other hosts, over ssh or srun, and what it means when one does not answer.

FIRST_ANSWER_TIMEOUT = 20.0
"""Seconds within which a host answers for the first time; ssh itself has half of that to connect."""

PROBE_ANSWER_TIMEOUT = 30.0
"""Seconds for every other answer: more than whatever is asked may take."""

_PROBE = "unirun.launcher.doctor.probe"

_ANSWER: json.Decoder[Answer] = json.Decoder(Answer)

Way = Callable[[Host], list[str]]
"""The command line that starts a probe on a host."""

A = TypeVar("A")


def by_ssh(host: Host) -> list[str]:
    """Through the user's own OpenSSH, which must not ask for anything."""
    return on_host(host, _PROBE)


def by_srun(components: Mapping[str, int]) -> Way:
    """In the Slurm allocation of this process, beside what runs there. `components` has the component of each node in a
    heterogeneous job, and is empty in another one."""

    def way(host: Host) -> list[str]:
        place = ["--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={host.name}"]
        if host.name in components:
            place.append(f"--het-group={components[host.name]}")
        return ["srun", "--quiet", *place, *here(host)]

    return way


def here(_: Host) -> list[str]:
    """On this host."""
    return [sys.executable, "-P", "-m", _PROBE]


class ProbeClient(RemoteNode):
    """The probe on one host. Requests are answered one after the other."""

    _due = 0
    """Answers that are to come."""

    async def ask(self, request: Request, kind: type[A], within: float = PROBE_ANSWER_TIMEOUT) -> A:
        """The answer, which is a `kind`. Raises `RendezvousError` with what it says instead, or why it is silent."""
        try:
            async with asyncio.timeout(within):
                answer = await self._exchange(request)
        except TimeoutError as error:
            raise RendezvousError(f"no answer within {within:g} s", "is the host overloaded?") from error
        except (ConnectionError, EOFError) as error:
            raise await self.failure() from error
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Dismissed):
            raise RendezvousError(answer.problem, answer.remedy)
        raise RendezvousError(f"it answers {answer!r:.200}", "is it of another version?")

    async def _exchange(self, request: Request) -> Answer:
        self._stdin.write(json.encode(request) + b"\n")
        self._due += 1
        await self._stdin.drain()
        while True:
            line = await self._stdout.readline()
            if not line:
                raise EOFError
            # What the shell's startup files print is no answer.
            with contextlib.suppress(DecodeError):
                answer = _ANSWER.decode(line)
                self._due -= 1
                # One to a request that was given up comes late.
                if not self._due:
                    return answer


AT_ONCE = 64
"""Hosts that are reached at the same time."""

TICKS = 8
"""Questions for the time of one host; the one that was answered soonest counts."""

CLOCKS_AT_ONCE = 4
"""Hosts whose clocks are read at the same time: answers must not wait for each other here."""

IMPORT_TIMEOUT = 120.0
"""Seconds for the import of torch."""

JOB_TIMEOUT = 300.0
"""Seconds for all links and all_reduces, which have shorter limits of their own."""


def pre_check(
    hosts: Sequence[Host], interface: str | None = None, way: Way = by_ssh
) -> tuple[tuple[Host, ...], dict[str, str]]:
    """The hosts that a job may use, and the names of the others with the reasons.

    The short form: whether each can be reached, versions, clocks, a connection between each pair, and an all_reduce.
    """
    bad = bad_hosts(asyncio.run(examine(hosts, way, interface=interface, short=True)))
    return tuple(host for host in hosts if host.name not in bad), bad


async def examine(
    hosts: Sequence[Host], way: Way, *, interface: str | None = None, short: bool = False
) -> Examination:
    """Examine `hosts`, which `way` reaches. `short` leaves out what takes long or does not stop a job: bandwidths and
    shared directories. What is wrong with a host is in the result."""
    examiner = _Examiner(hosts, way)
    try:
        await examiner.look(interface)
        await examiner.read_clocks()
        await examiner.work_together(short=short)
        return examiner.found
    finally:
        await examiner.close()


class _Examiner:
    """The findings so far, and the channels to the hosts that could be reached, by name."""

    def __init__(self, hosts: Sequence[Host], way: Way) -> None:
        self._targets, self._way = {host.name: host for host in hosts}, way
        self._channels: dict[str, ProbeClient] = {}
        self._reports = {host.name: HostReport(host.name) for host in hosts}
        self._links: list[Link] = []
        self._all_reduces: list[AllReduce] = []

    @property
    def found(self) -> Examination:
        return Examination(tuple(self._reports.values()), tuple(self._links), tuple(self._all_reduces))

    @property
    def _reached(self) -> list[str]:
        return [report.name for report in self.found.reached]

    def _address(self, name: str) -> str:
        facts = self._reports[name].facts
        return facts.address if facts is not None else ""

    async def close(self) -> None:
        """End all probes."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def _each(
        self, names: Sequence[str], do: Callable[[str], Awaitable[None]], at_once: int = AT_ONCE
    ) -> dict[str, RendezvousError]:
        """Call `do` for all hosts of `names`. Returns the errors by name."""
        turns, errors = asyncio.Semaphore(at_once), dict[str, RendezvousError]()

        async def one(name: str) -> None:
            async with turns:
                try:
                    await do(name)
                except RendezvousError as error:
                    errors[name] = error

        await asyncio.gather(*(one(name) for name in names))
        return errors

    def _drop(self, errors: Mapping[str, RendezvousError]) -> None:
        """Count these hosts as not reached."""
        for name, error in errors.items():
            self._reports[name] = HostReport(name, problem=error.problem, remedy=error.remedy)

    async def look(self, interface: str | None) -> None:
        """Reach all hosts and learn their facts. The first that was reached is the head: the address of each other
        one is that from which it reaches the head."""

        async def reach(name: str) -> None:
            self._channels[name] = await ProbeClient.start(
                self._targets[name], self._way(self._targets[name])
            )
            await ask(name, None)

        async def ask(name: str, head: str | None) -> None:
            told = await self._channels[name].ask(Inspect(interface, head), Inspected, FIRST_ANSWER_TIMEOUT)
            self._reports[name] = HostReport(name, told.facts)

        self._drop(await self._each([*self._targets], reach))
        head, *others = self._reached or [""]
        if interface is None:
            self._drop(await self._each(others, lambda name: ask(name, self._address(head))))

    async def read_clocks(self) -> None:
        """As NTP does: the host's clock is read in the middle of the time from question to answer, give or take half
        of that time."""
        again = Inspect(None, None)

        async def read(name: str) -> None:
            best = Clock(0.0, float("inf"))
            for _ in range(TICKS):
                began, counted = time.time(), time.perf_counter()
                there = (await self._channels[name].ask(again, Inspected)).now
                half = (time.perf_counter() - counted) / 2
                if half < best.uncertainty:
                    best = Clock(there - began - half, half)
            self._reports[name] = replace(self._reports[name], clock=best)

        self._drop(await self._each(self._reached, read, CLOCKS_AT_ONCE))

    async def work_together(self, *, short: bool) -> None:
        """Run the job of all hosts that have torch; again without those that do not reach the first one, or without
        that one if no other does."""
        facts = {
            each.name: each.facts
            for each in self.found.reached
            if each.facts is not None and each.facts.torch
        }
        names = [*facts]
        job = JobPlace(
            rank=0,
            hosts=(),
            address="",
            port=0,
            cwd=os.getcwd(),
            file=f".unirun-doctor-{secrets.token_hex(8)}",
            backends=("gloo", "nccl") if all(each.gpus for each in facts.values()) else ("gloo",),
            bandwidth=not short,
        )
        problems: dict[str, str] = {}
        results: dict[str, JobResult] = {}

        async def load(name: str) -> None:
            nonlocal job
            request = ImportTorch(store=name == names[0])
            opened = await self._channels[name].ask(request, PortOpened, IMPORT_TIMEOUT)
            if opened.port:
                job = replace(job, hosts=tuple(names), address=self._address(name), port=opened.port)

        async def work(name: str) -> None:
            place = replace(job, rank=names.index(name))
            results[name] = await self._channels[name].ask(place, JobResult, JOB_TIMEOUT)

        while names:
            results.clear()
            if unready := await self._each(names, load):
                problems |= {name: error.problem for name, error in unready.items()}
                names = [name for name in names if name not in unready]
                continue
            failed = await self._each(names, work, len(names))
            head, *others = names
            apart = {name: result.apart for name, result in results.items() if result.apart}
            if not apart:
                problems |= {name: error.problem for name, error in failed.items()}
                break
            for name, problem in apart.items():
                self._links += [Link(head, name, problem=problem), Link(name, head, problem=problem)]
            alone = len(others) > 1 and len(apart) == len(others)
            names = others if alone else [name for name in names if name not in apart]
        for name, result in sorted(results.items(), key=lambda each: names.index(each[0])):
            self._links += result.links
            self._reports[name] = replace(self._reports[name], shared=result.shared)
        self._all_reduces += filter(
            None, (_reduced(each, [*facts], results, problems) for each in job.backends)
        )


def _reduced(
    backend: str, names: Sequence[str], results: Mapping[str, JobResult], problems: Mapping[str, str]
) -> AllReduce | None:
    """The all_reduce of all hosts by `backend`; None when no host has begun it. `problems` are those of hosts without
    a result."""
    failed = {name: each.problems[backend] for name, each in results.items() if backend in each.problems}
    failed |= problems if backend == "gloo" else {}
    seconds = {name: each.seconds[backend] for name, each in results.items() if backend in each.seconds}
    hosts = tuple(name for name in names if name in failed or name in seconds)
    if not hosts:
        return None
    return AllReduce(backend, hosts, 0.0 if failed else max(seconds.values()), failed)
