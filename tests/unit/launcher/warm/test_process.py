"""Memory of a warm process before it waits for jobs, the variables that it notes while it imports, and its end."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conftest import descriptors
from unirun.launcher.warm import process
from unirun.launcher.warm.process import LOADED_FILES_POLL_INTERVAL, STALE, WarmProcess, _Noting, leave_code

ROOT = Path(__file__).parents[4]


def of_files() -> int:
    """File-backed resident memory of this process in kB."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {row[0]: int(row[1]) for row in rows}
    return sizes["Rss:"] - sizes["Anonymous:"]


def test_leave_code_keeps_code_with_text_relocations(tmp_path: Path) -> None:
    """As in a library with text relocations."""
    (tmp_path / "code").write_bytes(b"\0" * mmap.PAGESIZE)
    with (tmp_path / "code").open("r+b") as file:
        code = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    code[:5] = b"moved"
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    assert (
        ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC)
        == 0
    )
    leave_code()
    assert code[:5] == b"moved"


def test_leave_code_unmaps_code_that_is_mapped_again_when_it_runs() -> None:
    before = of_files()
    leave_code()
    assert of_files() < before
    assert sorted(str(number) for number in range(3)) == ["0", "1", "2"]


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Noting]]:
    """The environment of this process, whose reads are noted."""
    env: Any = os.environ
    monkeypatch.setattr(_Noting, "names", set())
    monkeypatch.setattr(_Noting, "every", False)
    env.__class__ = _Noting
    yield _Noting
    env.__class__ = os._Environ


def test_one_variable_is_noted(noting: type[_Noting]) -> None:
    assert os.environ.get("PATH")
    assert (noting.names, noting.every) == ({"PATH"}, False)


def test_a_copy_notes_all_variables(noting: type[_Noting]) -> None:
    copy = dict(os.environ)
    assert (noting.names, noting.every) == (set(copy), True)


def test_libraries_that_look_for_variables_with_their_prefix_note_nothing(noting: type[_Noting]) -> None:
    importlib.reload(importlib.import_module("fsspec.config"))
    importlib.reload(importlib.import_module("tqdm.std"))
    assert (noting.names - {"FSSPEC_CONFIG_DIR", "HOME"}, noting.every) == (set(), False)


class Over(BaseException):
    """The end of a warm process."""


class SameFiles:
    """Loaded files that nobody replaces."""

    def replaced(self) -> str:
        """None."""
        return ""


class Lending(WarmProcess):
    """A warm process in simulated time. Its jobs are pairs of when they come and when they end."""

    def __init__(self, folder: Path, idle: float, jobs: list[tuple[float, float]]) -> None:
        super().__init__(folder, idle, 0, SameFiles())  # type: ignore[arg-type]
        self._selector.close()
        self._selector = self  # type: ignore[assignment]
        self.now = 0.0
        self._events = sorted(
            event
            for number, (comes, ends) in enumerate(jobs, 1)
            for event in ((comes, 0, number), (ends, number, 0))
        )

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def select(self, timeout: float) -> list[tuple[Any, int]]:
        """The next event, if it comes in time."""
        if not self._events or self._events[0][0] > self.now + timeout:
            self.now += timeout
            return []
        self.now, ends, self._comes = self._events.pop(0)
        return [(SimpleNamespace(data=ends or None), 1)]

    def _accept(self) -> None:
        self._guards.add(self._comes)

    def _reap(self, handle: int) -> None:
        self._guards.remove(handle)

    def _end(self) -> NoReturn:
        self._listener.close()
        raise Over


JOBS = st.lists(st.tuples(st.floats(0.0, 2000.0), st.floats(0.0, 9000.0)), max_size=6)


@given(JOBS, st.sampled_from((10.0, 500.0)))
def test_a_warm_process_ends_when_it_was_idle_for_long_and_not_while_it_lends(
    pauses: list[tuple[float, float]], idle: float
) -> None:
    jobs, comes = [], 0.0
    for pause, lasts in pauses:
        comes += pause
        jobs.append((comes, comes + lasts))
    over = idle
    for comes, ends in jobs:
        if comes <= over:
            over = max(over, ends + idle)
    handler = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        warm = Lending(Path(folder), idle, jobs)
        signal.signal(signal.SIGTERM, handler)
        patch.setattr(process, "time", warm)
        with pytest.raises(Over):
            warm.serve()
    # The end of a job is noticed at once; the files are looked at in between.
    assert over - 1e-6 <= warm.now <= over + LOADED_FILES_POLL_INTERVAL


def test_a_fork_has_no_descriptor_of_the_warm_process(tmp_path: Path) -> None:
    before, handler = descriptors(), signal.getsignal(signal.SIGTERM)
    warm = WarmProcess(tmp_path, 1.0, os.getpid(), SameFiles())  # type: ignore[arg-type]
    # Two jobs that run.
    warm._guards |= {os.pidfd_open(os.getpid()) for _ in range(2)}
    warm._forget()
    signal.signal(signal.SIGTERM, handler)
    assert descriptors() == before


class Ending(WarmProcess):
    """A warm process whose end is an error."""

    def _end(self) -> NoReturn:
        raise Over


@pytest.mark.starts_processes
@pytest.mark.parametrize("end", [0, 1, STALE, -STALE])
def test_a_warm_process_ends_when_a_fork_has_found_other_files_and_not_when_one_fails(
    end: int, tmp_path: Path
) -> None:
    """Agents may go away while they are served; the signal that has killed a fork is no exit code."""
    handler = signal.getsignal(signal.SIGTERM)
    warm = Ending(tmp_path, 1.0, 0, SameFiles())  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, handler)
    how = f"os._exit({end})" if end >= 0 else f"os.kill(os.getpid(), {-end})"
    pid = os.posix_spawn(sys.executable, ["python", "-S", "-c", f"import os; {how}"], os.environ)
    handle = os.pidfd_open(pid)
    warm._guards.add(handle)
    warm._selector.register(handle, selectors.EVENT_READ, handle)
    if end == STALE:
        with pytest.raises(Over):
            warm._reap(handle)
    else:
        warm._reap(handle)
    assert not warm._guards
    assert handle not in warm._selector.get_map()
    warm._selector.close()
    warm._listener.close()


PREPARE = """
import sys
from unirun.launcher.warm.process import prepare
description, _, _ = prepare(sys.argv[1:], 1.0)
print(description.names is None, "ITS_OWN" in (description.names or ()), "ITS_OWN" in description.variables)
print("OF_THE_SHELL" in description.variables, type(__import__("os").environ).__name__)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("", "False False False\nFalse _Environ"),
        ("os.environ.get('ITS_OWN')", "False True True\nFalse _Environ"),
        # Any of them may count for what it does with them.
        ("dict(os.environ)", "True False True\nTrue _Environ"),
        ("[*os.environ]; os.environ.get('ITS_OWN')", "True False True\nTrue _Environ"),
    ],
)
def test_variables_count_that_a_preloaded_module_has_read(tmp_path: Path, code: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(f"import os\n{code}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "ITS_OWN": "1", "OF_THE_SHELL": "2"}
    # A file that is as old as the process may have changed while it was loaded.
    time.sleep(0.05)
    done = subprocess.run(
        [sys.executable, "-B", "-c", PREPARE, "mine"], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == told, done.stderr
