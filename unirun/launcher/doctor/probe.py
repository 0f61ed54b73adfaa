"""``python -m unirun.launcher.doctor.probe``: the process on each host that answers the doctor until its stdin ends."""

from __future__ import annotations

import hmac
import os
import platform
import resource
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from unirun.collocation.devices import nvml_devices
from unirun.collocation.limits import memory_field
from unirun.errors import AuthError, RendezvousError, UnirunError
from unirun.failover.offers import versions
from unirun.launcher.doctor.requests import (
    AllReduceAs,
    Answer,
    Facts,
    Find,
    Found,
    ImportTorch,
    Inspect,
    Inspected,
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
    to_line,
    to_request,
)
from unirun.launcher.interfaces import choose, interface_of, reachable_address, route_to

# The facts that a host reports of itself, without torch and without a CUDA context.


def read_facts(interface: str | None, head: str | None) -> Facts:
    """The facts of this host. Raises `RendezvousError` when it has no such address."""
    address = own_address(interface, head)
    return Facts(
        hostname=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        **versions(),
        kernel=platform.release(),
        driver=_driver(),
        gpus=tuple(device.name for device in nvml_devices()),
        cpus=len(os.sched_getaffinity(0)),
        memory=memory_field(Path("/proc/meminfo"), "MemTotal"),
        shm=shutil.disk_usage("/dev/shm").total,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        lookup=_lookup(address),
    )


def own_address(interface: str | None, head: str | None) -> str:
    """The address of this host by which others reach it; see `unirun.launcher.doctor.requests.Inspect`. Raises
    `RendezvousError`."""
    if interface is not None:
        return choose(interface)
    return reachable_address() if head is None else route_to(head)


def _lookup(address: str) -> float:
    """The time that a look-up of the name of `address` takes, also when it has none."""
    began = time.perf_counter()
    with suppress(OSError):
        socket.gethostbyaddr(address)
    return time.perf_counter() - began


