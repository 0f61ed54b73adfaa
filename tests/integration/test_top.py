"""``unirun top`` in a terminal of 80 × 24, with keys."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time

from .harness import EXEC, UNIRUN, Script, Unirun

STEPPING = """
    import time, unirun
    for step in range(10_000):
        unirun.progress(step)
        time.sleep(0.02)
        if step == 5:
            print("a line of its log", flush=True)
"""


def test_ranks_are_shown_and_one_in_detail_with_the_end_of_its_log(unirun: Unirun, script: Script) -> None:
    """
    1. Two ranks report steps, and are sampled ten times a second.
    2. In a terminal there is a row for each rank, with its step.
    3. The enter key shows one rank with the end of its log; q leaves, and restores the terminal.
    """
    job = unirun.start(
        *EXEC, "--nproc-per-node", 2, "--role", "actor", "--monitor-interval", 0.1, script(STEPPING)
    )
    job.lines("a line of its log", 2)
    name = unirun.job_dir().name
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(unirun.environment({"TERM": "xterm"}))
        os.execv(UNIRUN, [UNIRUN, "top", name, "--interval", "0.2"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown = b""

    def until(words: bytes, start: int = 0) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while words not in shown[start:]:
            assert select.select([terminal], [], [], deadline - time.monotonic())[0], shown[-2000:]
            shown += os.read(terminal, 1 << 16)

    until(b"actor:0")
    until(b"actor:1")
    os.write(terminal, b"\r")
    until(b"a line of its log")
    os.write(terminal, b"q")
    until(b"\x1b[?1049l")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)
    assert "actor:0" in unirun("top", name, "--once", "--filter", "actor:0").out
    assert unirun("stop", name, "--now").code == 0
    job.end()
