"""Draws the pictures of the README and of the documents (``make docs``).

``unirun plan`` and ``unirun graph`` draw the plan and the graph of ``pictures/ppo.yaml``. ``unirun status`` prints the
status of a made-up moment of that job; nothing is started.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from unirun.collocation.graph.svg import (
    FAINT,
    INK,
    LOOKS,
    PLAIN,
    box,
    document,
    element,
    look,
    text_at,
    text_width,
)
from unirun.observe.status import FailureStatus, JobStatus, RoleStatus, WorkerStatus, write_status
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token

DOCS = Path(__file__).resolve().parent
JOB = ("--config", str(DOCS / "pictures/ppo.yaml"), "--cwd", str(DOCS.parent / "examples/ppo_cartpole"))
INVENTORY = "fake:nodes=3,devices=8"
FONT, LINE, MARGIN = 13, 22, 16

INKS = {style.ansi: style.stroke for style in LOOKS.values()}
"""By the code of a terminal's colour."""

STARTS = (("torchrun", 1), ("unirun", 7), ("unirun, warm", 27))
"""The start of 16 ranks on two cores as a part of torchrun's time: medians of ``python -m benchmarks launch``."""

PROCESSES = (
    (0, "unirun", "the command: plans the job, shows its output, has its exit code", "starting"),
    (
        1,
        "unirun-master",
        "decides: restarts, places, the end. If it dies, an agent starts the next one",
        "pending",
    ),
    (1, "unirun-agent", "one on each node: starts, watches and stops its processes", "pending"),
    (2, "spawner", "imports torch once, and forks workers", "pending"),
    (3, "actor:0 … actor:7", "workers: your script or class, in one process group", "running"),
    (3, "rollout:0 …", "another role: its own process group, restarts and environment", "running"),
    (2, "engine:0 …", "programs beside them, such as vllm serve", "succeeded"),
)
"""Depth below the command, name, task, and the state whose colours the box has."""


def main(folder: Path) -> None:
    """Write all pictures into `folder`."""
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"UNIRUN_HOME": home, "UNIRUN_WARM": "0", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        for name in ("NO_COLOR", "UNIRUN_STORE", "COLUMNS"):
            os.environ.pop(name, None)
        _run("graph", *JOB, "-o", str(folder / "ppo.svg"))
        _run("plan", "--inventory", INVENTORY, *JOB, "--svg", str(folder / "plan.svg"))
        with _job():
            screen = _run("status", "ppo").replace(home, "~/.local/state/unirun")
        (folder / "status.svg").write_text(terminal("unirun status", screen))
    (folder / "processes.svg").write_text(processes())
    (folder / "starts.svg").write_text(bars())


def processes() -> str:
    """The processes of a job as a tree of boxes, with their tasks."""
    parts, height, indent = [], LINE + 4, 36
    widest = max(indent * depth + text_width(name, FONT) for depth, name, *_ in PROCESSES) + 2 * MARGIN
    for number, (depth, name, task, state) in enumerate(PROCESSES):
        x, y, style = MARGIN + indent * depth, MARGIN + number * (height + 8), look(state)
        if depth:
            parent = max(above for above in range(number) if PROCESSES[above][0] == depth - 1)
            top = MARGIN + parent * (height + 8) + height
            path = f"M{x - indent / 2:g},{top:g} V{y + height / 2:g} H{x:g}"
            parts.append(element("path", d=path, fill="none", stroke=FAINT))
        size = text_width(name, FONT) + MARGIN
        parts.append(box(x, y, size, height, rx=5, fill=style.fill, stroke=style.stroke))
        parts.append(text_at(name, x + MARGIN / 2, y + height / 2, style.text))
        parts.append(text_at(task, widest + MARGIN, y + height / 2))
    width = widest + MARGIN + max(text_width(task, FONT) for _, _, task, _ in PROCESSES)
    return document(width + MARGIN, 2 * MARGIN + len(PROCESSES) * (height + 8) - 8, FONT, parts)


