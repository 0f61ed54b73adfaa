"""The findings of an examination of hosts, as values."""

from __future__ import annotations

from collections.abc import Mapping

from unirun.values import Value


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


class Finding(Value):
    """A fault of `hosts`, and the remedy. `stops`: a job should leave them out."""

    hosts: tuple[str, ...]
    problem: str
    remedy: str = ""
    stops: bool = False

    def __str__(self) -> str:
        text = f"{', '.join(self.hosts)}: {self.problem}"
        return f"{text}; {self.remedy}" if self.remedy else text
