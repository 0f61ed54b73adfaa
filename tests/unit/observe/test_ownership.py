"""`exposure` finds each component of a path that another user controls."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import Fault
from unirun.observe.ownership import (
    MAX_LINKS,
    _is_trusted_group,
    _trusted,
    exposure,
    listed_writer,
    make_private,
    read_file,
    writers,
)

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask until the end of the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def problem(path: Path) -> str:
    found = exposure(path)
    assert isinstance(found, Fault)
    return found.problem


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_below_our_own_directories_is_safe(tmp_path: Path) -> None:
    assert exposure(tmp_path) is None
    assert exposure(tmp_path / "not" / "there" / "yet") is None


def test_a_world_writable_directory_is_exposed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert problem(tmp_path) == f"{tmp_path} may be written by all users"
    assert problem(tmp_path / "jobs") == f"{tmp_path} may be written by all users"


def test_our_entry_in_a_sticky_directory_is_safe(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    tmp_path.chmod(0o1777)
    assert exposure(tmp_path / "own") is None
    assert "all users" in problem(tmp_path), (
        "files of ours must not lie in it directly: others can make some beside them"
    )


@as_root
def test_a_directory_writable_by_a_group_of_several_users_is_exposed(tmp_path: Path) -> None:
    os.chown(tmp_path, 0, NOBODY)
    tmp_path.chmod(0o770)
    assert "may be written by group" in problem(tmp_path)
    os.chown(tmp_path, 0, 0)
    assert exposure(tmp_path) is None, "root's group is root"


@as_root
def test_a_directory_of_another_user_is_exposed(tmp_path: Path) -> None:
    (tmp_path / "his" / "ours").mkdir(parents=True)
    os.chown(tmp_path / "his", NOBODY, NOBODY)
    assert "belongs to user" in problem(tmp_path / "his" / "ours")


def test_exposure_checks_the_targets_of_links(tmp_path: Path) -> None:
    (tmp_path / "open" / "below").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "absolute").symlink_to(tmp_path / "open" / "below")
    (tmp_path / "relative").symlink_to("x/../open/below")
    (tmp_path / "x").mkdir()
    for name in ("absolute", "relative"):
        assert problem(tmp_path / name / "jobs") == f"{tmp_path}/open may be written by all users"
    (tmp_path / "open").chmod(0o755)
    for name in ("absolute", "relative"):
        assert exposure(tmp_path / name / "jobs") is None


def test_exposure_resolves_dotdot_after_a_link_as_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "open" / "inner").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open/inner")
    assert problem(tmp_path / "link" / ".." / "jobs") == f"{tmp_path}/open may be written by all users"


@as_root
def test_a_link_of_another_user_is_exposed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    assert "is a link of user" in problem(tmp_path / "link")


def test_exposure_ends_in_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "is a link" in problem(tmp_path / "a")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_make_private_is_independent_of_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    tmp_path.chmod(0o750)
    umask(mask)
    make_private(tmp_path / "a" / "b")
    assert [mode(each) for each in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    assert mode(tmp_path) == 0o750, "what was there is the user's"
    make_private(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("gid", "group", "trusted"),
    [
        (0, None, True),
        (1000, ("me", []), True),
        (1000, ("me", ["me"]), True),
        (1000, ("me", ["me", "other"]), False),
        (1000, ("team", []), False),
        (1000, ("team", ["me"]), False),
        (1000, None, False),
    ],
)
def test_a_group_is_our_own_when_it_has_our_name_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, gid: int, group: tuple[str, list[str]] | None, trusted: bool
) -> None:
    def of_group(number: int) -> grp.struct_group:
        if group is None:
            raise KeyError(number)
        return grp.struct_group((group[0], "x", number, group[1]))

    monkeypatch.setattr(grp, "getgrgid", of_group)
    me = pwd.struct_passwd(("me", "x", os.geteuid(), 1000, "", "/", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me])
    assert _is_trusted_group(gid) is trusted


def test_a_group_is_not_our_own_in_which_another_user_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the primary group of a user, who is none of its listed members."""
    me, other = (
        pwd.struct_passwd((name, "x", uid, 1000, "", "/", ""))
        for name, uid in (("me", os.geteuid()), ("other", 54321))
    )
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, [])))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, other])
    assert not _is_trusted_group(1000)


