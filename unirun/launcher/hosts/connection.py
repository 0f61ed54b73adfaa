"""One host reached by the user's own ssh: the process on it, and what ssh said when that fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Self

from unirun.errors import FrameError, RendezvousError, UnirunError
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts.feed import MARK
from unirun.wire.aio import Stream
from unirun.wire.messages import W, expected
from unirun.wire.reporting import gave_up

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
"""No terminal, no questions, and a connection that is lost is noticed within 15 s (three times ServerAliveInterval)."""

KEPT = 8192
"""Bytes of stderr that are kept for errors."""

SSH_EXIT_TIMEOUT = 2.0
"""Seconds that ssh has to end."""

_LIMIT = 1 << 26

SSH_FAILED = 255
"""The exit code of ssh for its own errors."""

BY_SSH = (
    (
        r"permission denied",
        "it asks for a password or refuses the key: load one with ssh-add, or ssh-copy-id {target}",
    ),
    (
        r"identification has changed",
        "it has another host key than before: if that is right, ssh-keygen -R, then ssh {target}",
    ),
    (r"host key verification failed|host key is not known", "accept its host key once: ssh {target}"),
    (
        r"could not resolve|name or service not known|nodename nor servname",
        "is the name right? see ~/.ssh/config",
    ),
    (r"connection refused", "no sshd listens there; see Port in ~/.ssh/config"),
    (r"timed out|no route to host|network is unreachable", "is the host up? try: ssh {target}"),
)
BY_HOST = (
    (r"no module named '?unirun", "install unirun there, in the environment of {python}"),
    (r"permission denied", "may {target} run {python} there?"),
    (
        r"no such file|not found|unknown command|does not exist",
        "install the same environment there: {python}",
    ),
)
"""Messages of ssh itself, or of the host's shell about Python, and the remedy for each."""


class RemoteNode:
    """The process of a node on `host`, which speaks over ssh's stdin and stdout (`stream`)."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process) -> None:
        self.host, self._process = host, process
        assert process.stdout is not None
        assert process.stdin is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.stream = Stream(process.stdout, process.stdin)
        self._errors = bytearray()
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, host: Host, argv: Sequence[str]) -> Self:
        """Start the process, without waiting for it. Raises `RendezvousError` when ssh or srun cannot be started."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LIMIT,
                # A signal of the terminal is for the command, which stops the job.
                start_new_session=True,
            )
        except OSError as error:
            raise not_started(argv[0], error) from error
        return cls(host, process)

    async def ready(self) -> None:
        """Wait until the process has started. Raises `RendezvousError` with the reason and the remedy."""
        try:
            await self._stdout.readuntil(MARK)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise await self.failure() from error

    async def hear(self, kind: type[W]) -> W:
        """The next message, which must be a `kind`. Raises `RendezvousError` with the reason when there is none."""
        try:
            word = await self.stream.receive()
        except FrameError as error:
            remedy = f"is the same unirun installed there, in the environment of {sys.executable}?"
            raise RendezvousError(f"it says what cannot be understood: {error}", remedy) from error
        except UnirunError as error:
            raise await self.failure() from error
        return expected(word, kind)

    async def failure(self) -> RendezvousError:
        """The reason why the process has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._listening
                await self._process.wait()
        return explain(self.host, self._process.returncode, self._errors.decode(errors="replace"))

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._errors += data
            del self._errors[:-KEPT]

    async def close(self) -> None:
        """End ssh, not what it has started."""
        self._listening.cancel()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            # Not `send_signal`, which reaps a process that has ended, whose exit asyncio waits for.
            with contextlib.suppress(ProcessLookupError):
                if self._process.returncode is None:
                    os.kill(self._process.pid, signum)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SSH_EXIT_TIMEOUT):
                    await self._process.wait()
                    return
            gave_up("the end of ssh", SSH_EXIT_TIMEOUT)


def not_started(program: str, error: OSError) -> RendezvousError:
    """The error for ssh or srun that cannot be started."""
    remedy = "install OpenSSH" if program == "ssh" else "install it"
    return RendezvousError(f"{program} cannot be started: {error.strerror}", remedy)


async def reach(host: Host) -> RemoteNode:
    """Start the process of a node on `host`, and wait until it speaks. Raises `RendezvousError` with the reason and the
    remedy."""
    remote = await RemoteNode.start(host, on_host(host, "unirun.launcher.hosts.node"))
    try:
        await remote.ready()
    except BaseException:
        await remote.close()
        raise
    return remote


def is_local(host: Host) -> bool:
    """Return True if `host` is this one, which needs no ssh."""
    return host.target == "localhost"


def on_host(host: Host, module: str) -> list[str]:
    """The command line that runs `module` on `host`, by ssh. The module path is needed before the environment is sent,
    and is no secret."""
    path = os.environ.get("PYTHONPATH")
    prefix = ["env", f"PYTHONPATH={path}"] if path else []
    command = [*prefix, sys.executable, "-P", "-m", module]
    return command if is_local(host) else ["ssh", *OPTIONS, host.target, for_any_shell(command)]


def for_any_shell(command: Sequence[str]) -> str:
    """Quote the words of `command` as one line for the login shell of a host, whichever shell it is. ssh
    gives the line to that shell: sh, bash and zsh, but also tcsh, in which ``!`` has a meaning between
    quotes, and fish, in which ``\\`` has. So both stand outside of quotes. A command that needs the language
    of one shell goes to ``sh -c``. A newline cannot be quoted in tcsh.
    """
    return " ".join(map(_quoted, command))


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    parts = re.split(r"(['\\!])", word)
    return (
        "".join(f"\\{part}" if number % 2 else f"'{part}'" for number, part in enumerate(parts) if part)
        or "''"
    )


_PLAIN = re.compile(r"(?!=)[A-Za-z0-9_/.,:@%+=-]+")
"""Words without a character that a shell expands; ``=word`` is a program's path in zsh."""


def explain(host: Host, code: int | None, said: str) -> RendezvousError:
    """The error for a host whose process has ended with `code`, having `said` that on stderr."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else f"it ended with exit code {code}"
    # A login may write other lines, as that there is no home directory.
    about_python = [line for line in lines if sys.executable in line]
    known, about = (BY_SSH, lines) if code == SSH_FAILED else (BY_HOST, about_python)
    for pattern, remedy in known:
        for line in reversed(about):
            if re.search(pattern, line, re.IGNORECASE):
                return RendezvousError(line, remedy.format(target=host.target, python=sys.executable))
    return RendezvousError(last, f"try: ssh {host.target} {shlex.quote(sys.executable)} --version")
