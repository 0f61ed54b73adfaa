"""The examination: what is asked of which host, and in what order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from statistics import median, median_high, median_low
from typing import TypeVar

from msgspec.structs import replace

from unirun.errors import FrameError, RendezvousError
from unirun.launcher.doctor.requests import (
    AllReduce,
    AllReduceAs,
    Answer,
    Clock,
    Examination,
    Facts,
    Find,
    Found,
    HostFault,
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

# From an examination to what is wrong: the odd one out among hosts that should be alike. Pure functions.

MAX_CLOCK_SKEW_SECONDS = 0.25
"""Seconds by which a clock may differ from the median of all. Certificates and leases need less, logs look odd."""

SHM = 512 << 20
"""The least size of /dev/shm. A container has 64 MB unless it is told otherwise."""

OPEN_FILES = 1024
"""The least soft limit of descriptors."""

MAX_LOOKUP_SECONDS = 0.5
"""The most seconds for the name of an address."""

FACTOR = 2.0
"""By which a host is slower than the median of all when it is the odd one."""

SPREADS = 3.0
"""Standard deviations, estimated as 1.4826 × the median absolute deviation, that it is off at the least."""

FAR = 0.6
"""Parts of the median that are enough in any case: the deviations of three hosts say little."""

MIN_RTT_EXCESS_SECONDS = 200e-6
"""Seconds by which the round trips of a host are longer at the least; less is the scheduler's doing."""

_GPUS = "GPUs"
"""May differ on purpose: some nodes of a job have none."""

_SAME: Mapping[str, tuple[Callable[[Facts], str], str]] = {
    "Python": (lambda facts: facts.python, "use the same Python on all hosts"),
    "torch": (lambda facts: facts.torch or "none", "install the same torch on all hosts"),
    "unirun": (lambda facts: facts.unirun, "install the same unirun on all hosts"),
    "GPU driver": (lambda facts: facts.driver or "none", "install the same driver on all hosts"),
    _GPUS: (lambda facts: _counted(facts.gpus), "see nvidia-smi there; a GPU may have failed"),
}
"""The facts in which all hosts should agree, and the remedy."""


def findings(found: Examination) -> tuple[HostFault, ...]:
    """All that is wrong, the hosts that cannot be reached first."""
    reached = found.reached
    return (
        *(HostFault((h.name,), h.problem, h.remedy, stops=True) for h in found.hosts if h.facts is None),
        *_versions(reached),
        *_clocks(reached),
        *_limits(reached),
        *_shared(reached),
        *broken_links(found),
        *_speeds(found.links),
        *(finding for each in found.all_reduces for finding in _all_reduce(each)),
    )


def bad_hosts(found: Examination) -> dict[str, str]:
    """The hosts that a job should leave out, with the reasons. Where no majority is right, none is left out."""
    unreached = {host.name for host in found.hosts if host.facts is None}
    bad: dict[str, list[str]] = defaultdict(list)
    for finding in findings(found):
        few = 2 * len(finding.hosts) < len(found.hosts) or unreached.issuperset(finding.hosts)
        for host in finding.hosts if finding.stops and few else ():
            bad[host].append(finding.problem)
    return {host: "; ".join(reasons) for host, reasons in bad.items()}


def _versions(hosts: Sequence[HostReport]) -> Iterable[HostFault]:
    for what, (version, remedy) in _SAME.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for host in hosts:
            if host.facts is not None:
                groups[version(host.facts)].append(host.name)
        yield from _odd_groups(what, groups, remedy, stops=what != _GPUS)


def _odd_groups(
    what: str, groups: Mapping[str, list[str]], remedy: str, *, stops: bool
) -> Iterable[HostFault]:
    """A finding for each group that differs from the majority; one with all hosts where there is no majority."""
    if len(groups) < 2:
        return
    names = [name for group in groups.values() for name in group]
    usual, count = Counter({value: len(group) for value, group in groups.items()}).most_common(1)[0]
    if 2 * count > len(names):
        for value, group in groups.items():
            if value != usual:
                yield HostFault(tuple(group), f"{what} {value}, the others have {usual}", remedy, stops)
        return
    told = ", ".join(f"{value} on {' '.join(group)}" for value, group in groups.items())
    yield HostFault(tuple(names), f"{what} differs: {told}", remedy, stops)


