"""Warm processes (`unirun warm`) for tests, on this machine and on hosts of test beds: forks of a process that has imported
their modules once for all processes of a run of the tests."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.testbed.hosts import Hosts
from tests.testbed.machine import DEADLINE, wait_until
from unirun.launcher.orders import PRELOAD
from unirun.launcher.warm.borrowing import PADDING
from unirun.launcher.warm.key import DESCRIPTION

TITLE = "unirun-warm"

COUNTED = {"OMP_NUM_THREADS": "1", "LC_CTYPE": "C.UTF-8"}
"""Variables of agents over ssh that libraries read when they are loaded: that of the tests, and the one that Python sets
in a session without a language."""

COUNTED_HERE = ("HOME", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
"""Variables in which the jobs of tests differ, and that libraries read when they are loaded."""

STARTER = os.getpid()
"""The process that has collected the tests. Those that run them are its forks, or it is this one."""

ROOM = "-" * 1000
"""The home in the environment of an importing process, in place of which its forks have their own."""


class Importing:
    """A process that imports `modules` in the environment `env`, with the first warm process that is asked of it, and ends
    with `STARTER`."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._modules, self._env = modules, env
        kind = hashlib.sha256(repr([*modules, *(env.get(name) for name in COUNTED_HERE)]).encode())
        self._address = f"\0unirun-tests-{STARTER}-{kind.hexdigest()[:16]}"

    def fork(self, home: Path, folder: Path, holder: int = 0) -> None:
        """Fork a warm process, with `home` as the mark in its environment, whose folder is made; `holder` is a process of
        the host to which it belongs."""
        with self._connect() as connection:
            connection.sendall(f"{home}\0{folder}\0{holder}".encode())
            if not connection.recv(1):
                raise RuntimeError(f"no warm process with {', '.join(self._modules)}")

    def _connect(self) -> socket.socket:
        started, deadline = False, time.monotonic() + DEADLINE
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(DEADLINE)
            try:
                connection.connect(self._address)
                return connection
            except ConnectionRefusedError:
                connection.close()
                assert time.monotonic() < deadline, "the importing process does not listen"
            if not started:
                started = True
                self._start()
            time.sleep(0.01)

    def _start(self) -> None:
        """Start the process. Of two that are started at the same moment one has the address, and the other ends."""
        program = Path(__file__).with_name("warm_process.py")
        subprocess.Popen(
            [sys.executable, "-u", program, PADDING, self._address[1:], str(STARTER), *self._modules],
            env={**self._env, "UNIRUN_HOME": ROOM},
            cwd="/",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def new_folder(run_dir: Path) -> Path:
    """The folder of the next warm process, for jobs with `run_dir` as ``UNIRUN_RUN_DIR``."""
    return run_dir / "warm" / secrets.token_hex(4)


class WarmHosts:
    """The warm processes of hosts. Their environment, which is that of users of hosts, has `home` as a mark, and so have
    the forks that jobs borrow. They end with their hosts."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def warm(self, hosts: Hosts, run_dir: Path) -> None:
        """Fork a warm process into each host, for jobs with `run_dir` as ``UNIRUN_RUN_DIR``."""
        importing, folder = Importing(PRELOAD, hosts.environment(COUNTED)), new_folder(run_dir)
        for host in hosts:
            importing.fork(self.home, folder, host.holder)
        for host in hosts:
            described = host.path(folder / DESCRIPTION)
            wait_until(described.exists, f"{host.name} has a warm process")


def is_warm(pid: int) -> bool:
    """Return True if this is the warm process of a host, and not a fork of it that a job has borrowed."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == TITLE
    return False
