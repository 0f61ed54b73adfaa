"""Lists of hosts as users and Slurm write them: ``--hosts``, hostfiles, ``n[01-16]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv6Address
from itertools import product
from pathlib import Path

from unirun.errors import UsageError
from unirun.values import Value

MOST_HOSTS = 65_536
"""Names that one list may have, as in Slurm."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PART = re.compile(r"[^\[\],]+|\[[^\[\]]*\]")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})", re.DOTALL)
_HOST = re.compile(
    r"(?:(?P<user>[^@]*)@)?(?:\[(?P<v6>[^\[\]]*:[^\[\]]*)\]|(?P<names>[^:]*))(?::(?P<slots>[^:]*))?"
)
_EXAMPLE = "write h1,h2:4,user@h3,n[01-16]; an IPv6 address stands in brackets: [fd00::1]:4"


class Host(Value):
    """One host of a job.

    `name` is its name as the user wrote it, and the name of its node. `target` is what ssh gets, ``user@h3``. `slots`
    is how many processes it is to run; None when the user does not say.
    """

    name: str
    target: str
    slots: int | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of ``h1,h2:4,user@h3,n[01-16]``, the form of ``--hosts``. Raises `UsageError`."""
    where = "--hosts"
    return _unique((host for item in _items(text, where) for host in _hosts(item, where)), where)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with one on each line: ``h1``, ``h1:4`` or ``h1 slots=4 max_slots=8``, and ``#`` comments.

    These are the forms of Open MPI, MPICH and DeepSpeed. ``max_slots`` has no effect, as unirun never oversubscribes.
    Raises `UsageError`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--hostfile {path} is no text", "write one host on each line") from error
    found = [host for number, line in enumerate(lines, 1) for host in _line(line, f"{path}:{number}")]
    return _unique(found, f"--hostfile {path}")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """The names in a list as Slurm writes it: ``n[1-3,07-09],r[1-2]n[1-4],gpu5``. Raises `UsageError`.

    A number has the zeros of the first one of its range. Of several brackets the last one counts fastest.
    """
    where = "node list"
    return tuple(name for item in _items(text, where) for name in _expand(item, where))


def compress(names: Sequence[str]) -> str:
    """`names` as a list for `expand_nodelist`, which gives them back in the same order."""
    parts: list[str] = []
    prefix, ranges = "", list[tuple[str, str]]()

    def close() -> None:
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            parts.append(f"{prefix}{ranges[0][0]}")
        elif ranges:
            shown = ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)
            parts.append(f"{prefix}[{shown}]")
        ranges.clear()

    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None or match[1] != prefix:
            close()
        if match is None:
            prefix = ""
            parts.append(name)
            continue
        prefix, number = match[1], match[2]
        if ranges and number == _next(*ranges[-1]):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    close()
    return ",".join(parts)


def _next(first: str, last: str) -> str:
    """The number after `last` in a range that begins with `first`."""
    return str(int(last) + 1).zfill(len(first))


def _items(text: str, where: str) -> list[str]:
    """The items between the commas that are outside of brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise UsageError(f"{where}: brackets do not match in {text!r:.80}", _EXAMPLE)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise UsageError(f"{where}: a bracket is not closed in {text!r:.80}", _EXAMPLE)
    found = [item.strip() for item in items]
    if not any(found):
        raise UsageError(f"{where} names no host", _EXAMPLE)
    return [item for item in found if item]


def _hosts(item: str, where: str) -> Iterator[Host]:
    """The hosts of one item: ``user@n[1-3]:4``."""
    match = _HOST.fullmatch(item)
    user, slots = (match["user"], match["slots"]) if match else (None, None)
    if match is None or (user is not None and not _USER.fullmatch(user)):
        raise UsageError(f"{where}: {item!r:.80} is no host", _EXAMPLE)
    if slots is not None and not _COUNT.fullmatch(slots):
        problem = f"{where}: the number of slots in {item!r:.80} is {slots!r:.40}"
        raise UsageError(problem, "use 1 or more; the port of ssh is set in ~/.ssh/config")
    if match["v6"] is not None:
        names: Iterable[str] = (_ipv6(match["v6"], where),)
    else:
        names = _expand(match["names"], where)
    for name in names:
        yield Host(name, name if user is None else f"{user}@{name}", None if slots is None else int(slots))


def _ipv6(text: str, where: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError as error:
        raise UsageError(f"{where}: {text!r:.80} is no IPv6 address", _EXAMPLE) from error


def _line(line: str, where: str) -> Iterator[Host]:
    """The hosts of one line of a hostfile; none of an empty one."""
    words = line.partition("#")[0].split()
    if not words:
        return
    settings: dict[str, int] = {}
    for word in words[1:]:
        key, _, value = word.replace("max-slots", "max_slots").partition("=")
        if key not in ("slots", "max_slots") or not _COUNT.fullmatch(value):
            raise UsageError(f"{where}: {word!r:.80} is not known", "write: h1 slots=4, or h1:4, or h1")
        settings[key] = int(value)
    hosts = [host for item in _items(words[0], where) for host in _hosts(item, where)]
    for host in hosts:
        if host.slots is not None and settings.get("slots", host.slots) != host.slots:
            problem = f"{where}: {host.name} has {host.slots} slots and slots={settings['slots']}"
            raise UsageError(problem, "write one of them")
        yield Host(host.name, host.target, host.slots or settings.get("slots"))


def _unique(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    """`hosts` as a tuple. Raises `UsageError` for two of one name, for too many, and for none."""
    found: dict[str, Host] = {}
    for host in hosts:
        if host.name in found:
            problem = f"{where}: {host.name} is there twice"
            raise UsageError(problem, f"write it once, with all its slots: {host.name}:N")
        found[host.name] = host
    if not found:
        raise UsageError(f"{where} names no host", _EXAMPLE)
    return tuple(found.values())


def _expand(item: str, where: str) -> Iterator[str]:
    """The names that one item stands for: ``r[1-2]n[01-04]``."""
    parts = _PART.findall(item)
    if "".join(parts) != item:
        raise UsageError(f"{where}: {item!r:.80} is no host", _EXAMPLE)
    choices = [_numbers(part[1:-1], where) if part.startswith("[") else [part] for part in parts]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_HOSTS:
        raise UsageError(f"{where}: {item!r:.80} stands for {count} hosts", f"use {MOST_HOSTS} at most")
    for pieces in product(*choices):
        name = "".join(pieces)
        if not _NAME.fullmatch(name):
            raise UsageError(f"{where}: {name!r:.80} is no name of a host", _EXAMPLE)
        yield name


def _numbers(text: str, where: str) -> list[str]:
    """The numbers of ``1-3,07-09``."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise UsageError(f"{where}: {part!r:.80} is no range of numbers", "write [1-3,07-09]")
        if int(last) - int(first) + len(found) >= MOST_HOSTS:
            raise UsageError(f"{where}: [{text:.80}] has too many numbers", f"use {MOST_HOSTS} at most")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