def _clocks(hosts: Sequence[HostReport]) -> Iterable[HostFault]:
    clocks = {host.name: host.clock for host in hosts if host.clock is not None}
    if len(clocks) < 2:
        return
    middle = median(clock.offset for clock in clocks.values())
    for name, clock in clocks.items():
        off = clock.offset - middle
        if abs(off) - clock.uncertainty > MAX_CLOCK_SKEW_SECONDS:
            way = "ahead of" if off > 0 else "behind"
            problem = f"the clock is {abs(off):.3g} s {way} the others' (± {clock.uncertainty:.1g} s)"
            yield HostFault((name,), problem, "synchronise it: chronyc tracking, timedatectl", stops=True)


def _limits(hosts: Sequence[HostReport]) -> Iterable[HostFault]:
    for host in hosts:
        facts = host.facts
        if facts is None:
            continue
        if facts.shm < SHM:
            remedy = (
                "mount it larger: mount -o remount,size=50% /dev/shm, docker run --shm-size or --ipc=host"
            )
            yield HostFault((host.name,), f"/dev/shm has {facts.shm / 1e6:.0f} MB", remedy)
        if facts.open_files < OPEN_FILES:
            problem = f"a process may open {facts.open_files} files"
            yield HostFault((host.name,), problem, "raise the limit: ulimit -n, LimitNOFILE")
        if facts.lookup > MAX_LOOKUP_SECONDS:
            problem = f"the name of {facts.address} takes {facts.lookup:.1f} s to look up, as torch does"
            yield HostFault((host.name,), problem, "mend the resolver, or add the hosts to /etc/hosts")


def _shared(hosts: Sequence[HostReport]) -> Iterable[HostFault]:
    """A directory that is shared by several hosts, and not by all: a file system that is not mounted."""
    for directory, name in (("cwd", "the working directory"), ("home", "$HOME")):
        without = [host.name for host in hosts if directory not in host.shared]
        if without and len(hosts) - len(without) > 1:
            problem = f"{name} is not the one that the others share"
            yield HostFault(tuple(without), problem, "mount it there; mount and df tell what is")


def broken_links(found: Examination) -> Iterable[HostFault]:
    """The hosts that explain the pairs without a way, as few as possible: always the one with most of them; of two that
    do not reach each other, the later one."""
    order = _names(found.hosts)
    broken = [link for link in found.links if link.problem]
    while broken:
        counts = Counter(name for link in broken for name in {link.source, link.target})
        worst = max(counts, key=lambda name: (counts[name], order.index(name)))
        mine = [link for link in broken if worst in (link.source, link.target)]
        others = sorted(
            {link.source if link.target == worst else link.target for link in mine}, key=order.index
        )
        problem = f"no connection between {worst} and {_few(others)}: {mine[0].problem}"
        yield HostFault(
            (worst,), problem, "does a firewall stop it? --interface names another network", stops=True
        )
        broken = [link for link in broken if link not in mine]


def _speeds(links: Sequence[Link]) -> Iterable[HostFault]:
    """Hosts whose links are slow. Of two links, as with three hosts, the better one counts: the other may be the fault
    of its other end."""
    working = [link for link in links if not link.problem]
    sends: dict[str, list[float]] = defaultdict(list)
    receives: dict[str, list[float]] = defaultdict(list)
    rtts: dict[str, list[float]] = defaultdict(list)
    for link in working:
        rtts[link.source].append(link.rtt)
        if link.bandwidth:
            sends[link.source].append(link.bandwidth)
            receives[link.target].append(link.bandwidth)
    remedy = "look at its network card, cable and switch: ethtool, ip -s link"
    for verb, rows in (("sends", sends), ("receives", receives)):
        speeds = {name: median_high(row) for name, row in rows.items()}
        for name, speed, usual in _outliers(speeds):
            if speed * FACTOR < usual:
                problem = f"{verb} {_mb(speed)} MB/s, the others {_mb(usual)} MB/s"
                yield HostFault((name,), problem, remedy)
    for name, rtt, usual in _outliers({name: median_low(row) for name, row in rtts.items()}):
        if rtt > usual * FACTOR and rtt - usual > MIN_RTT_EXCESS_SECONDS:
            problem = f"a round trip takes {1e6 * rtt:.0f} µs, with the others {1e6 * usual:.0f} µs"
            yield HostFault((name,), problem, remedy)


def _outliers(values: Mapping[str, float]) -> Iterable[tuple[str, float, float]]:
    """Name and value of what is far from the median, which comes third; nothing of fewer than three."""
    if len(values) < 3:
        return
    usual = median(values.values())
    spread = SPREADS * 1.4826 * median(abs(value - usual) for value in values.values())
    for name, value in values.items():
        if abs(value - usual) > min(spread, FAR * usual):
            yield name, value, usual


