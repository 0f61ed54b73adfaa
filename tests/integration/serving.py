"""A job that runs until it is told to end."""

from __future__ import annotations

import os
import signal

from .harness import Running, Unirun

COMMAND_TIMEOUT = 60.0
"""Deadline for a subcommand's answer on a busy machine; the benchmark measures it on a quiet one."""

SERVE_SCRIPT = """
    import os, signal, sys
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(1))
    print("line", os.environ["ROLE_NAME"], os.environ["RANK"], flush=True)
    print("error", os.environ["RANK"], file=sys.stderr, flush=True)
    while True:
        signal.pause()
"""


def end_well(unirun: Unirun, job: Running) -> None:
    """Let every worker end with 0."""
    for worker in unirun.workers().values():
        os.kill(worker["pid"], signal.SIGUSR1)
    assert job.end().code == 0
