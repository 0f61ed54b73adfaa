"""An examination of hosts as a value, and what is wrong: the odd one out among hosts that should be alike. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_high, median_low
from typing import TypeVar

from unirun.values import Value

# The findings of an examination of hosts, as values.


class Facts(Value):
    """The facts that a host reports of itself.

    `address` is the one by which others reach it, on `interface`. Versions are empty where something is not installed.
    Sizes are in bytes; `open_files` is the soft limit of a process. `lookup` is the time in seconds to look up the name
    of the address.
    """

    hostname: str
    address: str
    interface: str
    python: str
    torch: str
    unirun: str
    kernel: str
    driver: str
    gpus: tuple[str, ...]
    cpus: int
    memory: int
    shm: int
    open_files: int
    lookup: float


class Clock(Value):
    """The seconds by which a host's clock is ahead of the command's; the error is at most `uncertainty`."""

    offset: float
    uncertainty: float


class Link(Value):
    """The way from one host to another: the median time of a round trip in seconds, and the bandwidth of one TCP
    connection in bytes per second. `problem` is set where there is no way."""

    source: str
    target: str
    rtt: float = 0.0
    bandwidth: float = 0.0
    problem: str = ""


class JobPlace(Value, tag=True):
    """Asks to take part in the job of `hosts`, their names, as `rank`. The store is at `address` and `port`. `cwd` is
    the command's working directory; `file` is the name of a file to share. `bandwidth` takes some tenths of a second
    each way for each pair."""

    rank: int
    hosts: tuple[str, ...]
    address: str
    port: int
    cwd: str
    file: str
    backends: tuple[str, ...]
    bandwidth: bool


class JobResult(Value, tag=True):
    """The links that end at this host, the directories that it shares with the first, and by backend the seconds of an
    all_reduce, or the problem. `apart`: why it does not reach the store."""

    links: tuple[Link, ...] = ()
    shared: tuple[str, ...] = ()
    seconds: Mapping[str, float] = {}
    problems: Mapping[str, str] = {}
    apart: str = ""


class AllReduce(Value):
    """An all_reduce over `hosts` by one backend: the median time of one in seconds, or the problems by host."""

    backend: str
    hosts: tuple[str, ...]
    seconds: float = 0.0
    problems: Mapping[str, str] = {}


class HostReport(Value):
    """One host. Without `facts` it could not be reached: `problem` and `remedy` say why.

    `shared` names the directories, ``cwd`` and ``home``, that are the same as those of the first host.
    """

    name: str
    facts: Facts | None = None
    clock: Clock | None = None
    shared: tuple[str, ...] = ()
    problem: str = ""
    remedy: str = ""


class Examination(Value):
    """All hosts, in the order in which the user names them, what is between them, and what they did together."""

    hosts: tuple[HostReport, ...]
    links: tuple[Link, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()

    @property
    def reached(self) -> tuple[HostReport, ...]:
        """The hosts that could be reached."""
        return tuple(host for host in self.hosts if host.facts is not None)


class HostFault(Value):
    """A fault of `hosts`, and the remedy. `stops`: a job should leave them out."""

    hosts: tuple[str, ...]
    problem: str
    remedy: str = ""
    stops: bool = False

    def __str__(self) -> str:
        text = f"{', '.join(self.hosts)}: {self.problem}"
        return f"{text}; {self.remedy}" if self.remedy else text


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


# What is wrong.

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
