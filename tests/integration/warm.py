"""Jobs that borrow their spawners from a warm process of the tests."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.testbed.commands import ForkedCommand, may_fork
from tests.testbed.warm import TITLE, fork_warm, new_folder
from tests.waiting import eventually
from unirun.launcher.orders import PRELOAD
from unirun.launcher.warm.borrowing import Borrowed, running, start
from unirun.launcher.warm.key import DESCRIPTION

from .harness import START_TIMEOUT, UNIRUN, Running, Unirun, gone, processes_of

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""With these modules, one warm process serves jobs of one rank and of several."""

STREAMS = {"stdin", "stdout", "stderr"}

COLD = {**ONE_THREAD, "UNIRUN_WARM": "0"}


class Warm:
    """The warm processes of one run directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, root / "run"
        self.run.mkdir(mode=0o700, parents=True)
        self.command = WarmUnirun(root, self)

    def start(self, *options: object, **how: Any) -> None:
        """Start one, as `unirun warm` does."""
        result = self.command("warm", "start", *options, **how)
        assert result.code == 0, result.err

    def fork(self, *preload: str, env: Mapping[str, str] | None = None, holder: int = 0) -> None:
        """Fork one from a process that imports `preload` once for all tests. With a process as `holder` it is as in a
        session or a step there: with root's group as a supplementary one."""
        folder = new_folder(self.run)
        environ = self.command.environment(env)
        fork_warm((*PRELOAD, *preload), environ, self.command.home, folder, holder)
        eventually((folder / DESCRIPTION).exists, "it is ready", START_TIMEOUT)

    @property
    def pids(self) -> list[int]:
        """Descriptions of the running warm processes."""
        return [pid for pid, title in processes_of(self.command.home).items() if title == TITLE]

    @property
    def forks(self) -> dict[int, str]:
        """Forks of the warm processes that were never executed: pid → title."""
        return {pid: title for pid, title in processes_of(self.command.home).items() if title != TITLE}

    def close(self) -> None:
        """End them. Fails when a fork of them is left."""
        left = self.forks
        for pid in self.command.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            assert gone(pid, START_TIMEOUT)
        assert not left, f"left behind: {left}"


class WarmUnirun(Unirun):
    """The command, with its own home and the given warm processes."""

    def __init__(self, root: Path, warm: Warm) -> None:
        super().__init__(root)
        self.warm = warm
        # Those of a trainer that the tests of a module share go on when a test has ended.
        self._others = warm.forks if root != warm.root else {}

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment, with the directory of the warm processes."""
        return super().environment({"UNIRUN_RUN_DIR": str(self.warm.run), **(extra or {})})

    def start(
        self,
        *args: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        read: bool = True,
        constants: Mapping[str, float] | None = None,
        **popen: Any,
    ) -> Running:
        """Start it as a fork of a process that has imported it, unless it needs an interpreter of its own."""
        environ = self.environment(env)
        if not (read and may_fork(environ, cwd or self.root) and popen.keys() <= STREAMS):
            return super().start(*args, env=env, cwd=cwd, read=read, constants=constants, **popen)
        command = [UNIRUN, *map(str, args)]
        forked = ForkedCommand(command, cwd=cwd or self.root, env=environ, constants=constants, **popen)
        self.started.append(Running(self, forked, read=read))
        return self.started[-1]

    def processes(self) -> dict[int, str]:
        """Forks are added, as they show the environment of the warm process."""
        forks = {pid: title for pid, title in self.warm.forks.items() if pid not in self._others}
        return super().processes() | forks


class Borrowing(WarmUnirun):
    """A warm command that prints how spawners start."""

    def start(self, *args: object, **how: Any) -> Running:
        """Add ``-v`` for a job."""
        return super().start(*(["-v", *args] if str(args[0]).startswith("-") else args), **how)


@contextlib.contextmanager
def warm_in(root: Path, *options: object, **how: Any) -> Iterator[Warm]:
    """Warm processes that are ready, and end with the context."""
    with contextlib.closing(Warm(root)) as warm:
        warm.start(*options, **how)
        yield warm


def ready(
    env: dict[str, str], idle: float = START_TIMEOUT, until: int = 0, modules: tuple[str, ...] = ()
) -> Any:
    """A warm process without further imports."""
    folder = start(env, modules, idle, until)
    return eventually(lambda: next((w for w in running() if w.folder == folder), None), "it is ready")


def end(borrowed: Borrowed) -> None:
    """End a spawner as an agent does."""
    borrowed.socket.close()
    try:
        assert borrowed.wait(START_TIMEOUT) in (0, -signal.SIGKILL)
    finally:
        borrowed.close()
