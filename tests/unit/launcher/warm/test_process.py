"""Memory of a warm process before it waits for jobs, and the variables that it notes while it imports."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unirun.launcher.warm.process import _Noting, leave_code


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
