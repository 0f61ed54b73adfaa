"""An examination as text: a line for each host, matrices of what is between them, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from unirun.launcher.doctor.values import Examination, Finding, HostReport, Link

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


def lines(found: Examination, wrong: Sequence[Finding]) -> list[str]:
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
        yield f"{each.backend} all_reduce over {_counted(each.hosts)}: {how}"


def _counted(hosts: Sequence[str]) -> str:
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
