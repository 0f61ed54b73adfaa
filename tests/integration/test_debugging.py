"""``unirun debug`` and `unirun.breakpoint`: pdb in a rank of a running job, in a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import time

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import EXEC, UNIRUN, Script, Unirun

STEPPING = """
    import os, time, unirun

    def work(step):
        doubled = 2 * step
        time.sleep(0.02)
        return doubled

    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    for step in range(100_000):
        unirun.progress(step)
        work(step)
        if step == 2 and os.environ["RANK"] == "0":
            unirun.breakpoint(timeout=0.2)
            print("nobody came", flush=True)
        if step == 2 and os.environ["RANK"] == "1" and again:
            answer = 0
            unirun.breakpoint()
            print("answer", answer, flush=True)
        if step % 20 == 0:
            print("rank", os.environ["RANK"], "step", step, flush=True)
"""


class Debug:
    """``unirun debug`` in a terminal."""

    def __init__(self, unirun: Unirun, *arguments: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ.update(unirun.environment({"TERM": "dumb"}))
            os.execv(UNIRUN, [UNIRUN, "debug", *arguments])
        self._shown = ""

    def until(self, words: str) -> str:
        """Wait until it shows `words`. Returns all before them since the last time."""
        deadline = time.monotonic() + WAIT_TIMEOUT
        while words not in self._shown:
            assert select.select([self._terminal], [], [], deadline - time.monotonic())[0], self._shown
            try:
                self._shown += os.read(self._terminal, 1 << 16).decode()
            except OSError as error:
                raise AssertionError(f"it has ended: {self._shown}") from error
        before, _, self._shown = self._shown.partition(words)
        return before

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """Wait for its end. Returns its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._terminal)
        return code


def test_a_rank_is_debugged_while_the_others_go_on_and_outlives_its_debugger(
    unirun: Unirun, script: Script
) -> None:
    """
    1. Rank 0 comes to a breakpoint that nobody attends, and goes on.
    2. A debugger holds rank 1 for longer than the time-out for hangs. Rank 0 goes on meanwhile, and nobody hangs.
    3. It evaluates, stops at a breakpoint, and at Ctrl-C. No second one is let in. Rank 1 goes on when it leaves.
    4. Rank 1 is killed while it is debugged: the command says so. The role starts again.
    5. Rank 1 waits at a breakpoint. Its debugger changes a variable and is killed, and rank 1 goes on.
    """
    flags = ("--nproc-per-node", 2, "--role", "actor", "--hang-timeout", 1, "--max-restarts", 1)
    job = unirun.start(*EXEC, *flags, script(STEPPING))
    job.lines(r"rank 1 (step) 20")
    name = unirun.job_dir().name
    job.lines(r"actor:0: waits at .*train.py:\d+ for (unirun debug) " + name)
    job.lines("(nobody came)")

    debug = Debug(unirun, name, "actor:1")
    debug.until("(Pdb) ")
    held = time.monotonic()
    refused = unirun("debug", name, "actor:1")
    assert refused.code == 2
    assert "another unirun debug holds it" in refused.err
    eventually(lambda: "waiting: actor:1 is held by unirun debug" in unirun("status", name).out)
    assert "actor:1 is held by unirun debug" in unirun("top", name, "--once").out
    debug.type("p 6 * 7\r")
    debug.until("\n42\r\n(Pdb) ")
    steps = len(job.lines(r"(rank 0) step"))
    job.lines(r"(rank 0) step", steps + 5)
    while time.monotonic() < held + 2.5:
        job.lines(r"(rank 0) step", (steps := steps + 1))
    debug.type("tbreak work\r")
    debug.until("(Pdb) ")
    debug.type("c\r")
    debug.until("work()")
    debug.until("(Pdb) ")
    debug.type("c\r")
    steps = len(job.lines(r"(rank 1) step"))
    job.lines(r"(rank 1) step", steps + 1)
    debug.type("\x03")
    debug.until("train.py(")
    debug.until("(Pdb) ")
    debug.type("q\r")
    assert debug.end() == 0
    steps = len(job.lines(r"(rank 1) step"))
    job.lines(r"(rank 1) step", steps + 1)
    assert unirun.events("hang") == []

    debug = Debug(unirun, name, "actor:1")
    debug.until("(Pdb) ")
    os.kill(unirun.workers()["actor:1"]["pid"], signal.SIGKILL)
    eventually(lambda: unirun.workers()["actor:1"]["incarnation"] == 1, "rank 1 starts again")
    debug.type("p 1\r")
    debug.until("actor:1: its process has ended")
    assert debug.end() == 1

    job.lines(r"actor:1: waits at .*train.py:\d+ for (unirun debug) " + name)
    debug = Debug(unirun, name, "actor:1")
    debug.until("(Pdb) ")
    debug.type("answer = 42\r")
    debug.until("(Pdb) ")
    os.kill(debug.pid, signal.SIGKILL)
    assert debug.end() == -signal.SIGKILL
    job.lines("(answer) 42")
    assert unirun("stop", name, "--now").code == 0
    job.end()
