"""The command's stdin is that of the only worker, or of the named one of several."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT, eventually

from .harness import EXEC, START_TIMEOUT, UNIRUN, Running, Script, Unirun, gone

READ = "import sys; print(repr(sys.stdin.read()))"


Pipe = Callable[[bytes], int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Makes the read end of a pipe that has some data and no writer."""
    made: list[int] = []

    def make(data: bytes) -> int:
        theirs, ours = os.pipe()
        os.write(ours, data)
        os.close(ours)
        made.append(theirs)
        return theirs

    yield make
    for each in made:
        os.close(each)


class TestAPipe:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_a_piped_stdin_is_read_by_the_only_worker(
        self, unirun: Unirun, script: Script, method: str, pipe: Pipe
    ) -> None:
        result = unirun("-q", "--start-method", method, script(READ), stdin=pipe(b"one\ntwo"))
        assert (result.code, result.out) == (0, "'one\\ntwo'\n"), result.err

    def test_a_piped_stdin_may_be_the_script_itself(self, unirun: Unirun, pipe: Pipe) -> None:
        result = unirun("-q", *EXEC, "/dev/stdin", stdin=pipe(b"print(__name__)"))
        assert (result.code, result.out) == (0, "__main__\n"), result.err

    def test_a_piped_stdin_is_read_by_a_program(self, unirun: Unirun, pipe: Pipe) -> None:
        result = unirun("-q", "--no-python", "cat", stdin=pipe(b"\xff\x00half"))
        assert (result.code, result.out.encode()) == (0, b"\\xff\x00half")

    def test_a_piped_stdin_is_read_on_by_a_restarted_worker(self, unirun: Unirun, pipe: Pipe) -> None:
        """A shell reads no byte beyond the line that it needs."""
        line = "read line; echo $line; exit $((1 - UNIRUN_INCARNATION))"
        result = unirun("-q", "--max-restarts", 1, "--no-python", "sh", "-c", line, stdin=pipe(b"one\ntwo\n"))
        assert (result.code, result.out.split()) == (0, ["one", "two"]), result.err

    def test_a_piped_stdin_is_untouched_by_a_script_that_does_not_read(
        self, unirun: Unirun, script: Script, pipe: Pipe
    ) -> None:
        theirs, ours = os.pipe()
        os.write(ours, b"for the shell's loop")
        assert unirun("-q", *EXEC, script("print('x')"), stdin=theirs).code == 0
        assert os.read(theirs, 100) == b"for the shell's loop"
        os.close(theirs)
        with pytest.raises(BrokenPipeError):
            os.write(ours, b"nobody of the job has it any more")
        os.close(ours)

    def test_a_piped_stdin_is_read_by_the_named_one_of_several_workers(
        self, unirun: Unirun, pipe: Pipe
    ) -> None:
        argv = ("-q", "--roles", "a=2,b=1", "--no-python", "sh", "-c", "echo $ROLE_NAME $RANK $(cat)")
        assert unirun(*argv, stdin=pipe(b"x")).lines == ["a 0", "a 1", "b 0"]
        assert unirun("--stdin", "a:1", *argv, stdin=pipe(b"x")).lines == ["a 0", "a 1 x", "b 0"]

    def test_a_piped_stdin_without_a_reader_is_broken_for_its_writer(self, unirun: Unirun) -> None:
        theirs, ours = os.pipe()
        job = unirun.start("--nproc-per-node", 2, "--no-python", "sleep", "100", stdin=theirs)
        os.close(theirs)
        job.lines("up after")
        with pytest.raises(BrokenPipeError):
            os.write(ours, b"x")
        os.close(ours)
        job.signal(signal.SIGTERM)
        assert job.end().code == 143

    def test_a_detached_job_does_not_read_a_piped_stdin(self, unirun: Unirun, pipe: Pipe) -> None:
        line = ("-d", "--no-python", "cat")
        assert unirun(*line, stdin=pipe(b"x")).code == 0
        eventually(lambda: unirun.status()["phase"] == "succeeded", "the job has ended", START_TIMEOUT)
        assert unirun.log("default", 0) == b""
        result = unirun("--stdin", "default:0", *line)
        assert (result.code, result.err) == (
            2,
            "unirun: --stdin: a detached job has no stdin; leave out one of --stdin and --detach\n",
        )

    def test_a_closed_stdin_is_empty(self, unirun: Unirun) -> None:
        result = unirun("-q", "--no-python", "cat", stdin=None, preexec_fn=lambda: os.close(0))
        assert (result.code, result.out) == (0, ""), result.err


class Terminal:
    """A terminal with its own session."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.text = b""

    def start(self, unirun: Unirun, *command: object) -> Running:
        """Start a program as the leader of a session on it, in the foreground."""
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        return unirun.start_program(
            [*map(str, command)],
            read=False,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={"TERM": "dumb"},
            **streams,
        )

    def until(self, words: bytes) -> None:
        """Wait until `words` are shown, after the last ones waited for."""
        deadline = time.monotonic() + START_TIMEOUT
        while words not in self.text:
            assert select.select([self.ours], [], [], max(deadline - time.monotonic(), 0))[0], self.text
            self.text += os.read(self.ours, 1 << 16)
        self.text = self.text.partition(words)[2]

    def type(self, keys: bytes) -> None:
        """Type `keys`."""
        os.write(self.ours, keys)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    os.close(made.ours)
    os.close(made.theirs)


class TestATerminal:
    def test_the_only_worker_reads_from_the_terminal(
        self, unirun: Unirun, script: Script, terminal: Terminal
    ) -> None:
        train = script(
            """
            import sys
            name = input("name? ")
            # In one piece: the command says meanwhile that the rank is up.
            sys.stdout.write(f"hello {name} {sys.stdin.isatty()}\\n")
            breakpoint()
            """
        )
        job = terminal.start(unirun, UNIRUN, train)
        terminal.until(b"name? ")
        terminal.type(b"bob\n")
        terminal.until(b"hello bob True\r\n")
        terminal.until(b"(Pdb) ")
        terminal.type(b"p name * 2\n")
        terminal.until(b"'bobbob'\r\n(Pdb) ")
        terminal.type(b"c\n")
        terminal.until(b"succeeded after")
        assert job.end().code == 0

    def test_ctrl_c_on_the_terminal_interrupts_a_worker_that_reads(
        self, unirun: Unirun, script: Script, terminal: Terminal
    ) -> None:
        job = terminal.start(unirun, UNIRUN, *EXEC, script("input('name? ')"))
        terminal.until(b"name? ")
        terminal.type(b"\x03")
        terminal.until(b"unirun: SIGINT: stopping")
        assert job.end().code == 130

    def test_a_background_job_does_not_read_from_the_terminal(
        self, unirun: Unirun, script: Script, terminal: Terminal
    ) -> None:
        train = script(READ)
        shell = terminal.start(unirun, "bash", "-c", f"set -m; {UNIRUN} -q {' '.join(EXEC)} {train} & wait")
        terminal.until(b"''\r\n")
        assert gone(shell.pid, WAIT_TIMEOUT)
        assert shell.popen.wait() == 0
