"""A plugin of pytest that runs the tests in forks of the process that has imported and collected them.

``-p tests.forked --processes 4``: four of them. The tests of a file run in one process, so that shared fixtures are made
once. Files are handed out one after the other, in the order in which they were collected, as processes get through theirs.
A process that ends amid a test fails it, and another one runs the tests that it had left. With 0, the tests run as without
the plugin.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from unirun.launcher.process import die_with_parent

CRASHED: Any = "crashed"
"""The phase of the report of a test in which its process has ended, which pytest does not have."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--processes", type=int, default=0, help="run the tests in so many forks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forks. Errors of the collection, and the list of the tests, are pytest's own."""
    count = session.config.getoption("processes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    Forks(session).run(count)
    return True


class Fork:
    """A fork as its parent sees it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self.handle = os.pidfd_open(pid)
        """Tells of its end, also when a process that it has forked holds its connection."""
        self.file: deque[int] = deque()
        """The tests of its file that were not handed out."""
        self.tests: deque[int] = deque()
        """The test that it runs, and the one after that."""

    def collect(self) -> int:
        """Wait for its end. Returns the exit code, negative for a signal."""
        self.connection.close()
        os.close(self.handle)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Forks:
    """The tests of a session, as numbers in its list, and the forks that run them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config, self._hook = session, session.config, session.config.hook
        files: dict[object, deque[int]] = {}
        for number, item in enumerate(session.items):
            files.setdefault(item.path, deque()).append(number)
        self._files = deque(files.values())
        self._forks: list[Fork] = []
        self._begun = 0

    def run(self, count: int) -> None:
        """Run all tests in `count` processes."""
        session = self._session
        # Their directories are below that of this process.
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(min(count, len(self._files))):
                self._start()
            while self._forks:
                ready = wait([each for fork in self._forks for each in (fork.connection, fork.handle)])
                for fork in [*self._forks]:
                    if fork.connection in ready:
                        self._hear(fork)
                    elif fork.handle in ready:
                        self._ended(fork)
        finally:
            # One that is left ends when it asks for its next test.
            for fork in self._forks:
                fork.connection.close()
            for fork in self._forks:
                fork.collect()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _start(self) -> None:
        parent, self._begun = os.getpid(), self._begun + 1
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            for connection in (ours, *(fork.connection for fork in self._forks)):
                connection.close()
            run_fork(self._session, theirs, f"process-{self._begun}", parent)
        theirs.close()
        self._forks.append(Fork(pid, ours))

    def _hear(self, fork: Fork) -> None:
        try:
            kind, content = fork.connection.recv()
        except (EOFError, OSError):
            self._ended(fork)
            return
        match kind:
            case "next":
                # One that is gone is noticed when it is heard next.
                with contextlib.suppress(OSError):
                    fork.connection.send(self._next(fork))
            case "report":
                self._log(self._hook.pytest_report_from_serializable(config=self._config, data=content))
            case "start":
                self._hook.pytest_runtest_logstart(**content)
            case "finish":
                fork.tests.popleft()
                self._hook.pytest_runtest_logfinish(**content)
            case "warning":
                # The category may be a class of the fork alone.
                warning, where = content
                warning["category"] = type(warning["category"], (Warning,), {})
                message = warnings.WarningMessage(**warning)
                self._hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **where})
            case "stop":
                self._session.shouldstop = content
            case _:
                raise RuntimeError(f"an error outside of tests in process {fork.pid}:\n{content}")

    def _log(self, report: pytest.TestReport) -> None:
        self._hook.pytest_runtest_logreport(report=report)

    def _next(self, fork: Fork) -> int | None:
        """The next test of a fork, which is of another file when its own is through."""
        if self._session.shouldfail or self._session.shouldstop:
            return None
        if not fork.file and self._files:
            fork.file = self._files.popleft()
        if not fork.file:
            return None
        fork.tests.append(fork.file.popleft())
        return fork.tests[-1]

    def _ended(self, fork: Fork) -> None:
        self._forks.remove(fork)
        if (code := fork.collect()) == 0:
            return
        if not fork.tests:
            raise RuntimeError(f"process {fork.pid} has ended with {code} after its tests")
        item = self._session.items[fork.tests.popleft()]
        text = f"its process has ended with {code}"
        self._log(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, CRASHED))
        if left := deque([*fork.tests, *fork.file]):
            self._files.appendleft(left)
        if self._files:
            self._start()


class Reports:
    """Sends the reports of a fork to its parent. It has the place of pytest's own terminal."""

    def __init__(self, send: Callable[[object], None], config: pytest.Config) -> None:
        self._send, self._config = send, config
        self.begun = False
        """False while pytest repeats what the parent has reported of the collection."""
        self._tw = config.get_terminal_writer()
        """For pytest-timeout, which shows stacks: what is written in a test is captured."""

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self._send(("start", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self._send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        if not self.begun:
            return
        warning = {
            "message": str(warning_message.message),
            "category": warning_message.category.__name__,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
        }
        self._send(("warning", (warning, {"when": when, "nodeid": nodeid, "location": location})))


def run_fork(session: pytest.Session, parent: Connection, name: str, pid: int) -> NoReturn:
    """Run the tests that the parent, process `pid`, hands out, in a directory called `name`, and end."""
    code = 1
    try:
        die_with_parent(pid, signal.SIGINT)
        own_state(session.config, parent.send, name)
        run_tests(session, parent)
        code = 0
    except Exception:  # noqa: BLE001 - the parent raises it
        with contextlib.suppress(OSError):
            parent.send(("error", traceback.format_exc()))
    finally:
        os._exit(code)


def own_state(config: pytest.Config, send: Callable[[object], None], name: str) -> None:
    """Give this fork its own reports, captured output and directory: it has those of its parent."""
    plugins: Any = config.pluginmanager
    reports = Reports(send, config)
    plugins.unregister(name="terminalreporter")
    plugins.register(reports, "terminalreporter")
    reports.begun = True
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    directories: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    directories._basetemp = directories.getbasetemp() / name
    directories.getbasetemp().mkdir(mode=0o700)


def run_tests(session: pytest.Session, parent: Connection) -> None:
    """Run one test after the other until the parent has no more. Fixtures are kept for the test after."""

    def following() -> pytest.Item | None:
        parent.send(("next", None))
        number = parent.recv()
        return None if number is None else session.items[number]

    item = following()
    try:
        while item is not None:
            after = following()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail or session.shouldstop:
                break
            item = after
    except pytest.exit.Exception as error:
        parent.send(("stop", str(error)))
    finally:
        session._setupstate.teardown_exact(None)
