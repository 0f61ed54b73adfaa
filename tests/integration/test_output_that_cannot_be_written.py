"""An unwritable stdout, disk or log directory is reported with its reason, and no job hangs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT

from .harness import EXEC, Script, Unirun


class TestAStdoutThatCannotBeWritten:
    def test_an_unwritable_stdout_does_not_end_the_job_but_fails_the_command(
        self, unirun: Unirun, script: Script
    ) -> None:
        with open("/dev/full", "wb") as full:
            result = unirun("-q", *EXEC, script("for n in range(3): print(n)"), stdout=full)
        assert result.code == 1
        words = "stdout cannot be written: No space left on device; all output of the job is in"
        # The only pipe is that of stderr.
        assert result.out == f"unirun: {words} {unirun.job_dir() / 'logs'}\n"
        assert unirun.log("default", 0) == b"0\n1\n2\n"
        assert unirun.status()["phase"] == "succeeded"


class TestADiskThatIsFull:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path | None]:
        """A file system of 256 KiB, None where it cannot be mounted."""
        where = tmp_path / "small"
        where.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", str(where)],
            capture_output=True,
            check=False,
        )
        try:
            yield where if mounted.returncode == 0 else None
        finally:
            if mounted.returncode == 0:
                with contextlib.suppress(subprocess.SubprocessError):
                    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=WAIT_TIMEOUT)

    def test_a_limit_on_the_file_size_of_one_worker_is_reported(self, unirun: Unirun, script: Script) -> None:
        train = script(
            """
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            print("x" * 20_000)
            """
        )
        result = unirun("-q", "-r", 3, train)
        assert (result.code, "File too large" in result.err) == (1, True), result.err

    def test_a_full_disk_of_the_job_directory_does_not_end_the_job(
        self, unirun: Unirun, script: Script, small_disk: Path | None
    ) -> None:
        if small_disk is None:
            small_disk = unirun.root
        train = script(
            f"""
            import contextlib, pathlib
            with contextlib.suppress(OSError), open({str(small_disk / "filler")!r}, "wb") as file:
                for _ in range(64):
                    file.write(bytes(8192))
                    file.flush()
            """
        )
        result = unirun(
            *("--max-restarts", 1, "--log-dir", unirun.root / "logs", train),
            env={"UNIRUN_HOME": str(small_disk / "home")},
            constants={"unirun.launcher.master.writer.END_WRITE_TIMEOUT": 2.0},
        )
        assert result.code == 0, result.err


class TestALogDirectory:
    @pytest.mark.parametrize("where", ["file/below", "/proc/nope"])
    def test_an_unwritable_log_directory_is_reported_at_once(
        self, unirun: Unirun, script: Script, where: str
    ) -> None:
        (unirun.root / "file").write_text("no directory")
        result = unirun("--log-dir", where, script("print('never')"))
        assert (result.code, result.out) == (2, "")
        (line,) = result.err.splitlines()
        assert line.startswith(f"unirun: logs cannot be written to {where}: ")
        assert line.endswith("choose another --log-dir")

    def test_a_log_directory_lost_while_the_job_runs_fails_the_restart(
        self, unirun: Unirun, script: Script
    ) -> None:
        train = script(
            """
            import os, shutil, sys
            job = os.path.dirname(os.environ["UNIRUN_SOCKET"])
            shutil.rmtree(os.path.join(job, "logs", "a"))
            open(os.path.join(job, "logs", "a"), "w").close()
            sys.exit(1)
            """
        )
        result = unirun(*EXEC, "--role", "a", "--max-restarts", 1, train)
        assert (result.code, "its log cannot be written" in result.err) == (5, True), result.err
