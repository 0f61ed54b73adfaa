"""A spawner that an agent forks: it starts programs, and has nothing of the agent's but what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT_TIMEOUT

pytestmark = pytest.mark.starts_processes

BEFORE = """
import atexit, json, os, subprocess, sys, threading
from unirun.launcher.forked import fork_spawner
from unirun.wire.blocking import BlockingStream
from unirun.wire.reports import Kill, Spawn
atexit.register(print, "the agent's exit handler")
ours, kept = os.pipe(), os.open("/dev/null", os.O_RDONLY)
"""


def run(folder: Path, script: str) -> Any:
    """The result of a process that forks a spawner, which it prints as JSON. The process has one thread."""
    command = [sys.executable, "-c", BEFORE + textwrap.dedent(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_TIMEOUT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert rest == ["the agent's exit handler"], "once"
    return json.loads(first)


def test_a_forked_spawner_starts_programs_and_ends_with_its_stream(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        forked = fork_spawner([])
        stream = BlockingStream(forked.socket)
        kinds = [type(stream.receive(60)).__name__]
        logs = sys.argv[1]
        stream.send(Spawn(1, "a:0", "program", "sh", ("-c", "echo $A; exit 3"), False, {"A": "x"}, "/", logs, "a"))
        forks, reaped = stream.receive(60), stream.receive(60)
        kinds += [type(forks).__name__, type(reaped).__name__]
        stream.close()
        print(json.dumps([kinds, reaped.code, forked.wait(60), forked.wait(0)]))
        """,
    )
    assert found == [["SpawnerReady", "Forked", "Reaped"], 3, 0, 0]
    assert (tmp_path / "a/stdout.log").read_text() == "x\n"


def test_nothing_is_left_of_a_forked_spawner_that_has_ended(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        before = set(os.listdir("/proc/self/fd"))
        forked = fork_spawner([])
        forked.kill()
        code = forked.wait(60)
        forked.kill()
        forked.socket.close()
        print(json.dumps([code, forked.wait(0), sorted(set(os.listdir("/proc/self/fd")) - before)]))
        """,
    )
    assert found == [-9, -9, []]


def test_a_forked_spawner_has_no_descriptors_but_its_stream_and_those_for_workers(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        forked = fork_spawner([kept])
        BlockingStream(forked.socket).receive(60)
        links = {n: os.readlink(f"/proc/{forked.pid}/fd/{n}") for n in os.listdir(f"/proc/{forked.pid}/fd")}
        ours = [os.readlink(f"/proc/self/fd/{n}") for n in ours]
        forked.kill()
        print(json.dumps([links.pop(str(kept)), [*links.values()], ours, forked.wait(60)]))
        """,
    )
    null, links, ours, code = found
    assert (null, code) == ("/dev/null", -9)
    assert not {*links} & {*ours}
    assert sum(link.startswith("socket:") for link in links) == 1


def test_a_process_with_threads_forks_no_spawner(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        event = threading.Event()
        threading.Thread(target=event.wait).start()
        forked = fork_spawner([])
        event.set()
        print(json.dumps(forked))
        """,
    )
    assert found is None