def bars() -> str:
    """The start times as bars."""
    parts = [text_at("16 ranks to their first all_reduce, two cores: time ÷ torchrun's", MARGIN, MARGIN + 8)]
    left, most = MARGIN + max(text_width(name, FONT) for name, _ in STARTS) + 10, 420
    for number, (name, divisor) in enumerate(STARTS):
        y, style = MARGIN + LINE * 1.5 + number * (LINE + 8), look("running") if number else PLAIN
        parts.append(text_at(name, MARGIN, y + LINE / 2))
        parts.append(box(left, y, most / divisor, LINE, rx=3, fill=style.fill, stroke=style.stroke))
        value = "1" if divisor == 1 else f"1/{divisor}"
        parts.append(text_at(value, left + most / divisor + 8, y + LINE / 2))
    return document(left + most + 60, MARGIN + LINE * 1.5 + len(STARTS) * (LINE + 8) + 8, FONT, parts)


def terminal(command: str, screen: str) -> str:
    """The screen of a terminal: a command and what it has printed, in its colours."""
    parts, longest = [], 0
    for number, line in enumerate([f"\x1b[1m$ {command}\x1b[0m", *screen.splitlines()]):
        column, style = 0, ""
        for code, words in _runs(line.rstrip()):
            style = code
            if words.strip():
                x, y = MARGIN + text_width("m" * column, FONT), MARGIN + LINE * (number + 0.5)
                look = {
                    "textLength": text_width(words, FONT),
                    "font_weight": "bold" if style == "1" else None,
                }
                parts.append(text_at(words, x, y, INKS.get(style, INK), **look))
            column += len(words)
        longest = max(longest, column)
    width = 2 * MARGIN + text_width("m" * longest, FONT)
    return document(width, 2 * MARGIN + LINE * (screen.count("\n") + 1), FONT, parts)


def _runs(line: str) -> Iterator[tuple[str, str]]:
    """Parts of a line, each with the code of its colour."""
    first, *rest = re.split(r"\x1b\[([\d;]*)m", line)
    return zip(("0", *rest[::2]), (first, *rest[1::2]), strict=True)


@contextlib.contextmanager
def _job() -> Iterator[None]:
    """A job that runs as long as the context: a rollout has been killed, and its role is up again."""
    now = time.time()
    job, lock = create_job("ppo", new_token())
    counts = {"actor": 4, "rollout": 4, "reward": 1, "trainer": 1}
    roles = tuple(_role(name, count) for name, count in counts.items())
    cause = "killed from outside: nothing of the job has sent SIGKILL"
    failure = FailureStatus(
        "rollout",
        2,
        0,
        "node1",
        now - 2.2 * 3600,
        "killed by SIGKILL",
        decision="rollout:2 alone restarts",
        cause=cause,
    )
    write_status(
        job,
        JobStatus(
            "ppo", "ppo", "running", "", now - 2.5 * 3600, None, None, roles, failures=(failure,), failed=1
        ),
    )
    try:
        yield
    finally:
        os.close(lock)


def _role(name: str, count: int) -> RoleStatus:
    killed = name == "rollout"
    workers = tuple(
        WorkerStatus(
            rank,
            "serving" if name != "trainer" else "running",
            f"node{int(killed)}",
            int(killed and rank == 2),
            4100 + 10 * ord(name[0]) + rank,
            "",
            memory=(180 + 3 * rank) * 1_000_000,
            cpu=4321.0 - rank,
            generation=int(killed),
        )
        for rank in range(count)
    )
    return RoleStatus(name, "running", int(killed), int(killed), 3, workers)


def _run(*arguments: str) -> str:
    """The output of a subcommand on a terminal. Raises `subprocess.CalledProcessError`."""
    screen, end = os.openpty()
    termios.tcsetwinsize(end, (40, 116))
    command = [sys.executable, "-m", "unirun", *arguments]
    with os.fdopen(screen, "rb") as reader, subprocess.Popen(command, stdout=end) as running:
        os.close(end)
        text = b""
        # The end of a terminal is an error.
        with contextlib.suppress(OSError):
            while part := reader.read1():
                text += part
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return text.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
