from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from unirun.launcher.hosts.sync import files_of, pack, tree_of

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
