"""The completions are made from the parsers of all commands, and each shell takes them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_TIMEOUT
from unirun.cli import run
from unirun.cli.commands import SUBCOMMANDS
from unirun.cli.completion import script
from unirun.cli.options import OPTIONS, SHELLS
from unirun.rendezvous.creation import create_job
from unirun.wire.handshake import new_token


def complete(*words: str, path: str = os.environ["PATH"], cwd: Path | None = None) -> set[str]:
    """The words that bash offers for the last of `words`."""
    quoted = " ".join(map(shlex.quote, words))
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _unirun; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return set(output_of("bash", f"{script('bash')}\n{ask}", path=path, cwd=cwd).splitlines()) - {""}


def output_of(shell: str, text: str, *, path: str = os.environ["PATH"], cwd: Path | None = None) -> str:
    """The output of a shell that runs `text`."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    return subprocess.run(
        [shell, *(["-f"] if shell in ("zsh", "tcsh") else []), "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=True,
        env={**os.environ, "PATH": path},
        cwd=cwd,
    ).stdout


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


def jobs_at(folder: Path) -> str:
    """A PATH with a command that lists two jobs, and more with hostile names, and shows the status of one."""
    folder.mkdir()
    lines = "\n".join(("JOB  STATE", "run-1  running", "run_2.x  failed", *HOSTILE))
    shown = "\n".join(f"{who}  running" for who in ("actor:0", "actor:1", "actor:10", *HOSTILE))
    (folder / "unirun").write_text(
        f"#!/bin/sh\ncase $1 in\nls) cat <<'END'\n{lines}\nEND\n;;\n"
        f"status) [ \"$2\" = run-1 ] && cat <<'END'\njob run-1: running\nmaster: term 1\n\n{shown}\nEND\n;;\nesac\n"
    )
    (folder / "unirun").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_torchruns_option_prints_the_completions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--print-completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash")


@pytest.mark.starts_processes
def test_bash_completes_options_choices_and_subcommands() -> None:
    assert complete("unirun", "--max-r") == {"--max-restarts"}
    assert complete("unirun", "--start-method", "") == {"fork", "exec", "spawn", "forkserver"}
    assert complete("unirun", "--transport", "") == {"torch", "socket"}
    assert complete("unirun", "graph", "--format", "") == {"tree", "mermaid", "dot", "svg", "yaml"}
    assert complete("unirun", "plan", "--los") == {"--lost"}
    assert set(SUBCOMMANDS) <= complete("unirun", "")
    assert {name for option in OPTIONS for name in option.names} <= complete("unirun", "-")


@pytest.mark.starts_processes
@pytest.mark.parametrize("command", ["status", "logs", "stop", "gc", "graph"])
def test_names_of_jobs_are_never_expanded(tmp_path: Path, command: str) -> None:
    path = jobs_at(tmp_path / "bin")
    (tmp_path / "cwd").mkdir()
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


@pytest.mark.starts_processes
def test_bash_completes_subcommands_of_subcommands_and_what_follows_a_script(tmp_path: Path) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "train.py").touch()
    assert complete("unirun", "agent", "") == {"join", "drain"}
    assert complete("unirun", "experiment", "start", "--recover-") == {
        f"--recover-{end}" for end in ("mode", "retries", "after")
    }
    assert complete("unirun", "ls", "--") == {"--help", "--running", "--newest", "--store", "--json"}
    for words in (("trai",), ("-q", "trai"), ("plan", "tr"), ("train.py", ""), ("--config", "tr")):
        assert complete("unirun", *words, cwd=tmp_path / "cwd") == {"train.py"}


@pytest.mark.starts_processes
def test_bash_completes_workers_also_behind_a_colon(tmp_path: Path) -> None:
    path = jobs_at(tmp_path / "bin")
    every = {"actor", "actor:0", "actor:1", "actor:10"}
    for words in (("logs", "run-1"), ("logs", "-n", "5", "run-1"), ("events", "run-1", "--story")):
        assert complete("unirun", *words, "", path=path) == every
    assert complete("unirun", "stacks", "run-1", "act", path=path) == every
    assert complete("unirun", "stacks", "run-1", "critic", path=path) == set()
    # So bash has the words, and so it replaces the part behind the colon.
    assert complete("unirun", "logs", "run-1", "actor", ":", path=path) == {"0", "1", "10"}
    assert complete("unirun", "logs", "run-1", "actor", ":", "1", path=path) == {"1", "10"}
    assert complete("unirun", "logs", "run_2.x", "", path=path) == set()


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("unirun --max-r", {"--max-restarts"}),
        ("unirun --transport ", {"socket", "torch"}),
        ("unirun tr", {"trace", "train.py"}),
        ("unirun st", {"stacks", "status", "stop"}),
        ("unirun agent ", {"join", "drain"}),
        ("unirun plan --los", {"--lost"}),
        ("unirun status ", {"run-1", "run_2.x"}),
        ("unirun logs run-1 ", {"actor", "actor:0", "actor:1", "actor:10"}),
        ("unirun logs run-1 actor:1", {"actor:1", "actor:10"}),
        ("unirun logs -f run-1 actor:1", {"actor:1", "actor:10"}),
        ("unirun logs -n 5 run-1 actor:1", {"actor:1", "actor:10"}),
        ("unirun events run-1 --story act", {"actor", "actor:0", "actor:1", "actor:10"}),
    ],
)
def test_fish_completes_options_subcommands_jobs_and_scripts(
    tmp_path: Path, line: str, found: set[str]
) -> None:
    path = jobs_at(tmp_path / "bin")
    ask = f"{script('fish')}\ncomplete -C {shlex.quote(line)}"
    lines = output_of("fish", ask, path=path, cwd=tmp_path).splitlines()
    assert {each.partition("\t")[0] for each in lines} == found


@pytest.mark.starts_processes
def test_zsh_and_tcsh_take_the_completions(tmp_path: Path) -> None:
    for shell in ("zsh", "tcsh"):
        (tmp_path / shell).write_text(script(shell))
    ask = "autoload -Uz compinit; compinit -u -D; source ./zsh && print $_comps[unirun]"
    assert output_of("zsh", ask, cwd=tmp_path) == "_shtab_unirun\n"
    workers = "compadd() { print -l -- ${@:#--} }; line=(run-1); _unirun_workers"
    said = output_of("zsh", f"{ask}; {workers}", path=jobs_at(tmp_path / "bin"), cwd=tmp_path)
    assert said.split()[1:] == ["actor", "actor:0", "actor:1", "actor:10"]
    assert "(plan graph weights" in output_of("tcsh", "source ./tcsh; complete unirun", cwd=tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_knows_every_option(shell: str) -> None:
    text = script(shell)
    assert [option.name for option in OPTIONS if option.name.removeprefix("--") not in text] == []
