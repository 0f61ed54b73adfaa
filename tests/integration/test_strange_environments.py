"""Containers and namespaces that lack what most hosts have: a home directory, a passwd entry, loopback, ``/proc``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import eventually

from .harness import EXEC, START_TIMEOUT, UNIRUN, Running, Script, Unirun

NOBODYS_UID = 4321
"""A user without an entry in ``/etc/passwd``. Of root's rights it keeps that of reading, as Python may be root's."""

AS_NOBODY = [
    *("setpriv", f"--reuid={NOBODYS_UID}", f"--regid={NOBODYS_UID}", "--clear-groups"),
    *(
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    ),
]

WITHOUT = [
    "env",
    *(f"--unset={name}" for name in ("UNIRUN_HOME", "UNIRUN_RUN_DIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")),
]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory in which all users may make files, as ``/tmp``; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory(prefix="unirun-test-") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.mark.parametrize("home", ["--unset=HOME", "HOME=/", "HOME=/nonexistent"])
def test_a_user_without_a_passwd_entry_runs_jobs_in_the_temporary_directory(
    unirun: Unirun, temporary: Path, home: str
) -> None:
    call = [*AS_NOBODY, *WITHOUT, "--unset=USER", "--unset=LOGNAME", home, f"TMPDIR={temporary}", UNIRUN]
    job = unirun.start_program([*call, "--rdzv-id", "mine", "--no-python", "echo", "ran"], cwd=temporary)
    end = job.end()
    assert end.out == "ran\n", end.err
    found = unirun.start_program([*call, "status", "mine"], cwd=temporary).end()
    own = temporary / f"unirun-{NOBODYS_UID}"
    assert "job mine: succeeded" in found.out, found.err
    assert f"logs: {own}/jobs/mine/logs" in found.out
    assert (own.stat().st_uid, own.stat().st_mode & 0o777) == (NOBODYS_UID, 0o700)


class TestTheFirstProcessOfAContainer:
    """PID 1, for which the kernel has no default actions of signals, and which adopts all orphans."""

    CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", UNIRUN)

    @pytest.fixture
    def start(self, unirun: Unirun) -> Callable[..., tuple[Running, int]]:
        """Starts a command as the first process of a pid namespace. Returns it with its pid outside."""

        def started(*argv: object) -> tuple[Running, int]:
            job = unirun.start_program([*self.CONTAINER, *map(str, argv)])
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
            return job, eventually(lambda: int(children.read_text() or 0), "the command is there")

        return started

    def test_ends_by_a_signal_that_comes_before_its_job(
        self, start: Callable[..., tuple[Running, int]], tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "job.yaml")
        job, pid = start("--config", "job.yaml")
        eventually(lambda: handles(pid, signal.SIGTERM), "it has begun", START_TIMEOUT)
        os.kill(pid, signal.SIGTERM)
        assert job.end().code == 128 + signal.SIGTERM

    def test_stops_its_job_and_leaves_no_zombies(
        self, start: Callable[..., tuple[Running, int]], script: Script
    ) -> None:
        job, pid = start(*EXEC, script("import time; print('up', flush=True); time.sleep(600)"))
        job.lines("^up$")
        # As `docker exec` does: the parent of the orphan ends before it.
        enter = ["nsenter", "--target", str(pid), "--pid", "--mount", "sh", "-c"]
        subprocess.run([*enter, "(sleep 0.1 &)"], check=True)
        orphans = [*enter, "ps -o comm= --ppid 1"]
        eventually(lambda: b"sleep" not in subprocess.check_output(orphans), "the orphan is collected")
        os.kill(pid, signal.SIGTERM)
        assert job.end().code == 128 + signal.SIGTERM
        assert "SIGTERM: stopping" in job.text


def handles(pid: int, signum: int) -> bool:
    """Return True if the process has a handler for a signal."""
    (caught,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) & 1 << signum - 1)


def test_without_loopback_the_job_is_refused_in_one_sentence(unirun: Unirun, script: Script) -> None:
    job = unirun.start_program(["unshare", "--net", UNIRUN, *EXEC, str(script("print('ran')"))]).end()
    assert (job.code, job.out) == (4, "")
    assert job.err == (
        "unirun: 127.0.0.1 cannot be reached from this host, which has it: network is unreachable;"
        " is the loopback interface down? ip link set lo up\n"
    )
    assert not list((unirun.home / "jobs").iterdir())


@pytest.mark.parametrize("command", [[], ["plan"]])
def test_without_proc_commands_say_so(unirun: Unirun, script: Script, command: list[str]) -> None:
    hidden = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    call = ["unshare", "--mount", "sh", "-c", hidden, "sh", UNIRUN, *command, str(script("print('ran')"))]
    result = unirun.start_program(call).end()
    assert result.code == 2
    assert re.search(
        r"^unirun: /proc is not mounted, .*; mount it: mount -t proc proc /proc$", result.err, re.M
    )
    assert "Traceback" not in result.err
