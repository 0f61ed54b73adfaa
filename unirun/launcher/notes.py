"""The notes that an agent adds to a spawner's news that a worker has ended."""

from __future__ import annotations

import os
import signal

from unirun.launcher.ends import TAIL_BYTES, last_words
from unirun.launcher.memory_kills import explain, kills_so_far
from unirun.launcher.state import AgentState
from unirun.wire.messages import Message
from unirun.wire.spawning import Reaped


class Notes:
    """The notes on the ends of one agent's workers."""

    def __init__(self) -> None:
        self._kills = kills_so_far()

    def kill(self, state: AgentState, message: Message) -> str:
        """A note for the report on a SIGKILL that unirun has not sent; empty when nothing is known of it."""
        if not isinstance(message, Reaped) or message.signal != signal.SIGKILL:
            return ""
        worker = state.workers.get(message.id)
        if worker is None or worker.cause != "own":
            return ""
        before, self._kills = self._kills, kills_so_far()
        return explain(worker.pid, before, self._kills)


def tail(state: AgentState, message: Message) -> str:
    """The last lines of the stderr of a worker that failed; of a program, which may log to either, those of the file
    that it has written to last, whatever its exit code is."""
    if not isinstance(message, Reaped) or message.id not in state.workers:
        return ""
    request = state.workers[message.id].request
    program = request.kind == "program"
    if message.code == 0 and not program:
        return ""
    names = ("stdout.log", "stderr.log") if program else ("stderr.log",)
    try:
        paths = [os.path.join(request.logs, request.folder, name) for name in names]
        # An empty file is as old as the process.
        with open(
            max(paths, key=lambda path: (os.path.getsize(path) > 0, os.path.getmtime(path))), "rb"
        ) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return last_words(file.read().decode(errors="replace"))
    except OSError:
        return ""
