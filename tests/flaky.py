"""A plugin of pytest that runs failed tests once more, alone, and names those that pass then as flaky.

``-p tests.flaky`` remembers how a run ended. ``-p tests.flaky --again --last-failed --last-failed-no-failures none`` is
the second run. It passes when each test that had failed passes. It runs nothing, and ends with `NOTHING_RUN`, when tests
have not just failed: after an error of the collection, an interruption, or the crash of a process of `tests.forked`.
"""

from __future__ import annotations

import pytest

NOTHING_RUN = 9
"""An exit code that pytest does not have."""

_ENDED, _FAILED = "flaky/ended", "cache/lastfailed"
"""Keys in pytest's cache; the second one is that of ``--last-failed``."""

_PHASES = ("setup", "call", "teardown")
"""The phases of pytest's reports; the report of a test in which its process has crashed has another one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--again", action="store_true", help="the second run of tests.flaky")


def pytest_configure(config: pytest.Config) -> None:
    """Choose between the two runs."""
    config.pluginmanager.register(SecondRun(config) if config.getoption("again") else FirstRun(config))


class FirstRun:
    """Writes down how the run ended."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._crashed = config, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the crash of a process."""
        self._crashed |= str(report.when) not in _PHASES

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write down how the run ended."""
        self._cache().set(_ENDED, {"status": int(exitstatus), "crashed": self._crashed})

    def _cache(self) -> pytest.Cache:
        assert self._config.cache is not None, "it is the cache that says what has failed"
        return self._config.cache


class SecondRun:
    """Fails unless all tests that had failed pass; names those that pass."""

    def __init__(self, config: pytest.Config) -> None:
        assert config.cache is not None, "it is the cache that says what has failed"
        self._ended = config.cache.get(_ENDED, {"status": None, "crashed": False})
        self._wanted = {*config.cache.get(_FAILED, {})}
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        """End at once when running again would prove nothing."""
        status = self._ended["status"]
        if self._ended["crashed"]:
            pytest.exit("not run again: a process of the tests has crashed", NOTHING_RUN)
        if status != pytest.ExitCode.TESTS_FAILED or not self._wanted:
            pytest.exit(f"not run again: the first run has ended with {status}", NOTHING_RUN)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run only the tests that had failed: pytest runs all tests when it finds none of those."""
        items[:] = [item for item in items if item.nodeid in self._wanted]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the names of tests that have passed, and of those that have failed."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail also when a failed test was not run again."""
        if exitstatus == pytest.ExitCode.OK and self._wanted - self._flaky:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name flaky and lost tests before the last line of pytest."""
        for nodeid in sorted(self._flaky):
            terminalreporter.write_line(f"flaky: {nodeid} has failed, and passes alone")
        for nodeid in sorted(self._wanted - self._passed - self._failed):
            terminalreporter.write_line(f"failed, and not found again: {nodeid}")

    @property
    def _flaky(self) -> set[str]:
        return self._passed - self._failed
