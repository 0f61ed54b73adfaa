"""The completions are made from the table of options, and a shell takes them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.cli import run
from unirun.cli.completion import bash, zsh
from unirun.cli.options import OPTIONS, SUBCOMMANDS
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token


def complete(*words: str, path: str = os.environ["PATH"], cwd: Path | None = None) -> set[str]:
    """The words that bash offers for the last of `words`."""
    quoted = " ".join(map(shlex.quote, words))
    script = f"{bash()}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _unirun; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    env = {**os.environ, "PATH": path}
    found = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=True,
        env=env,
        cwd=cwd,
    )
    return set(found.stdout.splitlines()) - {""}


HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "x;touch pwned",
    "a$(touch${IFS}pwned)",
    "x'\"$(touch pwned)",
    "*",
    "\\x",
)
"""Names that do something, or become others, where a shell expands them."""


def test_torchruns_option_prints_the_completions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--print-completion", "bash"]) == 0
    assert capsys.readouterr().out == bash()


@pytest.mark.starts_processes
def test_bash_completes_options_choices_and_subcommands() -> None:
    assert complete("unirun", "--max") == {"--max-restarts"}
    assert complete("unirun", "--start-method", "") == {"fork", "exec", "spawn", "forkserver"}
    assert complete("unirun", "--transport", "") == {"torch", "socket"}
    assert complete("unirun", "graph", "--format", "") == {"tree", "mermaid", "dot", "svg", "yaml"}
    assert complete("unirun", "plan", "--los") == {"--lost"}
    assert set(SUBCOMMANDS) <= complete("unirun", "")
    assert {name for option in OPTIONS for name in option.names} <= complete("unirun", "-")


@pytest.mark.starts_processes
@pytest.mark.parametrize("command", ["status", "logs", "stop", "gc", "graph"])
def test_names_of_jobs_are_never_expanded(tmp_path: Path, command: str) -> None:
    stub = tmp_path / "bin" / "unirun"
    stub.parent.mkdir()
    lines = "\n".join(("JOB  STATE", "run-1  running", "run_2.x  failed", *HOSTILE))
    stub.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    stub.chmod(0o755)
    (tmp_path / "cwd").mkdir()
    path = f"{stub.parent}:{os.environ['PATH']}"
    for begun in ("", "run", "$(touch pwned)"):
        found = complete("unirun", command, begun, path=path, cwd=tmp_path / "cwd")
        assert found == {name for name in ("run-1", "run_2.x") if name.startswith(begun)}
    assert [*(tmp_path / "cwd").iterdir()] == []


@pytest.mark.starts_processes
def test_a_place_of_jobs_with_hostile_names_offers_the_others(home: Path, tmp_path: Path) -> None:
    job, lock = create_job("run-1", new_token())
    os.close(lock)
    for name in HOSTILE:
        (job.path.parent / name).mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "cwd").mkdir()
    assert complete("unirun", "status", "", path=path, cwd=tmp_path / "cwd") == {"run-1"}
    assert [*(tmp_path / "cwd").iterdir()] == []


@pytest.mark.starts_processes
def test_names_of_files_are_never_expanded(tmp_path: Path) -> None:
    folder, names = tmp_path / "cwd", {*HOSTILE, "a b"}
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    assert complete("unirun", "x.py", "", cwd=folder) == names
    assert complete("unirun", "x.py", "$(touch", cwd=folder) == {"$(touch pwned)"}
    assert {each.name for each in folder.iterdir()} == names


def test_zsh_knows_every_option_once() -> None:
    text = zsh()
    for option in OPTIONS:
        assert text.count(f"'{option.names[-1]}:") == 1
