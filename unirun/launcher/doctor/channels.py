"""Probes on other hosts, over ssh or srun, and what it means when one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from unirun.errors import FrameError, RendezvousError
from unirun.launcher.doctor.requests import Answer, Failed, Request, to_answer, to_line
from unirun.launcher.hosts.connection import explain, on_host
from unirun.launcher.hosts.hostlist import Host

REACH = 20.0
"""Seconds within which a host answers for the first time; ssh itself has half of that to connect."""

ANSWER = 30.0
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


class Channel:
    """The probe on one host. Requests are answered one after the other."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self._process = process
        self._errors = asyncio.ensure_future(_tail(process.stderr))

    @classmethod
    async def open(cls, host: Host, way: Way) -> Channel:
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

    async def ask(self, request: Request, kind: type[A], within: float = ANSWER) -> A:
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
        if isinstance(answer, Failed):
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
