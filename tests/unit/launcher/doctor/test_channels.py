"""What ssh, a shell and Python say when there is no probe, as a problem and a remedy; and the probe's lines."""

from __future__ import annotations

import asyncio
import sys

import pytest

from unirun.errors import FrameError, RendezvousError
from unirun.launcher.doctor.channels import Channel, Unreached, by_ssh, explain
from unirun.launcher.doctor.requests import (
    Failed,
    Listening,
    Look,
    Tick,
    Time,
    to_answer,
    to_line,
    to_request,
)
from unirun.launcher.hosts.hostlist import Host, parse_hosts

SAID = [
    (255, "root@h1: Permission denied (publickey,password).", "ssh-copy-id root@h1"),
    (255, "Host key verification failed.", "connect once by hand: ssh root@h1"),
    (255, "@  WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R"),
    (255, "ssh: Could not resolve hostname h1: Name or service not known", "~/.ssh/config"),
    (255, "ssh: connect to host h1 port 22: Connection refused", "is sshd running"),
    (255, "ssh: connect to host h1 port 22: Connection timed out", "firewall"),
    (255, "ssh: connect to host h1 port 22: No route to host", "in this network"),
    (127, f"bash: line 1: {sys.executable}: No such file or directory", "as it is here"),
    (1, f"{sys.executable}: Error while finding module specification (ModuleNotFoundError: No module named 'unirun')", "install unirun there"),
    (1, "something else", "try it by hand: ssh root@h1"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "errors", "remedy"), SAID)
def test_what_is_said_becomes_a_remedy(code: int, errors: str, remedy: str) -> None:
    problem, found = explain(code, f"Welcome to h1\n{errors}\n", "root@h1")
    assert remedy in found
    assert problem in errors


def test_a_silent_end_is_told_with_its_code() -> None:
    assert explain(3, "", "h1") == ("exit code 3", "try it by hand: ssh h1")


def test_ssh_never_asks_and_gets_the_target_of_the_user() -> None:
    [host] = parse_hosts("me@h1:4")
    command = by_ssh(host)
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-2] == "me@h1"
    assert sys.executable in command[-1]


@pytest.mark.parametrize("message", [Look("/x", None, "10.0.0.1"), Tick()])
def test_requests_are_lines(message: Look | Tick) -> None:
    assert to_request(to_line(message)) == message


def test_a_line_that_is_no_message_is_refused() -> None:
    for line in (b"Welcome\n", b'{"type": "Other"}\n', b"[]\n"):
        with pytest.raises(FrameError):
            to_answer(line)
        with pytest.raises(FrameError):
            to_request(line)


def asked(program: str) -> object:
    """The answer of a probe that is `program` to the question for the time."""

    async def ask() -> object:
        channel = await Channel.open(Host("h1", "h1"), lambda _: ["sh", "-c", program])
        try:
            return await channel.ask(Tick(), Time, 10.0)
        finally:
            await channel.close()

    return asyncio.run(ask())


def line(message: Time | Failed | Listening) -> str:
    return f"printf '%s\\n' '{to_line(message).decode().strip()}'"


@pytest.mark.starts_processes
def test_what_the_shell_prints_before_the_answer_is_no_answer() -> None:
    assert asked(f"echo Welcome; read it; {line(Time(5.0))}; cat") == Time(5.0)


@pytest.mark.starts_processes
def test_a_failure_there_is_an_error_here() -> None:
    with pytest.raises(RendezvousError, match="no such interface"):
        asked(f"read it; {line(Failed('no such interface'))}; cat")
    with pytest.raises(RendezvousError, match="Listening"):
        asked(f"read it; {line(Listening(5))}; cat")


@pytest.mark.starts_processes
def test_a_probe_that_ends_tells_why() -> None:
    with pytest.raises(Unreached) as caught:
        asked("echo 'Connection refused' >&2; exit 255")
    assert (caught.value.problem, "sshd" in caught.value.remedy) == ("Connection refused", True)


@pytest.mark.starts_processes
def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(Unreached, match="no-such-ssh cannot be started"):
        asyncio.run(Channel.open(Host("h1", "h1"), lambda _: ["no-such-ssh"]))