def _driver() -> str:
    """The version of the NVIDIA driver; empty without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        found = pynvml.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)
    finally:
        pynvml.nvmlShutdown()


# One pair of hosts: the time of a round trip, and the bandwidth of one TCP connection each way.

PROBE_STEP_TIMEOUT = 10.0
"""Seconds for each step."""

PROBE_CONNECT_TIMEOUT = 3.0
"""Seconds to connect: two lost packets."""

BANDWIDTH_SECONDS = 0.3
"""Seconds of sending for the bandwidth."""

_ROUND_TRIPS, _ROUND_TRIPS_FOR = 100, 0.2
_CHUNK = bytes(1 << 18)
_ECHO, _SINK, _SOURCE, _END = b"e", b"s", b"f", b"x"


def listen(address: str, nonce: bytes) -> int:
    """Serve one peer that proves `nonce`, in a thread. Returns the port. Raises `RendezvousError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise RendezvousError(f"{address} cannot be listened on: {error.strerror}".lower()) from error
    server.settimeout(PROBE_STEP_TIMEOUT)
    threading.Thread(target=_serve, args=(server, nonce), daemon=True).start()
    return int(server.getsockname()[1])


def _serve(server: socket.socket, nonce: bytes) -> None:
    """Serve connections until one says that it is the last. Errors are the peer's to tell."""
    deadline = time.monotonic() + PROBE_STEP_TIMEOUT
    with server:
        while time.monotonic() < deadline:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                try:
                    if _serve_one(connection, nonce):
                        return
                except (OSError, AuthError, RendezvousError):
                    continue


def _serve_one(connection: socket.socket, nonce: bytes) -> bool:
    """Serve one connection; whether it is the last."""
    connection.settimeout(PROBE_STEP_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_exactly(connection, len(nonce)), nonce):
        raise AuthError("a peer without the nonce")
    kind = _exactly(connection, 1)
    if kind == _ECHO:
        while data := connection.recv(1):
            connection.sendall(data)
    elif kind == _SINK:
        count, seconds = _drain(connection)
        connection.sendall(f"{count} {seconds}".encode())
    elif kind == _SOURCE:
        _fill(connection)
    return kind == _END


def measure(address: str, port: int, nonce: bytes, *, bandwidth: bool) -> tuple[float, float, float]:
    """Seconds of a round trip, and bytes per second sent and received, which are 0 without `bandwidth`. Raises OSError,
    `RendezvousError`."""
    with _open(address, port, nonce, _ECHO) as connection:
        rtt = _round_trip(connection)
    sent = received = 0.0
    if bandwidth:
        with _open(address, port, nonce, _SINK) as connection:
            _fill(connection)
            count, _, seconds = _all(connection).partition(b" ")
            sent = int(count) / float(seconds)
        with _open(address, port, nonce, _SOURCE) as connection:
            taken, took = _drain(connection)
            received = taken / took
    _open(address, port, nonce, _END).close()
    return rtt, sent, received


def _open(address: str, port: int, nonce: bytes, kind: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), PROBE_CONNECT_TIMEOUT)
    connection.settimeout(PROBE_STEP_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(nonce + kind)
    return connection


def _round_trip(connection: socket.socket) -> float:
    """The median time, after the first ones, which wait for the other's thread to start."""
    times: list[float] = []
    until = time.perf_counter() + _ROUND_TRIPS_FOR
    while len(times) < _ROUND_TRIPS and (len(times) < 5 or time.perf_counter() < until):
        began = time.perf_counter()
        connection.sendall(b".")
        _exactly(connection, 1)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _fill(connection: socket.socket) -> None:
    """Send for `BANDWIDTH_SECONDS` seconds, and say that this was all."""
    until = time.monotonic() + BANDWIDTH_SECONDS
    while time.monotonic() < until:
        connection.sendall(_CHUNK)
    connection.shutdown(socket.SHUT_WR)


def _drain(connection: socket.socket) -> tuple[int, float]:
    """Bytes until the peer has sent all, and the seconds that they took."""
    buffer = bytearray(1 << 20)
    count, began = 0, time.perf_counter()
    while got := connection.recv_into(buffer):
        count += got
    return count, time.perf_counter() - began


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise RendezvousError("the peer closed the connection")
        data += more
    return data


def _all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(64), b""))


class ProbeServer:
    """Answers requests, one after the other."""

    def __init__(self) -> None:
        self._address = ""
        self._places: dict[str, Path] = {}
        self._store: Any = None

    def answer(self, request: Request) -> Answer:
        """Do what is asked. Raises what goes wrong."""
        match request:
            case Inspect():
                return self._look(request)
            case Tick():
                return Time(time.time())
            case Write(name):
                return Found(tuple(where for where, path in self._places.items() if _written(path / name)))
            case Find(name):
                return Found(tuple(where for where, path in self._places.items() if (path / name).exists()))
            case Remove(name):
                for path in self._places.values():
                    (path / name).unlink(missing_ok=True)
                return Found(())
            case Listen(nonce):
                return PortOpened(listen(self._address, nonce.encode()))
            case Meet(address, port, nonce, bandwidth):
                return Met(*measure(address, port, nonce.encode(), bandwidth=bandwidth))
            case ImportTorch(store):
                from unirun.launcher.doctor.collective import open_store

                self._store, port = open_store(self._address) if store else (None, 0)
                return PortOpened(port)
            case AllReduceAs(backend, rank, world, address, port):
                from unirun.launcher.doctor.collective import all_reduce

                interface = interface_of(self._address)
                return Reduced(all_reduce(backend, rank, world, address, port, interface))

    def _look(self, request: Inspect) -> Inspected:
        facts = read_facts(request.interface, request.head)
        self._address = facts.address
        places = {"cwd": Path(request.cwd), "home": Path(os.path.expanduser("~"))}
        self._places = {where: path for where, path in places.items() if path.is_dir()}
        return Inspected(facts)


def _written(path: Path) -> bool:
    """Return True if the file could be written: a home directory may be read-only."""
    try:
        path.touch(mode=0o600)
    except OSError:
        return False
    return True


def main() -> None:
    """Answer until stdin ends. Whatever else is written to stdout goes to stderr."""
    # torch looks up the name of each address. The resolver's own limits would make that ten seconds where it is away.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    probe = ProbeServer()
    for line in sys.stdin.buffer:
        try:
            answer = probe.answer(to_request(line))
        except UnirunError as error:
            answer = RequestFault(error.problem, error.remedy)
        except (OSError, RuntimeError, ImportError, ValueError) as error:
            answer = RequestFault(str(error) or type(error).__name__)
        answers.write(to_line(answer))
        answers.flush()


if __name__ == "__main__":
    main()
