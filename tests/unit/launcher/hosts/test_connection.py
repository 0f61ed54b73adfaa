"""The command line of ssh; what ssh, a shell and Python say when it fails, as a problem and a remedy."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import RendezvousError
from unirun.launcher.hostlist import Host, parse_hosts
from unirun.launcher.hosts import connection
from unirun.launcher.hosts.connection import KEPT, RemoteNode, explain, for_any_shell, on_host
from unirun.launcher.hosts.feed import MARK
from unirun.wire.frames import encode_frame
from unirun.wire.messages import Ready

SAID = [
    (255, "root@h1: Permission denied (publickey,password).", "ssh-copy-id root@h1"),
    (255, "Host key verification failed.", "accept its host key once: ssh root@h1"),
    (255, "@  WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R"),
    (255, "ssh: Could not resolve hostname h1: Name or service not known", "~/.ssh/config"),
    (255, "ssh: connect to host h1 port 22: Connection refused", "no sshd listens there"),
    (255, "ssh: connect to host h1 port 22: Connection timed out", "is the host up?"),
    (255, "ssh: connect to host h1 port 22: No route to host", "is the host up?"),
    (127, f"bash: line 1: {sys.executable}: No such file or directory", "install the same environment there"),
    (1, f"{sys.executable}: Error while finding module specification (ModuleNotFoundError: No module named 'unirun')", "install unirun there"),
    (126, f"Could not chdir to home directory /home/me: No such file or directory\nsh: 1: {sys.executable}: Permission denied", "may root@h1 run"),
    (1, "something else", f"try: ssh root@h1 {sys.executable} --version"),
]  # fmt: skip

HOST = Host("h1", "root@h1")


@pytest.mark.parametrize(("code", "errors", "remedy"), SAID)
def test_what_is_said_becomes_a_remedy(code: int, errors: str, remedy: str) -> None:
    error = explain(HOST, code, f"Welcome to h1\n{errors}\n")
    assert remedy in error.remedy
    assert error.problem in errors


def test_the_last_of_several_words_about_one_problem_is_told() -> None:
    """ssh goes on when it cannot read a key."""
    last = "root@h1: Permission denied (publickey)."
    assert explain(HOST, 255, f"Load key '/home/me/id': Permission denied\n{last}\nbye\n").problem == last


def test_a_silent_end_is_told_with_its_code() -> None:
    assert explain(HOST, 3, "").problem == "it ended with exit code 3"


@pytest.mark.starts_processes
@pytest.mark.parametrize("before", [0, KEPT - 1, 3 * KEPT])
def test_the_last_words_of_a_process_are_told_however_much_it_has_said(before: int) -> None:
    """Its exit code, which comes a little later, says whether they are ssh's own."""
    code = (
        f"import os, sys, time; sys.stderr.write('x' * {before} + '\\nPermission denied\\n'); sys.stderr.flush()\n"
        "os.close(2); time.sleep(0.05); os._exit(255)"
    )

    async def fail() -> RendezvousError:
        remote = await RemoteNode.start(HOST, [sys.executable, "-S", "-c", code])
        error = await remote.failure()
        await remote.close()
        return error

    error = asyncio.run(fail())
    assert error.problem == "Permission denied"
    assert "ssh-copy-id root@h1" in error.remedy


@pytest.mark.starts_processes
def test_a_process_of_ssh_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SSH_EXIT_TIMEOUT", 0.05)
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"sys.stdout.buffer.write({MARK!r}); sys.stdout.flush(); time.sleep(100)"
    )

    async def close() -> int | None:
        remote = await RemoteNode.start(HOST, [sys.executable, "-S", "-c", code])
        async with asyncio.timeout(WAIT_TIMEOUT):
            await remote.ready()
            await remote.close()
        return remote._process.returncode

    assert asyncio.run(close()) == -signal.SIGKILL


@pytest.mark.starts_processes
def test_a_process_of_another_version_of_unirun_is_not_said_to_have_ended() -> None:
    frame = encode_frame({"type": "OfALaterVersion"})
    code = f"import os, sys; os.write(1, {MARK + frame!r}); sys.stdin.read()"

    async def hear() -> str:
        remote = await RemoteNode.start(HOST, [sys.executable, "-S", "-c", code])
        async with asyncio.timeout(WAIT_TIMEOUT):
            await remote.ready()
            with pytest.raises(RendezvousError) as caught:
                await remote.hear(Ready)
            await remote.close()
        return str(caught.value)

    assert re.match(
        "it says what cannot be understood: .*OfALaterVersion.*the same unirun", asyncio.run(hear())
    )


def test_ssh_never_asks_and_gets_the_target_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    [host] = parse_hosts("me@h1:4")
    command = on_host(host, "a.module")
    assert command[0] == "ssh"
    assert "BatchMode=yes" in command
    assert command[-2:] == ["me@h1", f"{sys.executable} -P -m a.module"]


def test_the_search_path_of_modules_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a dir:/b")
    assert on_host(HOST, "a.module")[-1].startswith("env 'PYTHONPATH=/a dir:/b' ")


WORDS = (
    "a b",
    "it's",
    'say "x"',
    "wow!",
    "!!",
    "back\\slash",
    "\\n",
    "$HOME",
    "`id`",
    "$(id)",
    "~",
    "*",
    "{a,b}",
    "=ls",
)
MORE = ("-x", "%1", "a;b", "a|b>c&d", "(x)", "#x", "[a]", "", "é ü", "\t", "'\\!'", "a=b c", "x%sy", "^a^b")
SHELLS = [shell for shell in ("sh", "bash", "dash", "tcsh", "fish", "zsh", "ksh") if shutil.which(shell)]


@pytest.mark.starts_processes
@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_takes_a_command_apart_as_it_was(shell: str) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    for command in (
        [sys.executable, "-S", "-c", code],
        ["sh", "-c", 'exec "$0" -S -c "$@"', sys.executable, code],
    ):
        line = for_any_shell([*command, *WORDS, *MORE])
        done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [*WORDS, *MORE]


def test_this_host_needs_no_ssh() -> None:
    [host] = parse_hosts("localhost")
    assert "ssh" not in on_host(host, "a.module")