def listed(*entries: tuple[int, int, int]) -> bytes:
    """An access control list as the kernel has it: entries of a kind, rights and an id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))


NONE = 0xFFFFFFFF
OWN = ((0x01, 7, NONE), (0x04, 0, NONE), (0x20, 0, NONE))


def set_list(path: Path, kind: str, *entries: tuple[int, int, int]) -> None:
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", listed(*OWN, *entries))
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip(f"{path} has a file system without access control lists")


@pytest.mark.parametrize(
    ("entries", "who"),
    [
        ([(0x02, 7, NOBODY), (0x10, 7, NONE)], "user nobody"),
        ([(0x08, 6, 54321), (0x10, 7, NONE)], "group 54321"),
        # Without the right to write, by itself or by the mask.
        ([(0x02, 5, NOBODY), (0x10, 7, NONE)], ""),
        ([(0x02, 7, NOBODY), (0x10, 5, NONE)], ""),
        ([(0x02, 7, 0), (0x10, 7, NONE)], ""),
    ],
)
def test_a_directory_is_exposed_to_whom_its_access_control_list_lets_write(
    tmp_path: Path, entries: list[tuple[int, int, int]], who: str
) -> None:
    set_list(tmp_path, "access", *entries)
    if who:
        assert problem(tmp_path / "jobs") == f"{tmp_path} may be written by {who}, by its access control list"
    else:
        assert exposure(tmp_path / "jobs") is None


def test_a_directory_is_exposed_in_which_files_get_such_a_list(tmp_path: Path) -> None:
    set_list(tmp_path, "default", (0x02, 7, NOBODY), (0x10, 7, NONE))
    assert problem(tmp_path).startswith(f"new files in {tmp_path} may be written by user nobody")


@given(st.binary(max_size=200))
def test_no_access_control_list_ends_in_another_error(entries: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getxattr", lambda path, kind: entries)
        assert isinstance(listed_writer("/"), str)


def test_only_regular_files_are_read_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"a\xff\n")
    assert read_file(tmp_path / "file") == "a\ufffd\n"
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)


def test_make_private_never_grants_others_access(
    tmp_path: Path, umask: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    umask(0o000)
    at_first: list[int] = []
    monkeypatch.setattr(Path, "chmod", lambda self, _: at_first.append(mode(self)))
    make_private(tmp_path / "a" / "b")
    assert at_first == [0o700, 0o700]


def test_make_private_leaves_a_concurrently_created_directory_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir(mode=0o750)
    monkeypatch.setattr(Path, "exists", lambda self: self == tmp_path)
    make_private(tmp_path / "there" / "new")
    assert [mode(tmp_path / "there"), mode(tmp_path / "there" / "new")] == [0o750, 0o700]


def test_exposure_follows_as_many_links_as_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for number in range(MAX_LINKS + 1):
        (tmp_path / str(number + 1)).symlink_to(str(number))
    most, more = tmp_path / str(MAX_LINKS), tmp_path / str(MAX_LINKS + 1)
    assert most.stat()
    assert exposure(most) is None
    with pytest.raises(OSError, match="symbolic links"):
        more.stat()
    assert "is a link" in problem(more)


@pytest.mark.parametrize(
    ("bits", "gid", "who"),
    [
        (0o755, 4242424, ""),
        (0o770, 4242424, "group 4242424"),
        (0o770, 0, ""),
        (0o702, 0, "all users"),
        (0o704, 0, ""),
    ],
)
def test_writers_are_read_from_the_mode(bits: int, gid: int, who: str) -> None:
    assert writers(os.stat_result((bits, 0, 0, 0, 0, gid, 0, 0, 0, 0))) == who


HOST = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("uid_map", "unmapped", "trusted"),
    [
        (HOST, "65534\n", {0, 1000}),
        ("0 1000 1\n", "65534\n", {0, 1000, 65534}),
        ("0 1000 1\n", None, {0, 1000}),
        ("0 1000 1\n", "?", {0, 1000}),
        (None, "65534\n", {0, 1000}),
    ],
)
def test_in_a_user_namespace_the_unmapped_owner_is_trusted(
    monkeypatch: pytest.MonkeyPatch, uid_map: str | None, unmapped: str | None, trusted: set[int]
) -> None:
    files = {"/proc/self/uid_map": uid_map, "/proc/sys/kernel/overflowuid": unmapped}

    def read(path: Path) -> str:
        text = files[str(path)]
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _trusted() == trusted
