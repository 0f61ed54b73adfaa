"""Probes on other hosts, over ssh or srun, and what it means when one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import Callable
from typing import TypeVar

from unirun.errors import FrameError, RendezvousError
from unirun.launcher.doctor.requests import Answer, Failed, Request, to_answer, to_line
from unirun.launcher.hosts.hostlist import Host

REACH = 20.0
"""Seconds within which a host answers for the first time; ssh itself has half of that to connect."""

ANSWER = 30.0
"""Seconds for every other answer: more than whatever is asked may take."""

_LONGEST = 1 << 20
_PROBE = ("-m", "unirun.launcher.doctor.probe")

Way = Callable[[Host], list[str]]
"""The command line that starts a probe on a host."""

A = TypeVar("A")


def by_ssh(host: Host) -> list[str]:
    """Through the user's own OpenSSH, which must not ask for anything."""
    command = shlex.join(["exec", sys.executable, *_PROBE])
    return ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH / 2:.0f}", host.target, command]


def by_srun(host: Host) -> list[str]:
    """In the Slurm allocation of this process, beside what runs there."""
    place = ["--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={host.name}"]
    return ["srun", "--quiet", *place, sys.executable, *_PROBE]


def here(_: Host) -> list[str]:
    """On this host."""
    return [sys.executable, *_PROBE]


class Unreached(Exception):
    """No probe on a host; the text says why."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(problem)


class Channel:
    """The probe on one host. Requests are answered one after the other."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self._process = process
        self._errors = asyncio.ensure_future(_tail(process.stderr))

    @classmethod
    async def open(cls, host: Host, way: Way) -> Channel:
        """Start the probe, without waiting for it. Raises `Unreached` when ssh or srun cannot be started."""
        pipe = asyncio.subprocess.PIPE
        command = way(host)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LONGEST
            )
        except OSError as error:
            raise Unreached(f"{command[0]} cannot be started: {error.strerror}", "install it") from error
        return cls(host, process)

    async def ask(self, request: Request, kind: type[A], within: float = ANSWER) -> A:
        """The answer, which is a `kind`. Raises `RendezvousError` with what the host says instead, `Unreached` when the
        probe has ended or does not answer."""
        try:
            async with asyncio.timeout(within):
                answer = await self._exchange(request)
        except TimeoutError as error:
            raise Unreached(f"no answer within {within:g} s", "is the host overloaded?") from error
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

    async def _end(self) -> Unreached:
        """Why the probe has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._process.wait()
                return Unreached(*explain(self._process.returncode, await self._errors, self.host.target))
        return Unreached("the probe has closed its output", "")

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


_REMEDIES = (
    ("Permission denied", "let your key in, as unirun never asks for a password: ssh-copy-id {target}"),
    ("IDENTIFICATION HAS CHANGED", "if the host is a new one: ssh-keygen -R, then ssh {target} once by hand"),
    ("Host key verification failed", "connect once by hand: ssh {target}"),
    ("Could not resolve hostname", "check the name, or give it a HostName in ~/.ssh/config"),
    ("Connection refused", "is sshd running there? its port is set in ~/.ssh/config"),
    ("timed out", "is it up, and does a firewall let ssh through?"),
    ("No route to host", "is it up, and in this network?"),
    ("No module named 'unirun'", "install unirun there, in the environment of {python}"),
    ("No module named unirun", "install unirun there, in the environment of {python}"),
    ("not found", "make {python} there as it is here"),
    ("No such file or directory", "make {python} there as it is here"),
)
"""By what ssh, srun, the shell or Python says."""


def explain(code: int | None, errors: str, target: str) -> tuple[str, str]:
    """The problem and the remedy for a probe that ended with `code` and wrote `errors`."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    values = {"target": target, "python": sys.executable}
    for sign, remedy in _REMEDIES:
        for line in lines:
            if sign in line:
                return line, remedy.format(**values)
    return (lines[-1] if lines else f"exit code {code}"), f"try it by hand: ssh {target}"
