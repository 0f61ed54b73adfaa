"""Requests and answers as lines, and a probe that does not answer."""

from __future__ import annotations

import asyncio

import pytest

from unirun.errors import FrameError, RendezvousError
from unirun.launcher.doctor.examine import ProbeClient
from unirun.launcher.doctor.requests import (
    Inspect,
    PortOpened,
    RequestFault,
    Tick,
    Time,
    to_answer,
    to_line,
    to_request,
)
from unirun.launcher.hostlist import Host


@pytest.mark.parametrize("message", [Inspect("/x", None, "10.0.0.1"), Tick()])
def test_requests_are_lines(message: Inspect | Tick) -> None:
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
        channel = await ProbeClient.open(Host("h1", "h1"), lambda _: ["sh", "-c", program])
        try:
            return await channel.ask(Tick(), Time, 10.0)
        finally:
            await channel.close()

    return asyncio.run(ask())


def line(message: Time | RequestFault | PortOpened) -> str:
    return f"printf '%s\\n' '{to_line(message).decode().strip()}'"


@pytest.mark.starts_processes
def test_what_the_shell_prints_before_the_answer_is_no_answer() -> None:
    assert asked(f"echo Welcome; read it; {line(Time(5.0))}; cat") == Time(5.0)


@pytest.mark.starts_processes
def test_a_failure_there_is_an_error_here() -> None:
    with pytest.raises(RendezvousError, match="no such interface"):
        asked(f"read it; {line(RequestFault('no such interface'))}; cat")
    with pytest.raises(RendezvousError, match="PortOpened"):
        asked(f"read it; {line(PortOpened(5))}; cat")


@pytest.mark.starts_processes
def test_a_probe_that_ends_tells_why() -> None:
    with pytest.raises(RendezvousError) as caught:
        asked("echo 'Connection refused' >&2; exit 255")
    assert (caught.value.problem, "sshd" in caught.value.remedy) == ("Connection refused", True)


@pytest.mark.starts_processes
def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(RendezvousError, match="no-such-ssh cannot be started"):
        asyncio.run(ProbeClient.open(Host("h1", "h1"), lambda _: ["no-such-ssh"]))
