"""Every console block of the documents is run in order, and prints what is shown."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.documents import PAGES, Step, blocks, numbers_in, pattern, steps, write
from tests.waiting import WAIT_TIMEOUT

from .harness import START_TIMEOUT, Unirun

pytestmark = [pytest.mark.usefixtures("warm_functions"), pytest.mark.long]

LOOKS = ("unirun status", "unirun logs", "unirun graph", "unirun ls")
"""Read-only commands: they are repeated, as their output may take a moment to appear."""

MARKS = {
    # It starts its own warm process.
    "docs/warm.md": pytest.mark.cold,
    # Their commands train for half a minute or more, or import transformers. Trials of `make test` try the same.
    "docs/train.md": pytest.mark.chaos,
    "docs/from-ray-train.md": pytest.mark.chaos,
    "docs/experiments.md": pytest.mark.chaos,
    "docs/from-realhf.md": pytest.mark.chaos,
}

CONSOLES = [
    pytest.param(page, marks=MARKS.get(page, ()))
    for page in PAGES
    if any(block.language == "console" for block in blocks(page))
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", CONSOLES)
def test_console_blocks_of_a_page_show_the_real_output(page: str, unirun: Unirun) -> None:
    write(page, unirun.root)
    numbers: dict[str, str] = {}
    consoles = [block for block in blocks(page) if block.language == "console"]
    for block, step in ((each, step) for each in consoles for step in steps(each)):
        # The pids that stand in the page are not those of today.
        command = substituted(step.command, numbers, unirun)
        deadline = time.monotonic() + WAIT_TIMEOUT
        while True:
            printed = run(command, unirun)
            missing, found = compare(step, printed)
            if not missing:
                break
            looks = command.startswith(LOOKS) and time.monotonic() < deadline
            assert looks, f"{block}: $ {command}\ndoes not print\n  {missing}\nbut\n{printed}"
            time.sleep(0.1)
        numbers |= found


def substituted(command: str, numbers: dict[str, str], unirun: Unirun) -> str:
    """`command` with real numbers in place of those shown. It kills processes of this page's jobs only."""
    real = re.sub(r"\b\d{4,}\b", lambda shown: numbers.get(shown[0], shown[0]), command)
    if "kill" in command:
        pid = re.fullmatch(r"kill -9 (\d+)", real)
        assert pid, f"{command}: a page kills one process, by its pid"
        assert int(pid[1]) in unirun.processes(), f"{real} would kill a process of somebody else"
    return real


def run(command: str, unirun: Unirun) -> str:
    """The output of a command on both streams. It succeeds."""
    environment = unirun.environment({"COLUMNS": "120"})
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=unirun.root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_TIMEOUT,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


def compare(step: Step, printed: str) -> tuple[str, dict[str, str]]:
    """The first shown line that was not printed, and the real values of the numbers shown."""
    real = [line.strip() for line in printed.splitlines()]
    numbers: dict[str, str] = {}
    for shown in step.shown:
        looked_for = pattern(shown)
        match = next((match for line in real if (match := looked_for.fullmatch(line))), None)
        if match is None:
            return shown, {}
        real.remove(match.string)
        numbers |= dict(zip(numbers_in(shown), match.groups(), strict=True))
    return "", numbers
