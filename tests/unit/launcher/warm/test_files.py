"""`LoadedFiles` detects whether a new interpreter would load the same files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unirun.launcher.warm.files import _TIMESTAMP_DELAY, LoadedFiles, _mark

ROOT = Path(__file__).parents[4]

RUN = """
import ctypes, mmap, os, shutil, sys, time
from pathlib import Path
root = Path(sys.argv[1])
time.sleep(0.05)
began = time.time()
sys.path[:0] = [str(root / "absent"), str(root / "first"), str(root / "second"), str(root / "site-packages")]
import mine
from unirun.launcher.warm.files import LoadedFiles
library = root / "library.so"
mapped = next(line.split()[5] for line in open("/proc/self/maps") if "/libc.so" in line or "/libm.so" in line)
shutil.copy(mapped.replace("libc.so", "libm.so"), library)
ctypes.CDLL(str(library))
data = (root / "data").open("w+b")
data.write(b"x")
data.flush()
data = mmap.mmap(data.fileno(), 0)
files = LoadedFiles()
assert files.replaced() == "", files.replaced()
exec(sys.argv[2])
print(files.replaced())
"""

CHANGES = {
    "a file that was edited": ("(root / 'second/mine.py').write_text('x = 2')", "{root}/second/mine.py"),
    "a file that was edited and looks as old": (
        "old = (root / 'second/mine.py').stat(); (root / 'second/mine.py').write_text('x = 2');"
        "os.utime(root / 'second/mine.py', ns=(old.st_atime_ns, old.st_mtime_ns))",
        "{root}/second/mine.py",
    ),
    "a file that was removed": ("(root / 'second/mine.py').unlink()", "{root}/second/mine.py"),
    "a shared library that was replaced": (
        "shutil.copy(library, root / 'new'); os.replace(root / 'new', library)",
        "{root}/library.so",
    ),
    "a module that another one hides": ("(root / 'first/mine.py').touch()", "mine"),
    "a module of the library that another one hides": ("(root / 'first/shutil.py').touch()", "shutil"),
    "a package that hides a module": (
        "(root / 'first/mine').mkdir(); (root / 'first/mine/__init__.py').touch()",
        "mine",
    ),
    "a directory of the search path that was not there": (
        "(root / 'absent').mkdir(); (root / 'absent/mine.py').touch()",
        "mine",
    ),
    "a module that every interpreter imports": ("(root / 'first/sitecustomize.py').touch()", "sitecustomize"),
    "a new .pth file": ("(root / 'site-packages/a.pth').touch()", "{root}/site-packages/a.pth"),
    "a new distribution": (
        "(root / 'site-packages/backend-1.dist-info').mkdir()",
        "{root}/site-packages/backend-1.dist-info",
    ),
    "nothing but a new file": ("(root / 'first/other.py').touch(); (root / 'second/out.txt').touch()", ""),
    "nothing but data that is mapped": ("data[:] = b'y'; (root / 'data').touch()", ""),
    "nothing but a new directory": ("(root / 'absent').mkdir()", ""),
    "nothing": ("", ""),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("first", "second", "site-packages"):
        (tmp_path / name).mkdir()
    (tmp_path / "second" / "mine.py").write_text("x = 1")
    return tmp_path


def replaced(root: Path, change: str, python: str = sys.executable, **env: str) -> str:
    done = subprocess.run(
        [python, "-B", "-c", RUN, str(root), change],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestItIsSeen:
    @pytest.mark.starts_processes
    @pytest.mark.parametrize("what", CHANGES)
    def test_loaded_files_detect_each_change(self, root: Path, what: str) -> None:
        change, told = CHANGES[what]
        assert replaced(root, change) == told.format(root=root)

    @pytest.mark.starts_processes
    def test_loaded_files_detect_another_interpreter(self, root: Path) -> None:
        python = root / "python"
        python.symlink_to(os.path.realpath(sys.executable))
        change = "os.replace(root / 'python', root / 'old'); (root / 'python').symlink_to('/bin/true')"
        assert replaced(root, change, str(python)) == str(python)

    @pytest.mark.starts_processes
    def test_loaded_files_detect_a_new_user_site_directory(self, root: Path) -> None:
        python = os.path.realpath(sys.executable)
        change = "import site; Path(site.getusersitepackages()).mkdir(parents=True)"
        told = replaced(root, change, python, PYTHONUSERBASE=str(root / "user"))
        assert told.startswith(f"{root}/user/")

    @pytest.mark.starts_processes
    def test_loaded_files_detect_a_file_changed_while_it_was_loaded(self, root: Path) -> None:
        change = "print(Path(files.changed_since(began)).name, files.changed_since(time.time() + 60))"
        assert replaced(root, change) == "library.so"

    def test_loaded_files_detect_a_file_changed_just_after_the_start_by_a_clock_that_is_a_little_late(
        self, root: Path
    ) -> None:
        """Its time may be that of a moment before."""
        files = LoadedFiles()
        path = root / "changed"
        path.touch()
        # As a copy that keeps the times of its source.
        os.utime(path, (0, 0))
        files._files = {str(path): _mark(str(path))}
        changed = path.stat().st_ctime
        assert files.changed_since(changed + _TIMESTAMP_DELAY / 2) == str(path)
        assert files.changed_since(changed + _TIMESTAMP_DELAY * 2) == ""
