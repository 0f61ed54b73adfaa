"""The requests of the command to a probe, and its answers: JSON objects, one on each line."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import DecodeError, json

from unirun.errors import FrameError
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


class Inspect(Value, tag=True):
    """Tell the facts. `cwd` is the command's working directory, which may be there as well.

    The host's address is that of `interface`; without one, that from which it reaches `head`, the address of the first
    host; the first host itself has no `head` and takes that of its default route.
    """

    cwd: str
    interface: str | None
    head: str | None


class Tick(Value, tag=True):
    """Tell the time."""


class Write(Value, tag=True):
    """Write a file `name` into the working directory and into the home directory."""

    name: str


class Find(Value, tag=True):
    """Tell in which of the two a file `name` is."""

    name: str


class Remove(Value, tag=True):
    """Remove the files `name`."""

    name: str


class Listen(Value, tag=True):
    """Listen on a free port of the host's address, for a peer that proves `nonce`."""

    nonce: str


class Meet(Value, tag=True):
    """Connect to the peer that listens, and measure; `bandwidth` takes some tenths of a second each way."""

    address: str
    port: int
    nonce: str
    bandwidth: bool


class ImportTorch(Value, tag=True):
    """Import torch, which may take long, and with `store` open the store for an all_reduce."""

    store: bool


class AllReduceAs(Value, tag=True):
    """Take part in an all_reduce as `rank` of `world`, with the store at `address` and `port`."""

    backend: str
    rank: int
    world: int
    address: str
    port: int


class Inspected(Value, tag=True):
    """The facts of a host."""

    facts: Facts


class Time(Value, tag=True):
    """The host's time in seconds since 1970."""

    now: float


class Found(Value, tag=True):
    """The directories, ``cwd`` and ``home``, in which something is, or was written."""

    where: tuple[str, ...]


class PortOpened(Value, tag=True):
    """The port of a new listening socket; 0 when none was wanted."""

    port: int


class Met(Value, tag=True):
    """The median time of a round trip in seconds; bytes per second that were sent and received, or 0."""

    rtt: float
    sent: float
    received: float


class Reduced(Value, tag=True):
    """The median time of an all_reduce in seconds."""

    seconds: float


class RequestFault(Value, tag=True):
    """The error of a request that is not possible there, and the remedy."""

    problem: str
    remedy: str = ""


Request = Inspect | Tick | Write | Find | Remove | Listen | Meet | ImportTorch | AllReduceAs
Answer = Inspected | Time | Found | PortOpened | Met | Reduced | RequestFault

_REQUESTS: json.Decoder[Request] = json.Decoder(Request)
_ANSWERS: json.Decoder[Answer] = json.Decoder(Answer)


def to_line(message: Request | Answer) -> bytes:
    """A line with `message`."""
    return json.encode(message) + b"\n"


def to_request(line: bytes) -> Request:
    """The request in a line. Raises `FrameError`."""
    try:
        return _REQUESTS.decode(line)
    except DecodeError as error:
        raise FrameError(f"this is no request: {error}") from error


def to_answer(line: bytes) -> Answer:
    """The answer in a line. Raises `FrameError`."""
    try:
        return _ANSWERS.decode(line)
    except DecodeError as error:
        raise FrameError(f"this is no answer: {error}") from error
