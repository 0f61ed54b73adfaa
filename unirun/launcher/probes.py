"""Ask programs whether they are ready, and whether they still answer.

An answer over HTTP or TCP counts only if the worker, or a process that it has started, listens there: on its port
another program may answer. The kernel says who listens (`sockdiag`), so a program is asked only once it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from unirun.launcher.events import Worker
from unirun.launcher.process import kill_group
from unirun.spec.job import Probe
from unirun.values import split_endpoint
from unirun.wire.reports import Spawn

# The sockets that listen on a port, as the kernel tells them over netlink (sock_diag(7)).
#
# ``/proc/net/tcp`` has all connections, also those that ended in the last minute; a busy host has tens of thousands.
# The kernel is asked for those that listen only.

_SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_LISTEN = 10
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48s")
_ANSWER = struct.Struct("=BBxx2s46x4x4x4x4xI")
"""Of ``inet_diag_msg``: family, state, the port (big-endian) and the inode."""

ROOM = 1 << 16
"""Bytes that are read at a time."""


def listeners_on(port: int) -> set[str]:
    """The inodes of the sockets of this network namespace that listen on `port`, at whatever address."""
    try:
        return {
            inode
            for family in (socket.AF_INET, socket.AF_INET6)
            for at, inode in _asked(family)
            if at == port
        }
    except OSError:
        # In some sandboxes there is no netlink.
        return _read(port)


def _asked(family: int) -> Iterator[tuple[int, str]]:
    """Port and inode of each listening socket. Raises OSError."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _LISTEN, bytes(48))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:
        link.settimeout(1.0)
        head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
        link.send(head + body)
        while True:
            data = link.recv(ROOM)
            at = 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not answer sock_diag")
                _, state, port, inode = _ANSWER.unpack_from(data, at + _HEADER.size)
                if state == _LISTEN:
                    yield int.from_bytes(port, "big"), str(inode)
                at += (length + 3) & ~3


def _read(port: int) -> set[str]:
    """The same from ``/proc``."""
    wanted, found = f":{port:04X}", set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", name).read_text().splitlines():
                if wanted in line:
                    fields = line.split()
                    if fields[1].endswith(wanted) and int(fields[3], 16) == _LISTEN:
                        found.add(fields[9])
    return found


PROBE_INTERVAL, COMMAND_PROBE_INTERVAL = 0.03, 0.5
"""Seconds between two questions to a program that is not ready, and between two commands."""

LONGEST_ANSWER = 1 << 16
"""Bytes of an answer that are read."""

HTTP_BODY_TIMEOUT = 0.2
"""Seconds for the rest of an answer after its status."""


