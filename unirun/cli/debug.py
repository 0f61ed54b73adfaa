"""``unirun debug JOB ROLE:RANK``: pdb in a rank of a running job, with this terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import Any

from unirun.cli.inject import one_rank
from unirun.errors import JobError, RendezvousError, StoreError, WireError
from unirun.launcher.foreground.terminal import say, warn
from unirun.rendezvous.masters import call_master
from unirun.wire.blocking import BlockingStream
from unirun.wire.messages import Attach, Debug, DebugInput
from unirun.wire.reports import DebugEnded, DebugOutput, Message

POLL_INTERVAL = 0.2
"""Seconds between two looks whether Ctrl-C was pressed."""

NATIVE_NOTICE_DELAY = 2.0
"""Seconds without an answer after which the user is told why."""


def main(options: Any) -> int:
    """Debug a rank. Returns 0 when the user has left, 1 when the rank has ended. Raises `JobError`, `UsageError`."""
    job, role, rank = one_rank(options, "debug")
    with contextlib.suppress(ImportError):
        # Editing and history for `input`.
        import readline  # noqa: F401
    try:
        with call_master(job) as master:
            master.send(Attach())
            master.send(Debug(role, rank))
            return Conversation(master, f"{role}:{rank}").run()
    except (StoreError, WireError, RendezvousError) as error:
        raise JobError(f"the master is gone: {error}", f"{role}:{rank} goes on; try again") from error


class Conversation:
    """The user of a debugger, and the debugger of the rank `who` behind the `master`."""

    def __init__(self, master: BlockingStream, who: str) -> None:
        self._master, self._who = master, who
        self._text = ""
        self._met = False
        # The times that Ctrl-C was pressed since the last prompt, and those of which the program was told.
        self._interrupts = self._asked = 0

    def run(self) -> int:
        """Talk until one of the two leaves. Returns the exit code. Raises `JobError`, `WireError`."""
        usual = signal.signal(signal.SIGINT, self._interrupted)
        try:
            while (code := self._next()) is None:
                pass
            return code
        finally:
            signal.signal(signal.SIGINT, usual)

    def _interrupted(self, *_signal: Any) -> None:
        self._interrupts += 1

    def _next(self) -> int | None:
        """Take the next message. Returns the exit code when it is the last one."""
        word = self._receive()
        if word is None:
            self._leave()
            return 0
        if isinstance(word, DebugEnded):
            sys.stdout.write(self._text)
            if not word.problem:
                return 0
            if not self._met:
                raise JobError(f"{self._who} is not debugged: {word.problem}", "see unirun status")
            warn(f"{self._who}: {word.problem}")
            return 1
        if isinstance(word, DebugOutput):
            self._met = True
            self._text += word.text
            if word.asks and not self._answer():
                return 0
        return None

    def _receive(self) -> Message | None:
        """The next message; None if the user wants to leave. Ctrl-C stops the program, and a second one leaves it."""
        began, told = time.monotonic(), False
        while True:
            if self._interrupts > self._asked:
                if self._asked or not self._met:
                    return None
                self._asked = self._interrupts
                self._master.send(DebugInput(control="interrupt"))
            try:
                word = self._master.receive(POLL_INTERVAL)
            except RendezvousError:
                waits = not self._met or self._asked
                if waits and not told and time.monotonic() - began > NATIVE_NOTICE_DELAY:
                    told = True
                    warn(
                        f"{self._who} is in native code; it stops when it comes to Python code (Ctrl-C leaves)"
                    )
                continue
            if isinstance(word, DebugOutput | DebugEnded):
                return word

    def _answer(self) -> bool:
        """Send the line that the user types. Returns False if there is none, and the rank goes on."""
        body, newline, prompt = self._text.rpartition("\n")
        self._text = ""
        sys.stdout.write(body + newline)
        sys.stdout.flush()
        while True:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                line = input(prompt)
            except KeyboardInterrupt:
                # As in a shell: the line is given up.
                sys.stdout.write("\n")
                continue
            except EOFError:
                sys.stdout.write("\n")
                self._leave()
                return False
            finally:
                signal.signal(signal.SIGINT, self._interrupted)
                self._interrupts = self._asked = 0
            self._master.send(DebugInput(line))
            return True

    def _leave(self) -> None:
        self._master.send(DebugInput(control="detach"))
        say(f"{self._who} goes on")
