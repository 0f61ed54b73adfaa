"""`unirun_home` finds a private place for a user's files, also where the home directory is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unirun.errors import JobError, UsageError
from unirun.observe.jobdir import expanded, jobs_root, unirun_home
from unirun.observe.ownership import make_private

NOBODYS = f"unirun-{os.geteuid()}"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory; the home directory is beside it, and nothing else is set."""
    for name in ("UNIRUN_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_files_are_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unirun_home() == tmp_path / "home" / ".local" / "state" / "unirun"
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert unirun_home() == Path("/state/unirun")
    monkeypatch.setenv("UNIRUN_HOME", "~/mine")
    assert unirun_home() == tmp_path / "home" / "mine"


@pytest.mark.parametrize("home", ["/dev/null", "/dev/null/nowhere"])
def test_where_the_home_directory_cannot_be_written_they_are_in_the_temporary_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    assert unirun_home() == temporary / NOBODYS
    make_private(jobs_root())
    assert (temporary / NOBODYS).stat().st_mode & 0o777 == 0o700


def test_where_all_users_may_write_the_home_directory_they_are_in_the_temporary_one(
    temporary: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").chmod(0o777)
    assert unirun_home() == temporary / NOBODYS


def test_files_that_are_there_are_not_left_for_others(tmp_path: Path) -> None:
    """A home directory that is opened to all users is refused, rather than all jobs be out of sight."""
    (tmp_path / "home" / ".local" / "state" / "unirun").mkdir(parents=True)
    (tmp_path / "home").chmod(0o777)
    with pytest.raises(JobError, match="may be written by all users"):
        jobs_root()


def test_a_place_in_the_temporary_directory_that_another_user_has_taken_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    (temporary / NOBODYS).mkdir()
    (temporary / NOBODYS).chmod(0o777)
    with pytest.raises(JobError, match="may be written by all users.*UNIRUN_HOME"):
        jobs_root()


def test_without_any_place_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(
        JobError, match=r"are no place for unirun's files, nor is the home directory one: .*; set TMPDIR"
    ):
        unirun_home()


def test_a_tilde_that_stands_for_no_home_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="~nobodyhere/x: no home directory is known"):
        expanded("~nobodyhere/x")