class Probing:
    """The probes of one agent's workers: a task for each. `tell` is called with the id of a worker, whether it has
    answered, and if not, why."""

    def __init__(
        self, tell: Callable[[int, bool, str], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._tell, self._failed = tell, failed
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def watch(self, worker: Worker) -> None:
        """Ask `worker`, which has a process, from now on."""
        task = asyncio.ensure_future(self._ask(worker))
        self._tasks[worker.id] = task
        task.add_done_callback(self._ended)

    def forget(self, number: int) -> None:
        """Ask the worker of this id no more."""
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Ask nobody any more."""
        for number in list(self._tasks):
            self.forget(number)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    async def _ask(self, worker: Worker) -> None:
        assert worker.ready is not None
        question = Question(worker, worker.ready)
        while why := await question.ask():
            self._tell(worker.id, False, why)
            await asyncio.sleep(COMMAND_PROBE_INTERVAL if worker.ready.kind == "command" else PROBE_INTERVAL)
        self._tell(worker.id, True, "")
        if worker.alive is None:
            return
        question = Question(worker, worker.alive)
        while True:
            await asyncio.sleep(worker.alive.every)
            why = await question.ask()
            self._tell(worker.id, not why, why)


class Question:
    """One probe of one worker."""

    def __init__(self, worker: Worker, probe: Probe) -> None:
        assert worker.pid is not None
        self._pid, self._request, self._probe = worker.pid, worker.request, probe
        self._output = Output(worker.request) if probe.kind == "log" else None
        self._owned: set[str] = set()

    async def ask(self) -> str:
        """Ask once. Returns the reason why the answer is no; empty for yes."""
        try:
            async with asyncio.timeout(self._probe.timeout):
                return await self._asked()
        except TimeoutError:
            return f"{self._probe} was not answered within {self._probe.timeout:g} s"
        except ValueError as error:
            # Of an address that is none with the host of this rank, as http://{host}:{port} with IPv6.
            return f"{self._probe} cannot be asked: {error}"

    async def _asked(self) -> str:
        words = self._probe.words
        match self._probe.kind:
            case "http":
                return await self._http(words[0])
            case "tcp":
                host, port = split_endpoint(words[0])
                return self._not_listening(port) or await _connect(host, port)
            case "log":
                assert self._output is not None
                return "" if self._output.has(words[0]) else f"no line of its output matches {words[0]!r} yet"
            case "file":
                path = os.path.join(self._request.cwd, words[0])
                return "" if os.path.exists(path) else f"{words[0]} does not exist yet"
            case "command":
                return await self._command(words)

    async def _http(self, url: str) -> str:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        if why := self._not_listening(port):
            return why
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            status = await _get(host, port, parts.netloc, target)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            return f"{url} does not answer: {_words(error)}"
        return "" if 200 <= status < 300 else f"{url} answers with status {status}"

    def _not_listening(self, port: int) -> str:
        """The reason why this worker does not listen on `port` of this host; empty if it does."""
        inodes = listeners_on(port)
        if not inodes:
            return f"nothing listens on port {port} yet"
        if self._owned & inodes:
            return ""
        self._owned = inodes & sockets_of(self._pid)
        return "" if self._owned else f"another process listens on port {port}"

    async def _command(self, words: tuple[str, ...]) -> str:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=self._request.env,
                cwd=self._request.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return f"{words[0]} cannot be executed: {_words(error)}"
        try:
            code = await process.wait()
        finally:
            kill_group(process.pid, signal.SIGKILL)
        return "" if code == 0 else f"{words[0]} ended with exit code {code}"


class Output:
    """The output of a worker, of which each line is looked at once."""

    def __init__(self, request: Spawn) -> None:
        folder = Path(request.logs, request.folder)
        self._read = {folder / name: (0, b"") for name in ("stdout.log", "stderr.log")}

    def has(self, pattern: str) -> bool:
        """Return True if a line that has come since the last call matches `pattern`, also one that is not complete."""
        for path, (position, rest) in self._read.items():
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(position)
                data = rest + file.read()
                lines = data.split(b"\n")
                self._read[path] = file.tell(), lines[-1]
                if any(re.search(pattern, line.decode(errors="replace")) for line in lines):
                    return True
        return False


async def _connect(host: str, port: int) -> str:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return f"{host}:{port} takes no connection: {_words(error)}"
    writer.close()
    return ""


async def _get(host: str, port: int, authority: str, path: str) -> int:
    """The status of the answer to a GET of `path`."""
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_ANSWER)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\nAccept: */*\r\n\r\n"
        writer.write(request.encode())
        line = (await reader.readuntil(b"\n")).decode("latin-1").split()
        if len(line) < 2 or not line[0].startswith("HTTP/"):
            raise ValueError("it does not speak HTTP")
        with contextlib.suppress(OSError):
            # A server may log an error for a connection that ends before its answer does. If it does not end in time,
            # or the connection is reset, it has answered.
            async with asyncio.timeout(HTTP_BODY_TIMEOUT):
                await reader.read(LONGEST_ANSWER)
        return int(line[1])
    finally:
        writer.close()


def _words(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def sockets_of(pid: int) -> set[str]:
    """The inodes of the open sockets of a process and its descendants."""
    found: set[str] = set()
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{each}/fd"):
                with contextlib.suppress(OSError):
                    link = os.readlink(entry.path)
                    if link.startswith("socket:["):
                        found.add(link[len("socket:[") : -1])
    return found


def _tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    front = [pid]
    while front:
        each = front.pop()
        yield each
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                front += map(int, path.read_text().split())
