"""The process that launches a job for a Python program, before the job has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.launcher.process import takes_signal


@pytest.mark.starts_processes
def test_signals_of_users_do_not_end_the_process_that_launches_a_job() -> None:
    """A batch system may send them to all processes of a job."""
    command = [sys.executable, "-m", "unirun.launcher.submitted", str(os.getpid())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        numbers = (signal.SIGUSR1, signal.SIGUSR2)
        eventually(lambda: all(takes_signal(process.pid, each) for each in numbers), within=30.0)
        for each in numbers:
            process.send_signal(each)
        out, err = process.communicate("{", WAIT_TIMEOUT)
    assert process.returncode > 0
    assert out == ""
    assert err.startswith("unirun: ")
