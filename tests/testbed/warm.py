"""Warm processes (`unirun warm`) for tests, on this machine and on hosts of test beds: forks of a process that has imported
their modules once for all processes of a run of the tests."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.testbed.hosts import Hosts
from tests.testbed.importing import Importing
from tests.testbed.machine import wait_until
from unirun.launcher.orders import PRELOAD
from unirun.launcher.warm.key import DESCRIPTION

TITLE = "unirun-warm"

COUNTED = {"OMP_NUM_THREADS": "1", "LC_CTYPE": "C.UTF-8"}
"""Variables of agents over ssh that libraries read when they are loaded: that of the tests, and the one that Python sets
in a session without a language."""

COUNTED_HERE = ("HOME", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
"""Variables in which the jobs of tests differ, and that libraries read when they are loaded."""


def new_folder(run_dir: Path) -> Path:
    """The folder of the next warm process, for jobs with `run_dir` as ``UNIRUN_RUN_DIR``."""
    return run_dir / "warm" / secrets.token_hex(4)


def fork_warm(
    modules: Sequence[str], env: Mapping[str, str], home: Path, folder: Path, holder: int = 0
) -> None:
    """Fork a warm process with `modules` from one that imports them in the environment `env`. It has `home` as the mark in
    its environment, makes `folder`, and belongs to the host of the process `holder` (0: this machine)."""
    importing = Importing("warm", modules, env, COUNTED_HERE)
    request = {"home": str(home), "folder": str(folder), "holder": holder}
    importing.fork(request).close()


class WarmHosts:
    """The warm processes of hosts. Their environment, which is that of users of hosts, has `home` as a mark, and so have
    the forks that jobs borrow. They end with their hosts."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def warm(self, hosts: Hosts, run_dir: Path) -> None:
        """Fork a warm process into each host, for jobs with `run_dir` as ``UNIRUN_RUN_DIR``."""
        folder = new_folder(run_dir)
        for host in hosts:
            fork_warm(PRELOAD, hosts.environment(COUNTED), self.home, folder, host.holder)
        for host in hosts:
            described = host.path(folder / DESCRIPTION)
            wait_until(described.exists, f"{host.name} has a warm process")


def is_warm(pid: int) -> bool:
    """Return True if this is the warm process of a host, and not a fork of it that a job has borrowed."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == TITLE
    return False
