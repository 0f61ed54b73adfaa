"""Warm processes (`unirun warm`) on hosts of test beds, all of them forks of one process, which imports torch once."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

from tests.testbed.hosts import Hosts
from tests.testbed.machine import wait_until
from unirun.launcher.warm.borrowing import PADDING
from unirun.launcher.warm.key import DESCRIPTION

TITLE = "unirun-warm"

COUNTED = {"OMP_NUM_THREADS": "1", "LC_CTYPE": "C.UTF-8"}
"""Variables of agents over ssh that libraries read when they are loaded: that of the tests, and the one that Python sets
in a session without a language."""


class WarmHosts:
    """The process of which those of all hosts are forks. Their environment, which is that of users of hosts, has `home`
    as a mark, and so have the forks that jobs borrow."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, hosts: Hosts) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("warm_process.py")), PADDING],
            env=hosts.environment({"UNIRUN_HOME": str(self.home), **COUNTED}),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        answer(self._process)
        return self._process

    def warm(self, hosts: Hosts, run_dir: Path) -> None:
        """Fork a warm process into each host, for jobs with `run_dir` as ``UNIRUN_RUN_DIR``."""
        process = self._process or self._start(hosts)
        assert process.stdin is not None
        folder = run_dir / "warm" / secrets.token_hex(4)
        for host in hosts:
            for each in (run_dir, folder.parent, folder):
                host.path(each).mkdir(mode=0o700, parents=True)
            process.stdin.write(f"{host.holder} {folder}".encode())
            process.stdin.flush()
            answer(process)
        for host in hosts:
            described = host.path(folder / DESCRIPTION)
            wait_until(described.exists, f"{host.name} has a warm process")

    def close(self) -> None:
        """End it. Those of hosts end with their hosts."""
        if self._process is not None:
            with self._process as process:
                process.kill()

    def __enter__(self) -> WarmHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer(process: subprocess.Popen[bytes]) -> None:
    """Wait for a line of the process."""
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"there are no warm processes: exit code {process.wait(10)}")


def is_warm(pid: int) -> bool:
    """Return True if this is the warm process of a host, and not a fork of it that a job has borrowed."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == TITLE
    except OSError:
        return False
