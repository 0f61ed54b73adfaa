"""The completions are made from the table of options, and a shell takes them."""

from __future__ import annotations

import subprocess

from unirun.cli import SUBCOMMANDS
from unirun.cli.completion import bash, zsh
from unirun.cli.optiontable import OPTIONS


def complete(*words: str) -> set[str]:
    """What bash offers for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"{bash()}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _unirun; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True)
    return set(found.stdout.split())


def test_bash_completes_options_choices_and_subcommands() -> None:
    assert complete("unirun", "--max") == {"--max-restarts"}
    assert complete("unirun", "--start-method", "") == {"fork", "exec", "spawn", "forkserver"}
    assert complete("unirun", "--transport", "") == {"torch", "socket"}
    assert complete("unirun", "graph", "--format", "") == {"tree", "mermaid", "dot", "svg", "yaml"}
    assert complete("unirun", "plan", "--los") == {"--lost"}
    assert set(SUBCOMMANDS) <= complete("unirun", "")
    assert {name for option in OPTIONS for name in option.names} <= complete("unirun", "-")


def test_zsh_knows_every_option_once() -> None:
    text = zsh()
    for option in OPTIONS:
        assert text.count(f"'{option.names[-1]}:") == 1
