"""`unirun.serve`: a script serves an object, whose methods other roles call."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from unirun.errors import ChannelError, UnirunError
from unirun.roles.calls.dispatcher import Dispatcher
from unirun.roles.calls.policy import invocations
from unirun.roles.context import init
from unirun.roles.peers import Peers
from unirun.wire.reporting import report_error
from unirun.wire.reports import WorkerError


class Server:
    """An object that is being served in a thread."""

    def __init__(self, dispatcher: Dispatcher, thread: threading.Thread) -> None:
        self._dispatcher, self._thread = dispatcher, thread

    def close(self) -> None:
        """Stop serving. The current call is waited for."""
        self._dispatcher.stop()
        self._thread.join()
        self._dispatcher.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(target: Any, *, block: bool = True) -> Server | None:
    """Let other roles call the public methods of `target`: ``ctx.role_group("rollout").generate(x)``.

    Calls run in this thread, one at a time, until every role that does not serve has ended; then `serve` returns None.
    With ``block=False`` it returns a `Server` at once, and calls run in a thread of their own until its `close`. May be
    called once per process. Raises `UsageError` without a launcher.
    """
    context = init()
    peers, session = context.peers, context.session
    dispatcher = session.dispatcher(target, invocations(target))
    session.serve(dispatcher)
    if not block:
        thread = threading.Thread(target=_serve_beside, args=(dispatcher, peers), daemon=True)
        thread.name = "unirun-serve"
        thread.start()
        return Server(dispatcher, thread)

    def changed() -> None:
        if callers_are_gone(peers):
            dispatcher.stop()

    peers.when_changed(changed)
    changed()
    dispatcher.serve()
    dispatcher.close()
    return None


def _serve_beside(dispatcher: Dispatcher, peers: Peers) -> None:
    """Serve in this thread. If nobody can connect to this process any more, it ends with an error. SystemExit in a
    method ends the program, as SIGTERM does."""
    try:
        dispatcher.serve()
    except SystemExit:
        signal.raise_signal(signal.SIGTERM)
    except ChannelError as error:
        trace = traceback.format_exc()
        report_error(error)
        with contextlib.suppress(UnirunError):
            peers.tell(WorkerError(f"{type(error).__name__}: {error}", trace, time.time()))
        os._exit(1)


def callers_are_gone(peers: Peers) -> bool:
    """Return True if there are workers that do not serve calls, and all of them have exited with code 0."""
    silent = [
        worker
        for role in peers.views()
        if not any(worker.phase == "serving" for worker in role.workers)
        for worker in role.workers
    ]
    return bool(silent) and all(worker.phase == "ended" for worker in silent)
