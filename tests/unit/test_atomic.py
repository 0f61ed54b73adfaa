"""One writer for all files that are found by name; a process that is killed at any of its system calls."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from unirun import atomic
from unirun.atomic import PARTIAL
from unirun.errors import WeightsError
from unirun.experiments.recovery import RecoverInfo, Recovery
from unirun.observe.jobdir import JobDir
from unirun.train.callbacks import CsvLoggerCallback
from unirun.train.checkpoints.folder import STATE, Folder, Manifest
from unirun.weights import disk
from unirun.weights.publishing import Packing
from unirun.weights.tensors import layout_of, tensors_of

LONG = "new" * 50_000
"""More than one write(2) of a buffered file."""


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(f".*{PARTIAL}"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_and_directories_are_for_their_owner_alone(tmp_path: Path, umask: int) -> None:
    atomic.replace(tmp_path / "a", "text")
    with atomic.directory(tmp_path / "b") as draft:
        atomic.replace(draft / "c", b"bytes")
    assert (tmp_path / "a").read_text() == "text"
    assert (tmp_path / "b" / "c").read_bytes() == b"bytes"
    assert [mode(tmp_path / name) for name in ("a", "b", "b/c")] == [0o600, 0o700, 0o600]


def test_what_users_pass_on_has_the_mode_of_any_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.replace(tmp_path / "a", "text", private=False)
        with atomic.directory(tmp_path / "b", private=False):
            pass
    finally:
        os.umask(before)
    assert (mode(tmp_path / "a"), mode(tmp_path / "b")) == (0o640, 0o750)


@pytest.mark.parametrize("contended", [False, True])
def test_a_writer_that_fails_changes_nothing(tmp_path: Path, contended: bool) -> None:
    (tmp_path / "a").write_text("old")
    with contextlib.suppress(ZeroDivisionError), atomic.writing(tmp_path / "a", contended=contended) as file:
        file.write(b"n")
        raise ZeroDivisionError
    with contextlib.suppress(ZeroDivisionError), atomic.directory(tmp_path / "b"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("theirs")
    for name in ("a", f".a{PARTIAL}"):
        (tmp_path / name).symlink_to("other")
    atomic.replace(tmp_path / "a", "ours")
    assert (tmp_path / "other").read_text() == "theirs"
    assert not (tmp_path / "a").is_symlink()


def test_contended_names_are_written_by_several_at_once(tmp_path: Path) -> None:
    with atomic.writing(tmp_path / "a", contended=True) as first:
        with atomic.writing(tmp_path / "a", contended=True) as second:
            first.write(b"first")
            second.write(b"second")
        assert (tmp_path / "a").read_text() == "second"
    assert (tmp_path / "a").read_text() == "first"
    assert left(tmp_path) == []


def test_a_contended_writer_removes_what_killed_ones_have_left_and_nothing_of_those_that_write(
    tmp_path: Path,
) -> None:
    drafts = {name: tmp_path / f".{name}{PARTIAL}" for name in ("a.0", "a.1", "b.0")}
    for name, draft in drafts.items():
        draft.touch()
        then = time.time() - (0 if name == "a.1" else 2 * atomic.ABANDONED_SECONDS)
        os.utime(draft, (then, then))
    atomic.replace(tmp_path / "a", "", contended=True)
    assert [name for name, draft in drafts.items() if draft.exists()] == ["a.1", "b.0"]


def test_the_first_of_several_creates_a_file(tmp_path: Path) -> None:
    assert atomic.create(tmp_path / "a", "first")
    assert not atomic.create(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert mode(tmp_path / "a") == 0o600
    assert left(tmp_path) == []


def test_a_directory_does_not_replace_another_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kept").touch()
    with pytest.raises(OSError, match="not empty"), atomic.directory(tmp_path / "a"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]


@pytest.mark.parametrize("lasting", [False, True])
def test_lasting_files_are_on_the_disk_before_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    done: list[str] = []
    synced, renamed = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        synced(handle)

    def replace(draft: Path, path: Path) -> None:
        done.append(f"{path} has its name")
        renamed(draft, path)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic.replace(tmp_path / "a", "text", lasting=lasting)
    named = f"{tmp_path}/a has its name"
    assert done == ([f"{tmp_path}/.a{PARTIAL}", named, f"{tmp_path}"] if lasting else [named])


# A writer that is killed.


class Publisher(NamedTuple):
    """`prepare` makes the old content in a folder; `write` changes it to the new one; `read` is what its readers do."""

    prepare: Callable[[Path], object]
    write: Callable[[Path], object]
    read: Callable[[Path], object]


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _directory(root: Path) -> None:
    # What the attempt before has published, is there.
    if not (root / "a").exists():
        with atomic.directory(root / "a", lasting=True) as draft:
            for name in ("one", "two"):
                atomic.replace(draft / name, name)


def _checkpoint(root: Path, number: int) -> None:
    folder = Folder(str(root))
    folder.make(number)
    files = {STATE: folder.write(number, STATE, lambda file: file.write(LONG.encode()))}
    folder.commit(Manifest(number, 1, sharded=False, files=files))


def _infos(root: Path) -> list[int]:
    folder = Folder(str(root))
    infos = folder.infos()
    for each in infos:
        folder.verify(folder.manifest(each.number))
    return [each.number for each in infos]


def _recovered(root: Path, step: int) -> None:
    Recovery(root).prepare(step, ["actor@0"])
    Recovery(root).commit(RecoverInfo(step))


def _latest(root: Path) -> int:
    found = Recovery(root).latest()
    assert found is not None
    return found.step


def _metrics(root: Path, report: dict[str, Any]) -> None:
    logger = CsvLoggerCallback("metrics.csv")
    logger.start_training(str(root), {})
    logger.handle_result([report])
    logger.finish_training(None)


def _columns(root: Path) -> dict[str, str]:
    """The row that was there before, in the columns that there are."""
    header, row, *_ = (root / "metrics.csv").read_text().splitlines()
    return dict(zip(header.split(","), row.split(","), strict=True))


TENSORS = {number: tensors_of({"w": torch.full((64, 64), float(number))}) for number in (1, 2)}
PACKING = Packing(layout_of(TENSORS[1]), 1)


def _saved(root: Path, version: int) -> None:
    memory = torch.zeros(PACKING.size, dtype=torch.uint8)
    for piece in PACKING.layout["w"].pieces:
        PACKING.view(memory, "w", piece.box).fill_(float(version))
    disk.save(str(root), version, 0, 1, PACKING, memory)


def _loaded(root: Path) -> object:
    into = torch.zeros(64, 64)
    try:
        return disk.load(str(root), tensors_of({"w": into}), 1), into.unique().tolist()
    except WeightsError:
        return None


PUBLISHERS = {
    "a file that is replaced": Publisher(
        lambda root: atomic.replace(root / "a", "old"),
        lambda root: atomic.replace(root / "a", LONG),
        lambda root: _text(root / "a"),
    ),
    "a new file": Publisher(
        lambda root: None,
        lambda root: atomic.replace(root / "a", LONG, lasting=True, contended=True),
        lambda root: _text(root / "a"),
    ),
    "the first file of its name": Publisher(
        lambda root: None, lambda root: atomic.create(root / "a", LONG), lambda root: _text(root / "a")
    ),
    "a directory": Publisher(
        lambda root: None,
        _directory,
        lambda root: {path.name: path.read_text() for path in root.glob("a/*")},
    ),
    "the state of a job": Publisher(
        lambda root: JobDir(root).write_json("state.json", {"a": 1}),
        lambda root: JobDir(root).write_json("state.json", {"a": LONG}),
        lambda root: JobDir(root).read_json("state.json"),
    ),
    "a checkpoint of a trainer": Publisher(
        lambda root: _checkpoint(root, 1), lambda root: _checkpoint(root, 2), _infos
    ),
    "a checkpoint of a trial": Publisher(
        lambda root: _recovered(root, 1), lambda root: _recovered(root, 2), _latest
    ),
    "a column of metrics": Publisher(
        lambda root: _metrics(root, {"loss": 1}),
        lambda root: _metrics(root, {"loss": 2, "more": 3}),
        _columns,
    ),
    "a version of weights": Publisher(lambda root: _saved(root, 1), lambda root: _saved(root, 2), _loaded),
    "the first version of weights": Publisher(lambda root: None, lambda root: _saved(root, 2), _loaded),
}

TRACEME, SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
TRACESYSGOOD = 1

CHANGES_NO_FILE = frozenset(
    {
        *(0, 3, 4, 5, 6, 7, 8),  # read, close, stat, fstat, lstat, poll, lseek
        *(9, 10, 11, 12, 28),  # mmap, mprotect, munmap, brk, madvise
        *(13, 14, 16, 17, 21, 24),  # rt_sigaction, rt_sigprocmask, ioctl, pread64, access, sched_yield
        *(39, 72, 79, 89, 186, 202),  # getpid, fcntl, getcwd, readlink, gettid, futex
        *(
            217,
            228,
            262,
            267,
            318,
            332,
        ),  # getdents64, clock_gettime, newfstatat, readlinkat, getrandom, statx
    }
)
"""System calls of x86-64. A writer that is killed before one of them leaves the same as at the next call."""


class SyscallInfo(ctypes.Structure):
    """The head of ``struct ptrace_syscall_info``."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
    )


