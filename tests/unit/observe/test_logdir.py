"""Logs are private, or shared with a group on purpose; planted links are not followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from unirun.observe.jobdir import MARK, make_log_dir, open_log

NAME = Path("actor", "0", "1", "stdout.log")


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(base: Path) -> dict[str, int]:
    return {
        str(each.relative_to(base)): stat.S_IMODE(each.stat().st_mode) for each in sorted(base.rglob("*"))
    }


def written(target: Path) -> None:
    make_log_dir(target, "uid")
    os.close(open_log(target, NAME))


def test_worker_logs_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    written(tmp_path / "logs" / "run-1")
    found = modes(tmp_path)
    files = {name for name in found if name.endswith(("log", MARK))}
    assert {found[name] for name in files} == {0o600}
    assert {found[name] for name in found.keys() - files} == {0o700}


@pytest.mark.parametrize("mode", [0o750, 0o775, 0o777])
def test_logs_in_a_group_directory_without_setgid_are_private(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(mode)
    written(folder / "run-1")
    os.close(open_log(folder, NAME))
    found = modes(folder)
    assert found["run-1"] == found["run-1/actor/0/1"] == found["actor/0/1"] == 0o700
    assert found["run-1/actor/0/1/stdout.log"] == found["actor/0/1/stdout.log"] == 0o600


def test_logs_in_a_setgid_directory_are_readable_by_its_group(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    written(shared / "run-1")
    found = modes(shared)
    assert found["run-1"] == found["run-1/actor/0/1"] == 0o2750
    assert found["run-1/actor/0/1/stdout.log"] == 0o640


def test_open_log_appends(tmp_path: Path) -> None:
    for word in (b"one ", b"two"):
        handle = open_log(tmp_path, NAME)
        os.write(handle, word)
        os.close(handle)
    assert (tmp_path / NAME).read_bytes() == b"one two"


@pytest.mark.parametrize("planted", [NAME, NAME.parent, Path("actor")], ids=str)
def test_open_log_does_not_follow_a_planted_link(tmp_path: Path, planted: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("precious")
    link = tmp_path / "logs" / planted
    link.parent.mkdir(parents=True)
    link.symlink_to(victim / "precious" if planted == NAME else victim)
    with pytest.raises(OSError, match="symbolic links|Not a directory"):
        open_log(tmp_path / "logs", NAME)
    assert [each.name for each in victim.iterdir()] == ["precious"]
    assert (victim / "precious").read_text() == "precious"


def test_a_log_directory_that_another_user_creates_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing directory is removed first; in a shared directory another user may create it again before us."""
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: (tmp_path / "run-1").mkdir())
    with pytest.raises(FileExistsError):
        make_log_dir(tmp_path / "run-1", "uid")
    assert [*(tmp_path / "run-1").iterdir()] == []


def test_open_log_does_not_follow_a_link_planted_after_mkdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(os, "mkdir", lambda name, _, dir_fd: os.symlink(victim, name, dir_fd=dir_fd))
    with pytest.raises(OSError, match="symbolic links|Not a directory"):
        open_log(tmp_path / "logs", NAME)
    assert [*victim.iterdir()] == []


def test_log_permissions_are_restored_only_where_the_umask_removed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of another user in a shared directory keeps its permissions."""

    def fchmod(handle: int, rights: int) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "fchmod", fchmod)
    os.close(open_log(tmp_path, NAME))
    os.umask(0o277)
    held = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError, match="not yours"):
        open_log(tmp_path, Path("other", "0"))
    assert os.listdir("/proc/self/fd") == held
