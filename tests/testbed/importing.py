"""Processes that import modules once for all processes of a run of the tests, and fork others: `importing_process.py`."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.testbed.machine import DEADLINE
from unirun.launcher.warm.borrowing import PADDING

STARTER = os.getpid()
"""The process that has collected the tests. Those that run them are its forks, or it is this one."""

ROOM = "-" * 1000
"""The home in the environment of an importing process, in place of which its forks have their own."""


class Fork(NamedTuple):
    """A fork of an importing process, and the connection that tells its exit status, as waitpid gives it, at its end."""

    pid: int
    connection: socket.socket

    def close(self) -> None:
        """Hear no more of it."""
        self.connection.close()


class Importing:
    """A process whose forks are of one `kind`. It imports `modules` in the environment `env` when the first fork is asked
    of it, and ends with `STARTER`. There is one for each combination of modules and values of `variables`."""

    def __init__(
        self, kind: str, modules: Sequence[str], env: Mapping[str, str], variables: Sequence[str]
    ) -> None:
        self._command, self._env = [kind, *modules], env
        key = hashlib.sha256(repr([self._command, *(env.get(name) for name in variables)]).encode())
        self._address = f"\0unirun-tests-{STARTER}-{key.hexdigest()[:16]}"

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Fork:
        """Ask for a fork, which gets `descriptors`."""
        connection = self._connect()
        socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        if not (pid := connection.recv(64)):
            raise RuntimeError(f"no fork of a process with {', '.join(self._command)}")
        return Fork(int(pid), connection)

    def _connect(self) -> socket.socket:
        started, deadline = False, time.monotonic() + DEADLINE
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        program = Path(__file__).with_name("importing_process.py")
        flags = ["-u"] if self._command[0] == "warm" else []
        subprocess.Popen(
            [sys.executable, *flags, program, PADDING, self._address[1:], str(STARTER), *self._command],
            env={**self._env, "UNIRUN_HOME": ROOM},
            cwd="/",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
