"""A debugger in a worker: pdb, whose terminal is that of ``unirun debug``, over the agent and the master.

`unirun.launcher.debugging` is the agent's side. The stream between the two is a connection of its own, on which the
worker proves the job's token as on its link. The thread that is debugged reads and writes it; all others go on.
"""

from __future__ import annotations

import io
import os
import pdb
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from unirun.errors import RendezvousError, UnirunError, UsageError
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.blocking import BlockingStream
from unirun.wire.credentials import load_credentials
from unirun.wire.messages import Debug, DebugInput
from unirun.wire.progress import LAST, page
from unirun.wire.reporting import report
from unirun.wire.reports import DebugEnded, Debuggee, DebugOutput, Message

BREAKPOINT_TIMEOUT = 600.0
"""Seconds that a breakpoint waits for ``unirun debug``, by default."""

ACCEPT_TIMEOUT = 5.0
"""Seconds in which the agent accepts the answer to its own request."""

MAX_OUTPUT = 1 << 16
"""Characters of output in one message."""

HIDDEN = ("unirun.launcher.debugger", "unirun.launcher.requests")
"""Modules in which a debugger never stops."""


class Terminal(io.TextIOBase):
    """The other end of a debugger as a text file: what is written is sent when a line is asked for."""

    def __init__(self, stream: BlockingStream) -> None:
        super().__init__()
        self._stream, self._text = stream, ""
        self.busy = False
        """True while the stream is used: an exception would leave half a message there."""

    def write(self, text: str) -> int:
        """Write, now or with the next text."""
        self._text += text
        if len(self._text) > MAX_OUTPUT:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what is written. Raises `ConnectionLost`."""
        self._send(asks=False)

    def readline(self, _size: Any = -1, /) -> str:  # type: ignore[override]
        """The next line; empty at the end, when the other end has left."""
        self._send(asks=True)
        while True:
            self.busy = True
            try:
                word = self._stream.receive()
            except UnirunError:
                return ""
            finally:
                self.busy = False
            if isinstance(word, DebugInput) and word.control == "line":
                return f"{word.line}\n"

    def _send(self, *, asks: bool) -> None:
        text, self._text = self._text, ""
        self.busy = True
        try:
            for at in range(0, len(text), MAX_OUTPUT):
                self._stream.send(DebugOutput(text[at : at + MAX_OUTPUT]))
            if asks:
                self._stream.send(DebugOutput("", asks=True))
        finally:
            self.busy = False


class Debugger(pdb.Pdb):
    """pdb for one worker and one command. It never ends the program: to leave it is to let the worker go on."""

    def __init__(self, stream: BlockingStream) -> None:
        self.terminal = Terminal(stream)
        super().__init__(
            stdin=self.terminal,  # type: ignore[arg-type]
            stdout=self.terminal,  # type: ignore[arg-type]
            skip=HIDDEN,
            nosigint=True,
            readrc=False,
        )
        self._stream = stream
        self._thread = threading.get_ident()
        self._entered: FrameType | None = None
        self.asks = False

    def hold(self, frame: FrameType | None) -> None:
        """Stop here: ask for commands at `frame`, which is below this one on the stack."""
        self._entered = frame
        self.set_trace()
        # It stops before this line.
        self._entered = None

    @property
    def here(self) -> bool:
        """True in the thread that is debugged."""
        return self._thread == threading.get_ident()

    def interrupt(self, frame: FrameType | None) -> None:
        """The user wants to stop the program, or the expression that a command evaluates."""
        if not self.here or self.terminal.busy:
            return
        if self.asks:
            raise KeyboardInterrupt
        self.hold(frame)

    def dispatch_line(self, frame: FrameType) -> Any:
        """As `Bdb` does; the first line is that of the worker's code, which was interrupted."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            self.interaction(entered, None)
            return self.trace_dispatch
        return super().dispatch_line(frame)

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Ask for commands until one lets the program go on. A user who has gone has left the debugger."""
        self.asks = True
        try:
            super().interaction(*args, **kwargs)
            self.terminal.flush()
        except UnirunError:
            self.leave()
        except KeyboardInterrupt:
            # It was for the command that has ended meanwhile, and is not for the program.
            pass
        finally:
            self.asks = False
            # What the user took is no delay of the program.
            page().fields[LAST] = time.monotonic_ns()

    def leave(self) -> None:
        """Let the worker go on, without a trace function and without breakpoints."""
        global _debugger
        self.clear_all_breaks()
        self.set_continue()
        # The agent sees the end of the stream if it cannot be told.
        try:
            self.terminal.flush()
            self._stream.send(DebugEnded())
        except UnirunError:
            pass
        self._stream.close()
        if _debugger is self:
            _debugger = None

    def do_quit(self, arg: str) -> bool:
        """q(uit) | exit | Ctrl-D
        Leave the debugger; the program goes on.
        """
        self.leave()
        return True

    do_q = do_exit = do_EOF = do_quit

    def do_run(self, arg: str) -> None:
        """A rank is started again by unirun alone: see `unirun inject` and the restarts of its role."""
        self.error("a rank is not started again by its debugger")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """The interpreter of code.interact needs a terminal of the process, and there is none here."""
        self.error("there is no terminal for an interpreter here; type expressions at this prompt")

    def abandon(self) -> None:
        """In a fork: the stream is that of the parent."""
        self._stream.close()


_debugger: Debugger | None = None
"""The debugger of this process; None without one."""

_turn = threading.Lock()
"""Held by the thread that waits at a breakpoint, or has come to one."""


def attach(number: int, frame: FrameType | None) -> None:
    """Let the command with the request `number` debug this process, which it has interrupted at `frame`. For the
    handler of a signal."""
    global _debugger
    if _debugger is not None:
        _debugger.interrupt(frame)
        return
    try:
        stream = _open(Debuggee(_worker(), number))
        stream.receive(ACCEPT_TIMEOUT)
    except (UnirunError, OSError):
        # The command has left meanwhile.
        return
    _debugger = Debugger(stream)
    _debugger.hold(frame)


def breakpoint(timeout: float = BREAKPOINT_TIMEOUT) -> None:
    """Wait here for ``unirun debug JOB role:rank``, which debugs this rank with pdb while the others go on.

    The console says where it waits. After `timeout` seconds without anybody it goes on. The hangs of the role do not
    count meanwhile, nor do the deadlines of calls to it. Outside of a job it is Python's own `breakpoint`.
    """
    global _debugger
    if not timeout > 0:
        raise UsageError(f"breakpoint(timeout={timeout!r})", "give seconds above 0")
    frame = sys._getframe(1)
    if "UNIRUN_SOCKET" not in os.environ:
        pdb.Pdb().set_trace(frame)
        return
    deadline = time.monotonic() + timeout
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if not _turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
        report(
            f"unirun: the breakpoint at {where} is passed: another thread has waited at one for {timeout:g} s"
        )
        return
    try:
        if _debugger is not None:
            if not _debugger.here:
                report(
                    f"unirun: the breakpoint at {where} is passed: another thread of this rank is debugged"
                )
            _debugger.interrupt(frame)
            return
        patience = max(deadline - time.monotonic(), 0.0)
        stream = _open(Debuggee(_worker(), where=where, patience=patience))
        try:
            word = stream.receive(patience)
        except RendezvousError:
            report(f"unirun: nobody has come to the breakpoint at {where} within {timeout:g} s")
            word = None
        except UnirunError as error:
            report(f"unirun: the breakpoint at {where} is passed: {error}")
            word = None
        page().fields[LAST] = time.monotonic_ns()
        if not isinstance(word, Debug):
            stream.close()
            return
        _debugger = Debugger(stream)
        _debugger.hold(frame)
    finally:
        _turn.release()


def _worker() -> WorkerId:
    environ = os.environ
    return WorkerId(environ["UNIRUN_ROLE"], int(environ["UNIRUN_RANK"]), int(environ["UNIRUN_INCARNATION"]))


def _open(first: Message) -> BlockingStream:
    """A stream of its own to the agent. Raises `WireError`, `RendezvousError`, `JobError`."""
    path = Path(os.environ["UNIRUN_SOCKET"])
    stream = BlockingStream.connect(UnixAddress.here(path), load_credentials(path.parent))
    stream.send(first)
    return stream


def _forget_in_fork() -> None:
    global _debugger, _turn
    if _debugger is not None:
        _debugger.abandon()
        sys.settrace(None)
    _debugger, _turn = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_fork)
