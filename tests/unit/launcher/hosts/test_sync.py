from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.waiting import eventually
from unirun.errors import RendezvousError, UsageError
from unirun.launcher.hostlist import Host
from unirun.launcher.hosts import copying
from unirun.launcher.hosts.copying import directories_in, files_of, pack, send_tree, tree_of
from unirun.launcher.process import process_has_ended

pytestmark = pytest.mark.starts_processes


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "train.py",
        "pkg/model.py",
        "pkg/__pycache__/model.pyc",
        "data/big.bin",
        ".venv/python",
        "a b/ü.py",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *words],
        check=True,
        capture_output=True,
    )


def test_a_repository_is_sent_without_what_git_ignores(tree: Path) -> None:
    git(tree, "init")
    (tree / ".gitignore").write_text("data/\n.venv/\n*.pyc\n")
    git(tree, "add", "train.py")
    assert tree_of(tree / "pkg") == tree
    assert files_of(tree) == [".gitignore", "a b/ü.py", "pkg/model.py", "train.py"]


def test_repositories_in_a_repository_are_sent_each_without_what_it_ignores(tree: Path) -> None:
    """A clone that the outer one does not know, and a submodule; of one that was not fetched there is an empty directory."""
    git(tree, "init")
    (tree / ".gitignore").write_text(".venv/\ndata/\n*.pyc\n")
    for name in ("clone", "module", "later"):
        git(tree, "init", name)
        (tree / name / ".gitignore").write_text("build/\n")
        (tree / name / "build").mkdir()
        (tree / name / "build" / "server").touch()
        git(tree / name, "add", ".gitignore")
        git(tree / name, "commit", "-m", "first")
    git(tree, "add", "module", "later")
    shutil.rmtree(tree / "later")
    (tree / "later").mkdir()
    sent = [".gitignore", "a b/ü.py", "clone/.gitignore", "later", "module/.gitignore", "pkg/model.py"]
    assert files_of(tree) == [*sent, "train.py"]


def test_directories_of_roles_are_sent_with_nothing_in_them(tree: Path) -> None:
    (tree / "runs" / "1").mkdir(parents=True)
    (tree / "link").symlink_to("runs")
    needed = [
        tree,
        tree / "pkg/../link/1",
        tree / "runs/1",
        tree / "train.py",
        tree / "no",
        tree.parent,
        "sleep",
    ]
    assert directories_in(tree, map(str, needed)) == ["runs/1"]


def test_a_file_that_was_deleted_is_not_sent(tree: Path) -> None:
    git(tree, "init")
    git(tree, "add", "train.py")
    (tree / "train.py").unlink()
    assert "train.py" not in files_of(tree)


def test_a_tree_without_git_is_sent_without_caches_and_environments(tree: Path) -> None:
    assert tree_of(tree) == tree
    assert files_of(tree) == ["a b/ü.py", "data/big.bin", "pkg/model.py", "train.py"]


def test_links_are_sent_as_links(tree: Path) -> None:
    (tree / "latest").symlink_to("train.py")
    out = io.BytesIO()
    pack(tree, ["latest", "train.py"], out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert [(member.name, member.issym()) for member in tar] == [("latest", True), ("train.py", False)]


@pytest.mark.parametrize("fails", [False, True])
def test_hosts_know_this_tree_by_a_mark_that_is_gone_afterwards(
    tree: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    before, sent = files_of(tree), []

    async def send(host: Host, top: Path, mark: Path, packed: Path) -> None:
        assert (mark.exists(), mark.parent) == (True, top)
        with tarfile.open(packed) as tar:
            sent.append((host.name, tar.getnames()))
        if fails and host.name == "h2":
            raise RendezvousError("its disk is full")

    monkeypatch.setattr(copying, "_send", send)
    hosts = [Host("here", "localhost"), Host("h1", "me@h1"), Host("h2", "h2")]
    if fails:
        with pytest.raises(RendezvousError, match="h2: its disk is full"):
            asyncio.run(send_tree(hosts, tree))
    else:
        asyncio.run(send_tree(hosts, tree))
    assert sorted(sent) == [("h1", before), ("h2", before)]
    assert files_of(tree) == before


def test_ssh_does_not_outlive_a_tree_that_is_not_taken(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "ssh").write_text(f"#!/bin/sh\necho $$ >{folder}/pid\nexec sleep 100\n")
    (folder / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(copying, "TIMEOUT", 0.5)
    with pytest.raises(RendezvousError, match="h1: the tree was not taken within 0.5 s"):
        asyncio.run(send_tree([Host("h1", "h1")], tree))
    pid = int((folder / "pid").read_text())
    eventually(lambda: process_has_ended(pid), "it is killed")


def test_a_link_to_the_tree_itself_is_sent_as_a_link(tree: Path) -> None:
    """A package whose folder is the top of its repository, for example."""
    git(tree, "init")
    (tree / ".gitignore").write_text("data/\n.venv/\n*.pyc\n")
    (tree / "me").symlink_to(".")
    assert files_of(tree) == [".gitignore", "a b/ü.py", "me", "pkg/model.py", "train.py"]


def test_links_to_directories_are_sent_without_git_too(tree: Path) -> None:
    (tree / "linked").symlink_to("data")
    (tree / "venv").symlink_to("data")
    assert files_of(tree) == ["a b/ü.py", "data/big.bin", "linked", "pkg/model.py", "train.py"]


def test_a_file_that_is_removed_while_the_tree_is_packed_is_left_out(tree: Path) -> None:
    out = io.BytesIO()
    pack(tree, ["gone", "train.py"], out)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert tar.getnames() == ["train.py"]


def test_a_tree_needs_ssh(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tree))
    with pytest.raises(RendezvousError, match="h1: ssh cannot be started: No such file"):
        asyncio.run(send_tree([Host("h1", "h1")], tree))


def test_a_git_that_does_not_answer_is_told(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "git").write_text("#!/bin/sh\nexec sleep 100\n")
    (folder / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(copying, "GIT_TIMEOUT", 0.05)
    with pytest.raises(
        UsageError, match="--sync: git has not answered within 0.05 s; try: git -C .* rev-parse"
    ):
        asyncio.run(send_tree([Host("h1", "h1")], tree))
