"""The files and programs that every host of a job needs, and the hosts that lack some."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.launcher.hosts import node
from unirun.launcher.hosts.node import missing, needs
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire.blocking import BlockingStream
from unirun.wire.frames import encode_frame
from unirun.wire.messages import AgentTask, Dismissed, EtcdMember, Invite


def job(*roles: RoleSpec, **keys: Any) -> JobSpec:
    return JobSpec("job", "job-1", roles, (roles[0].name,), **keys)


def program(target: str, **keys: Any) -> RoleSpec:
    return RoleSpec("engine", 1, Entry("program", target), contract="none", **keys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program in it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "serve").touch(mode=0o755)
    return tmp_path


def test_scripts_and_programs_are_needed_where_the_role_runs(tmp_path: Path) -> None:
    train = RoleSpec("train", 1, Entry("script", "train.py"), cwd=str(tmp_path))
    found = needs(job(train, program("./serve.sh")), "/work")
    assert found == ["/work", str(tmp_path), f"{tmp_path}/train.py", "/work/serve.sh"]


def test_a_program_is_searched_in_the_path_of_each_host(folder: Path) -> None:
    assert needs(job(program("sleep")), "/work") == ["/work", "sleep"]


@pytest.mark.parametrize("whose", ["role", "job"])
def test_a_program_in_a_path_of_the_role_or_the_job_is_needed_there(folder: Path, whose: str) -> None:
    env = {"PATH": str(folder / "bin")}
    spec = job(program("serve", env=env)) if whose == "role" else job(program("serve"), env=env)
    assert needs(spec, "/work") == ["/work", f"{folder}/bin/serve"]


def test_an_interpreter_is_needed_with_the_program_beside_it(folder: Path) -> None:
    python = f"{folder}/bin/python"
    assert needs(job(program("serve", python=python)), "/work") == ["/work", python, f"{folder}/bin/serve"]
    assert needs(job(program("sleep", python=python)), "/work") == ["/work", python, "sleep"]


def test_hosts_of_another_component_do_not_need_what_a_role_runs() -> None:
    spec = job(program("/serve", component=1), RoleSpec("train", 1, Entry("script", "/train.py")))
    assert needs(spec, "/work", 0) == ["/work", "/train.py"]
    assert needs(spec, "/work", 1) == ["/work", "/serve", "/train.py"]


def test_env_files_of_the_job_and_of_all_roles_are_needed() -> None:
    spec = job(program("sleep", component=1, env_file="own.env"), env_file="/secrets/all.env")
    assert needs(spec, "/work", 0) == ["/work", "/secrets/all.env", "/work/own.env"]


def test_what_a_host_lacks_is_told_with_the_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder}/bin{os.pathsep}/nowhere")
    assert missing([sys.executable, "serve"]) == ()
    host = socket.gethostname()
    assert missing(["/no/a.py", "/no/b", "serve", "train"]) == (
        (
            f"{host} has no /no/a.py, /no/b",
            "put it there, share the directory, or use --sync, which leaves out what git ignores",
        ),
        (f"{host} has no train on its PATH", "install it there, or give its path"),
    )


@pytest.mark.parametrize(
    ("connection", "addr"),
    [
        ("10.0.0.9 50022 10.0.0.5 22", "10.0.0.5"),
        ("fe80::1%eth0 50022 fd00::5%eth0 22", "fd00::5"),
        ("127.0.0.1 50022 127.0.0.1 22", "192.168.1.5"),
        ("::1 50022 ::1 22", "192.168.1.5"),
        ("", "192.168.1.5"),
    ],
)
def test_a_node_has_the_address_by_which_the_command_has_reached_it(
    monkeypatch: pytest.MonkeyPatch, connection: str, addr: str
) -> None:
    """Other hosts reach no loopback."""
    monkeypatch.setattr(node, "reachable_address", lambda: "192.168.1.5")
    monkeypatch.setenv("SSH_CONNECTION", connection)
    assert node.own_address(Invite("", "h1")) == addr


def test_a_certificate_names_the_addresses_of_its_own_node() -> None:
    members = tuple(
        EtcdMember(name, f"10.0.0.{number}", 2379, 2380) for number, name in enumerate(("h1", "h2"))
    )
    task = AgentTask(job(program("sleep")), "h2", ("h1",), etcd=members)
    assert set(node.certified(task, "10.1.1.1")) == {"10.1.1.1", "10.0.0.1"}
    assert node.certified(task, "10.0.0.1") == ("10.0.0.1",)


def test_a_node_that_does_not_understand_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is of another version of unirun, for example."""
    here, there = socket.socketpair()
    monkeypatch.setattr(node, "over_stdio", lambda: BlockingStream(here))
    monkeypatch.setattr(node, "ignore_signals", lambda: None)
    with here, BlockingStream(there) as command:
        there.sendall(encode_frame({"type": "OfALaterVersion"}))
        assert node.main() != 0
        answer = command.receive(WAIT_TIMEOUT)
    assert isinstance(answer, Dismissed)
    assert "OfALaterVersion" in answer.problem
