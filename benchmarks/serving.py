"""Measured jobs of programs: servers, and a role that starts after them. All use one clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.figure import BenchmarkError
from benchmarks.job import DEADLINE, UNIRUN, environment

T = TypeVar("T")

_SERVER = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
name = f"{sys.argv[2]}/up-{os.environ['UNIRUN_ROLE']}-{os.environ['UNIRUN_INCARNATION']}"
with open(f"{name}.new", "w") as file:
    file.write(f"{time.time()} {os.getpid()}")
os.rename(f"{name}.new", name)
while True:
    server.accept()[0].close()
"""

_PRIMARY = """
d={0}; date +%s.%N >$d/began.new; mv $d/began.new $d/began
until [ -e $d/go ]; do sleep 0.005; done
date +%s.%N >$d/ended.new; mv $d/ended.new $d/ended
"""


class Served:
    """A job of `servers` roles with a server each, and a primary that starts when all are ready."""

    def __init__(self, folder: Path, servers: int) -> None:
        self.folder = folder
        script = folder / "server.py"
        script.write_text(_SERVER)
        server: dict[str, Any] = {"program": sys.executable, "service": True, "ready": "tcp"}
        server["args"] = ["-S", str(script), "{port}", str(folder)]
        names = [f"engine{number}" for number in range(servers)]
        primary = {"program": "bash", "args": ["-c", _PRIMARY.format(folder)], "after": names}
        job = {"roles": {**dict.fromkeys(names, server), "primary": primary}}
        (folder / "job.json").write_text(json.dumps(job))
        command = [UNIRUN.command[0], "--config", str(folder / "job.json")]
        self.began = time.time()
        self.popen = subprocess.Popen(
            command, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._lines.append((time.time(), line))

    def up(self, role: str, incarnation: int = 0) -> tuple[float, int]:
        """The time at which a server listened, and its pid."""
        when, pid = self.await_file(f"up-{role}-{incarnation}").split()
        return float(when), int(pid)

    def await_file(self, name: str) -> str:
        """The content of a file that a process of the job writes."""
        path = self.folder / name
        return self._await(lambda: path.read_text() if path.exists() else None, name)

    def said(self, words: str) -> float:
        """The time at which the command wrote a line with this text."""
        return self._await(lambda: next((t for t, line in self._lines if words in line), None), words)

    def _await(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.time() + DEADLINE
        while (found := look()) is None:
            if time.time() > deadline or self.popen.poll() is not None:
                raise BenchmarkError(f"no {what}: {''.join(line for _, line in self._lines)[-300:]}")
            time.sleep(0.002)
        return found

    def end(self) -> float:
        """Let the primary end. Returns the seconds from its end to that of the command and all servers."""
        (self.folder / "go").touch()
        ended = float(self.await_file("ended"))
        self.popen.wait(DEADLINE)
        return time.time() - ended

    def kill(self) -> None:
        """End the job at once."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()
        self._reader.join(DEADLINE)


@contextmanager
def served(folder: Path, servers: int) -> Iterator[Served]:
    """A running job, which has ended when the context ends."""
    os.makedirs(folder, exist_ok=True)
    job = Served(folder, servers)
    try:
        yield job
    finally:
        job.kill()
