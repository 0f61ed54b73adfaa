"""A worker at exit, before its interpreter ends."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.launcher.worker import wait_for_threads

WORK = 50_000
"""Rounds of a key derivation, without the GIL: some tens of milliseconds."""


class TestTheEnd:
    def test_a_worker_waits_at_exit_for_a_working_thread_that_takes_the_gil(self) -> None:
        import torch  # noqa: F401 - threads of others are not waited for

        done: list[bytes] = []
        began = threading.Event()

        def work() -> None:
            began.set()
            done.append(hashlib.pbkdf2_hmac("sha256", b"a", b"b", WORK))

        thread = threading.Thread(target=work)
        thread.start()
        began.wait(WAIT_TIMEOUT)
        wait_for_threads(limit=30)
        ended = bool(done)
        thread.join()
        assert ended

    def test_a_worker_does_not_wait_at_exit_for_a_sleeping_thread(self) -> None:
        import torch  # noqa: F401

        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        thread.start()
        # With a limit that a test does not sit through.
        wait_for_threads(limit=600)
        leave.set()
        thread.join()

    @pytest.mark.starts_processes
    def test_a_worker_without_torch_does_not_wait_at_exit(self) -> None:
        code = (
            "import threading; from unirun.launcher.worker import wait_for_threads\n"
            "threading.Thread(target=lambda: [_ for _ in iter(int, 1)], daemon=True).start()\n"
            "wait_for_threads(limit=600)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
