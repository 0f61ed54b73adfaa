"""The spans of a worker beside those of its calls."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unirun.launcher import tracing
from unirun.observe.spans import SPANS, TRACE, TRACED_COLLECTIVES, Spans, TraceSpan, read_spans

pytestmark = pytest.mark.leaves

NO_TIMES = {"time_created_ns": 10, "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}


def entry(number: int, **about: Any) -> dict[str, Any]:
    """An entry of torch's flight recorder."""
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": False,
        "state": "scheduled",
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        **NO_TIMES,
        **about,
    }


@pytest.fixture
def own(tmp_path: Path) -> Spans:
    return Spans({TRACE: TRACED_COLLECTIVES, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})


class TestCollectives:
    def test_each_is_written_once_when_it_is_over(
        self, own: Spans, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        on_a_gpu = {
            "time_created_ns": 11,
            "time_discovered_started_ns": 12,
            "time_discovered_completed_ns": 20,
        }
        # Of two recorders, each with numbers of its own.
        entries = [entry(4, retired=True, record_id=0), entry(5, record_id=0, **on_a_gpu)]
        monkeypatch.setattr(tracing, "recorded", lambda: {"entries": entries})
        trace = tracing.CollectiveTrace(own)
        trace.look(True)
        entries[1]["state"] = "completed"
        trace.look(True)
        trace.look(True)
        own.close()
        assert [*read_spans(tmp_path / SPANS)] == [
            TraceSpan("collective", "all_reduce 4 of default_pg [4, 2] Float", 10, 10),
            TraceSpan("collective", "all_reduce 5 of default_pg [4, 2] Float", 12, 20),
        ]

    def test_the_recorder_is_read_now_and_then_and_at_the_end(
        self, own: Spans, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks, now = 0, 100.0

        def look() -> dict[str, Any]:
            nonlocal looks
            looks += 1
            return {}

        monkeypatch.setattr(tracing, "recorded", look)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        trace = tracing.CollectiveTrace(own)
        for _ in range(10):
            trace.look(False)
            now += tracing.COLLECTIVES_INTERVAL / 5
        assert looks == 2
        trace.look(True)
        assert looks == 3
        monkeypatch.undo()
        own.close()


@pytest.mark.starts_processes
def test_the_start_of_a_process_is_known_to_a_hundredth_of_a_second() -> None:
    began = time.time_ns()
    code = "from unirun.launcher.tracing import started; import time; print(started(), time.time_ns())"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    start, end = map(int, text.split())
    assert began <= start < end
    # Its imports take longer than the error.
    assert start < began + (end - began) / 2


FUNCTION = """
def init_process_group(backend=None):
    "Form a group."
    if backend == "none":
        raise ValueError(backend)
    return backend
"""


class TestRendezvous:
    @pytest.fixture
    def package(
        self, own: Spans, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[tuple[Path, Spans]]:
        """A package that has the function from its module, as torch.distributed has."""
        folder = tmp_path / "formed"
        folder.mkdir()
        (folder / "__init__.py").write_text("from .c10d import init_process_group\n")
        (folder / "c10d.py").write_text(FUNCTION)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(tracing, "PACKAGE", "formed")
        monkeypatch.setattr(tracing, "C10D", "formed.c10d")
        monkeypatch.setattr(tracing, "spans", lambda: own)
        finders = sys.meta_path[:]
        yield tmp_path, own
        sys.meta_path[:] = finders
        for name in ("formed", "formed.c10d"):
            sys.modules.pop(name, None)

    @pytest.mark.parametrize("imported", [True, False])
    def test_it_is_a_span_whether_the_module_is_imported_before_or_later(
        self, package: tuple[Path, Spans], imported: bool
    ) -> None:
        folder, own = package
        if imported:
            importlib.import_module("formed")
        tracing.trace_rendezvous()
        module: ModuleType = importlib.import_module("formed")
        assert module.init_process_group("gloo") == "gloo"
        with pytest.raises(ValueError, match="none"):
            importlib.import_module("formed.c10d").init_process_group(backend="none")
        own.close()
        found = [(each.kind, each.name, each.failed) for each in read_spans(folder / SPANS)]
        assert found == [("life", "rendezvous", False), ("life", "rendezvous", True)]
        assert module.init_process_group.__doc__ == "Form a group."
