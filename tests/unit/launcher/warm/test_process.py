"""Memory of a warm process before it waits for jobs."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from unirun.launcher.warm.process import leave_code


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
