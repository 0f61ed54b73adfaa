"""The examination: what is asked of which host, and in what order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from unirun.errors import FrameError, RendezvousError
from unirun.launcher.doctor.judge import bad_hosts, broken_links
from unirun.launcher.doctor.requests import (
    AllReduce,
    AllReduceAs,
    Answer,
    Clock,
    Examination,
    Find,
    Found,
    HostReport,
    ImportTorch,
    Inspect,
    Inspected,
    Link,
    Listen,
    Meet,
    Met,
    PortOpened,
    Reduced,
    Remove,
    Request,
    RequestFault,
    Tick,
    Time,
    Write,
    to_answer,
    to_line,
)
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts.connection import explain, on_host

# The pairs of hosts that are measured at the same time.

T = TypeVar("T")

MOST_ROUNDS = 32
"""Of more hosts, each is measured with so many others."""


def pair_rounds(hosts: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Rounds of pairs. In a round no host is in two pairs, so that pairs do not disturb each other.

    All pairs of up to `MOST_ROUNDS` hosts, by the circle method: the first host stays, the others move on by one place
    in each round.
    """
    places: list[T | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(min(len(places) - 1, MOST_ROUNDS)):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(one, other) for one, other in opposite if one is not None and other is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


# Probes on other hosts, over ssh or srun, and what it means when one does not answer.

FIRST_ANSWER_TIMEOUT = 20.0
"""Seconds within which a host answers for the first time; ssh itself has half of that to connect."""

PROBE_ANSWER_TIMEOUT = 30.0
"""Seconds for every other answer: more than whatever is asked may take."""

_LONGEST = 1 << 20
_PROBE = "unirun.launcher.doctor.probe"

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


class ProbeClient:
    """The probe on one host. Requests are answered one after the other."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self._process = process
        self._errors = asyncio.ensure_future(_tail(process.stderr))

    @classmethod
    async def open(cls, host: Host, way: Way) -> ProbeClient:
        """Start the probe, without waiting for it. Raises `RendezvousError` when ssh or srun cannot be started."""
        pipe = asyncio.subprocess.PIPE
        command = way(host)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LONGEST
            )
        except OSError as error:
            raise RendezvousError(
                f"{command[0]} cannot be started: {error.strerror}", "install it"
            ) from error
        return cls(host, process)

    async def ask(self, request: Request, kind: type[A], within: float = PROBE_ANSWER_TIMEOUT) -> A:
        """The answer, which is a `kind`. Raises `RendezvousError` with what it says instead, or why it is silent."""
        try:
            async with asyncio.timeout(within):
                answer = await self._exchange(request)
        except TimeoutError as error:
            raise RendezvousError(f"no answer within {within:g} s", "is the host overloaded?") from error
        except (ConnectionError, EOFError) as error:
            raise await self._end() from error
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, RequestFault):
            raise RendezvousError(answer.problem, answer.remedy)
        raise RendezvousError(f"it answers {answer!r:.200}", "is it of another version?")

    async def _exchange(self, request: Request) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(to_line(request))
        await self._process.stdin.drain()
        while True:
            line = await self._process.stdout.readline()
            if not line:
                raise EOFError
            # What the shell's startup files print is no answer.
            with contextlib.suppress(FrameError):
                return to_answer(line)

    async def _end(self) -> RendezvousError:
        """The reason why the probe has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._process.wait()
                return explain(self.host, self._process.returncode, await self._errors)
        return RendezvousError("the probe has closed its output")

    async def close(self) -> None:
        """End the probe by the end of its stdin; after a second, by SIGKILL to ssh or srun."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(1.0):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._errors.cancel()


async def _tail(stream: asyncio.StreamReader | None) -> str:
    """The last lines until the end."""
    assert stream is not None
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-4096:]
    return kept.decode(errors="replace")


AT_ONCE = 64
"""Hosts that are reached at the same time."""

TICKS = 8
"""Questions for the time of one host; the one that was answered soonest counts."""

CLOCKS_AT_ONCE = 4
"""Hosts whose clocks are read at the same time: answers must not wait for each other here."""

HOPELESS = 3
"""A host with so many broken links, and no other, is not tried further."""

COLLECTIVE_TIMEOUT = 120.0
"""Seconds for the import of torch and for an all_reduce, which have shorter limits of their own."""


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
        if not short:
            await examiner.compare_directories()
        await examiner.measure_links(bandwidth=not short)
        await examiner.all_reduce()
        return examiner.found
    finally:
        await examiner.close()


class _Examiner:
    """The findings so far, and the channels to the hosts that could be reached, by name."""

    def __init__(self, hosts: Sequence[Host], way: Way) -> None:
        self._hosts, self._way = hosts, way
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
    ) -> None:
        """`do` for all hosts of `names`. One that fails counts as not reached from then on."""
        turns = asyncio.Semaphore(at_once)

        async def one(name: str) -> None:
            async with turns:
                try:
                    await do(name)
                except RendezvousError as error:
                    self._reports[name] = HostReport(name, problem=error.problem, remedy=error.remedy)

        await asyncio.gather(*(one(name) for name in names))

    async def look(self, interface: str | None) -> None:
        """Reach all hosts and learn their facts. The first that was reached is the head: the address of each other
        one is that from which it reaches the head."""
        targets = {host.name: host for host in self._hosts}

        async def reach(name: str) -> None:
            self._channels[name] = await ProbeClient.open(targets[name], self._way)
            await ask(name, None)

        async def ask(name: str, head: str | None) -> None:
            told = await self._channels[name].ask(
                Inspect(os.getcwd(), interface, head), Inspected, FIRST_ANSWER_TIMEOUT
            )
            self._reports[name] = HostReport(name, told.facts)

        await self._each([*targets], reach)
        head, *others = self._reached or [""]
        if interface is None:
            await self._each(others, lambda name: ask(name, self._address(head)))

    async def read_clocks(self) -> None:
        """As NTP does: the host's clock is read in the middle of the time from question to answer, give or take half
        of that time."""

        async def read(name: str) -> None:
            best = Clock(0.0, float("inf"))
            for _ in range(TICKS):
                began, counted = time.time(), time.perf_counter()
                there = (await self._channels[name].ask(Tick(), Time)).now
                half = (time.perf_counter() - counted) / 2
                if half < best.uncertainty:
                    best = Clock(there - began - half, half)
            self._reports[name] = replace(self._reports[name], clock=best)

        await self._each(self._reached, read, CLOCKS_AT_ONCE)

    async def compare_directories(self) -> None:
        """Compare the directories of each host with those of the first, which writes a file for the others to find."""
        head, *others = self._reached or [""]
        if not others:
            return
        name = f".unirun-doctor-{secrets.token_hex(8)}"

        async def write(host: str) -> None:
            await note(host, Write(name))

        async def find(host: str) -> None:
            await note(host, Find(name))

        async def note(host: str, request: Write | Find) -> None:
            where = (await self._channels[host].ask(request, Found)).where
            self._reports[host] = replace(self._reports[host], shared=where)

        async def remove(host: str) -> None:
            await self._channels[host].ask(Remove(name), Found)

        await self._each([head], write)
        await self._each(others, find)
        await self._each([head], remove)

    async def measure_links(self, *, bandwidth: bool) -> None:
        """Rounds of pairs, which do not disturb each other."""
        broken: Counter[str] = Counter()
        working: set[str] = set()
        for pairs in pair_rounds(self._reached):
            hopeless = {name for name, count in broken.items() if count >= HOPELESS} - working
            here = [pair for pair in pairs if not hopeless.intersection(pair)]
            links = await asyncio.gather(*(self._link(*pair, bandwidth=bandwidth) for pair in here))
            for there, back in links:
                self._links += [there, back]
                if there.problem:
                    broken.update((there.source, there.target))
                else:
                    working |= {there.source, there.target}

    async def _link(self, one: str, other: str, *, bandwidth: bool) -> tuple[Link, Link]:
        """Both directions between two hosts."""
        nonce = secrets.token_hex(16)
        try:
            port = (await self._channels[other].ask(Listen(nonce), PortOpened)).port
            meet = Meet(self._address(other), port, nonce, bandwidth)
            met = await self._channels[one].ask(meet, Met)
        except RendezvousError as error:
            return Link(one, other, problem=error.problem), Link(other, one, problem=error.problem)
        return Link(one, other, met.rtt, met.sent), Link(other, one, met.rtt, met.received)

    async def all_reduce(self) -> None:
        """With all hosts that have torch and reach each other; with NCCL, too, when each of them has a GPU."""
        apart = {name for finding in broken_links(self.found) for name in finding.hosts}
        reports = [each for each in self.found.reached if each.name not in apart]
        facts = {each.name: each.facts for each in reports if each.facts is not None and each.facts.torch}
        if not facts:
            return
        names = [*facts]
        problems: dict[str, str] = {}
        port = 0

        async def load(name: str) -> None:
            nonlocal port
            first = name == names[0]
            try:
                listening = await self._channels[name].ask(
                    ImportTorch(store=first), PortOpened, COLLECTIVE_TIMEOUT
                )
            except RendezvousError as error:
                problems[name] = error.problem
            else:
                port = listening.port or port

        await self._each(names, load)
        if problems:
            self._all_reduces.append(AllReduce("gloo", tuple(names), problems=problems))
            return
        await self._with("gloo", names, port)
        if all(each.gpus for each in facts.values()):
            await self._with("nccl", names, port)

    async def _with(self, backend: str, names: list[str], port: int) -> None:
        """An all_reduce of `names` with one backend."""
        times: list[float] = []
        problems: dict[str, str] = {}

        async def one(name: str) -> None:
            place = (names.index(name), len(names), self._address(names[0]), port)
            try:
                done = await self._channels[name].ask(
                    AllReduceAs(backend, *place), Reduced, COLLECTIVE_TIMEOUT
                )
            except RendezvousError as error:
                problems[name] = error.problem
            else:
                times.append(done.seconds)

        await self._each(names, one, len(names))
        seconds = 0.0 if problems else max(times)
        self._all_reduces.append(AllReduce(backend, tuple(names), seconds, problems))
