"""Runs a module as a program that gets SIGTERM when another process ends.

``python -m unirun.launcher.tethered PID MODULE ARGS…``

The kernel's parent-death signal comes when the thread ends that has made the child, and a library is called from any
thread of its user's. So the module runs in a child of this process, which has one thread and watches process PID.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
from contextlib import suppress
from functools import partial
from types import FrameType

from unirun.launcher.process import die_with_parent, ignore_signals


def main(argv: list[str]) -> int:
    """Run the module. Returns its exit code, as a shell does: 128 + the signal that has killed it."""
    me = os.getpid()
    try:
        owner = os.pidfd_open(int(argv[0]))
    except ProcessLookupError:
        return 128 + signal.SIGTERM
    if os.getppid() != int(argv[0]):
        # The owner has ended, and its number may be that of another process.
        return 128 + signal.SIGTERM
    pid = os.fork()
    if not pid:
        os.close(owner)
        die_with_parent(me, signal.SIGTERM)
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return 0
    child = os.pidfd_open(pid)
    # The child, which runs the module, decides about signals; this process ends after it, with its exit code.
    # If a sender signals both processes, only SIGTERM may reach the child twice.
    signal.signal(signal.SIGTERM, partial(_pass_on, child))
    ignore_signals(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    poll = select.poll()
    for handle in (owner, child):
        poll.register(handle, select.POLLIN)
    if child not in {handle for handle, _ in poll.poll()}:
        os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _pass_on(child: int, signum: int, _: FrameType | None) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(child, signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