def _all_reduce(each: AllReduce) -> Iterable[HostFault]:
    """One finding for each problem; hosts that only waited for others are left out when another one failed."""
    waited = {name for name, problem in each.problems.items() if "imed out" in problem or "imeout" in problem}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, problem in each.problems.items():
        if name not in waited or len(waited) == len(each.problems):
            groups[problem].append(name)
    for problem, names in groups.items():
        yield HostFault(tuple(names), f"{each.backend} all_reduce failed: {problem}", stops=True)


def _names(hosts: Iterable[HostReport]) -> list[str]:
    return [host.name for host in hosts]


def _counted(words: Sequence[str]) -> str:
    """``8 × NVIDIA H100``."""
    return ", ".join(f"{count} × {word}" for word, count in Counter(words).items()) or "none"


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _mb(speed: float) -> str:
    return f"{speed / 1e6:.3g}"


# An examination as text: a line for each host, matrices of what is between them, and what is wrong.

WIDEST = 16
"""Of more hosts there are no matrices, but medians in the lines of the hosts."""

_HEADERS = (
    "HOST",
    "ADDRESS",
    "PYTHON",
    "TORCH",
    "KERNEL",
    "DRIVER",
    "GPUS",
    "CPUS",
    "MEMORY",
    "SHM",
    "CLOCK",
)


def lines(found: Examination, wrong: Sequence[HostFault]) -> list[str]:
    """The whole report."""
    blocks = [_table([_headers(found), *(_row(host, found) for host in found.hosts)])]
    if len(found.hosts) <= WIDEST and found.links:
        blocks.append(
            _matrix("MB/S", found, lambda link: f"{link.bandwidth / 1e6:.0f}" if link.bandwidth else "")
        )
        blocks.append(_matrix("RTT µS", found, lambda link: f"{link.rtt * 1e6:.0f}"))
    blocks.append([*_together(found)])
    blocks.append([f"! {finding}" for finding in wrong] or ["nothing is wrong"])
    return [line for block in blocks if block for line in ("", *block)][1:]


def _headers(found: Examination) -> tuple[str, ...]:
    return (*_HEADERS, "MB/S", "RTT") if len(found.hosts) > WIDEST else _HEADERS


def _row(host: HostReport, found: Examination) -> list[str]:
    facts, clock = host.facts, host.clock
    if facts is None:
        return [host.name, "not reached"]
    row = [host.name, facts.address, facts.python, facts.torch, facts.kernel, facts.driver]
    row += [str(len(facts.gpus)), str(facts.cpus), _gigabytes(facts.memory), _gigabytes(facts.shm)]
    row += [f"{clock.offset:+.3f} s ±{clock.uncertainty:.1g}" if clock is not None else ""]
    if len(found.hosts) > WIDEST:
        mine = [link for link in found.links if link.source == host.name and not link.problem]
        row += [f"{median(link.bandwidth for link in mine) / 1e6:.0f}" if mine else ""]
        row += [f"{median(link.rtt for link in mine) * 1e6:.0f} µs" if mine else ""]
    return row


def _matrix(title: str, found: Examination, cell: Callable[[Link], str]) -> list[str]:
    """A cell for each way from the host of the row to that of the column; nothing when all cells are empty."""
    names = [host.name for host in found.reached]
    links = {(link.source, link.target): link for link in found.links}
    rows = [[title, *names]]
    for source in names:
        row = [links.get((source, target)) for target in names]
        rows.append(
            [source, *("·" if link is None else "no way" if link.problem else cell(link) for link in row)]
        )
    return _table(rows) if any("".join(row[1:]).strip("·") for row in rows[1:]) else []


def _together(found: Examination) -> Iterable[str]:
    """The directories that the hosts share, and the results of the checks that they ran together."""
    if len(found.reached) > 1:
        for directory, name in (("cwd", "working directory"), ("home", "$HOME")):
            sharing = [host.name for host in found.reached if directory in host.shared]
            every = len(sharing) == len(found.reached)
            several = f"{', '.join(sharing)} share it" if len(sharing) > 1 else "not shared"
            yield f"{name}: {'shared by all hosts' if every else several}"
    for each in found.all_reduces:
        how = "failed" if each.problems else f"{each.seconds * 1e3:.1f} ms for 1 MB"
        yield f"{each.backend} all_reduce over {_hosts_counted(each.hosts)}: {how}"


def _hosts_counted(hosts: Sequence[str]) -> str:
    return "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns that are as wide as their widest cell."""
    columns = max(len(row) for row in rows)
    whole = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[at]) for row in whole) for at in range(columns)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in whole
    ]


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