def changes_files(libc: ctypes.CDLL, child: int) -> bool:
    """Return True if `child`, which is stopped, is about to begin a call that may change a file."""
    info = SyscallInfo()
    size = ctypes.c_void_p(ctypes.sizeof(info))
    assert libc.ptrace(GET_SYSCALL_INFO, child, size, ctypes.byref(info)) > 0
    entry, x86_64 = info.op == 1, info.arch == 0xC000003E
    return entry and not (x86_64 and info.number in CHANGES_NO_FILE)


def killed_at_each_change(write: Callable[[], object]) -> Iterator[bool]:
    """Run `write` in processes that are killed before the first system call that may change a file, before the second, ….
    Yields once for each of them, and ends with one that was not killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    number, lives = 0, False
    while not lives:
        number += 1
        if not (child := os.fork()):
            _traced(libc, write)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            pytest.skip("this host allows no ptrace")
        libc.ptrace(SETOPTIONS, child, None, ctypes.c_void_p(TRACESYSGOOD))
        left = number
        while left and not lives:
            libc.ptrace(SYSCALL, child, None, None)
            _, status = os.waitpid(child, 0)
            if lives := os.WIFEXITED(status):
                assert os.waitstatus_to_exitcode(status) == 0
            else:
                left -= changes_files(libc, child)
        if not lives:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        yield lives


def _traced(libc: ctypes.CDLL, write: Callable[[], object]) -> None:
    try:
        if libc.ptrace(TRACEME, 0, None, None):
            os._exit(errno.EPERM)
        os.kill(os.getpid(), signal.SIGSTOP)
        write()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.starts_processes
@pytest.mark.parametrize("kind", PUBLISHERS)
def test_a_writer_that_is_killed_at_any_change_leaves_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    prepare, write, read = PUBLISHERS[kind]
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    prepare(before)
    shutil.copytree(before, after)
    write(after)
    old, new = read(before), read(after)
    assert old != new
    root, found = tmp_path / "root", []
    shutil.copytree(before, root)
    for _ in killed_at_each_change(lambda: write(root)):
        found.append(read(root))
        write(root)
        assert read(root) == new
        shutil.rmtree(root)
        shutil.copytree(before, root)
    assert found[0] == old
    assert found[-1] == new
    assert [each for each in found if each not in (old, new)] == []
