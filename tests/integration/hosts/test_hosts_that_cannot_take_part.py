"""Hosts that cannot take part in a job are named before anything starts: all of them, each with its remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.testbed.hosts import REPOSITORY

from ..harness import EXEC, Unirun
from .cluster import UnirunOnHosts

NOTHING = "print('this must not run')"


def test_hosts_that_ssh_does_not_reach_or_that_have_no_python_are_named_with_the_remedy(
    cluster: UnirunOnHosts,
) -> None:
    """
    1. h1 rejects the user's key, h2 has no sshd, h3 has no Python where this machine has it, and one name is wrong.
    2. The command names all four, and what to do about each.
    """
    cluster.place("train.py", NOTHING)
    cluster.hosts[0].run(["mount", "--bind", "/dev/null", cluster.hosts.folder / "key.pub"])
    cluster.hosts[1].kill_all(sshd=True)
    cluster.hosts[2].run(["mount", "-t", "tmpfs", "tmpfs", Path(sys.executable).parent])
    end = cluster("--hosts", "h1,h2,h3,nowhere", *EXEC, cluster.work / "train.py", cwd=cluster.work)
    assert end.code == 4
    said = end.err
    assert "4 nodes cannot take part" in said
    assert "h1: root@198.18." in said
    assert "Permission denied (publickey" in said
    assert "load one with ssh-add, or ssh-copy-id h1" in said
    assert "h2: ssh: connect to host 198.18." in said
    assert "Connection refused; no sshd listens there" in said
    assert "h3: " in said
    assert f"install the same environment there: {sys.executable}" in said
    assert "nowhere: ssh: Could not resolve hostname nowhere" in said
    assert "is the name right? see ~/.ssh/config" in said
    assert end.out == ""
    assert not (cluster.home / "jobs").exists()
    cluster.assert_nothing_left()


def test_hosts_with_another_torch_or_without_the_script_are_named_at_once(cluster: UnirunOnHosts) -> None:
    cluster.place("train.py", NOTHING)
    # Found before the real one on h2, as the directory is the first in the module path.
    other = cluster.hosts[1].path(cluster.work / "packages" / "torch-9.9.dist-info")
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    (cluster.hosts[2].path(cluster.work) / "train.py").unlink()
    end = cluster(
        *("--hosts", "h1,h2,h3", *EXEC, cluster.work / "train.py"),
        cwd=cluster.work,
        env={"PYTHONPATH": f"{cluster.work}/packages:{REPOSITORY}"},
    )
    assert end.code == 4
    assert "h2: it has torch 9.9, here it is " in end.err
    assert (
        f"h3: h3 has no {cluster.work}/train.py; put it there, share the directory, or use --sync" in end.err
    )
    cluster.assert_nothing_left()


@pytest.mark.parametrize(
    ("named", "problem"),
    [("h1,h1", "h1"), ("h1:0", "h1:0"), ("-oProxyCommand=touch", "-oProxyCommand"), ("", "--hosts")],
)
def test_mistakes_in_the_list_of_hosts_are_told_before_anything_is_reached(
    tmp_path: Path, named: str, problem: str
) -> None:
    (tmp_path / "train.py").write_text(NOTHING)
    end = Unirun(tmp_path)("--hosts", named, tmp_path / "train.py")
    assert end.code == 2, end.err
    assert problem in end.err
    assert "Traceback" not in end.err
