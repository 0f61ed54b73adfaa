"""``unirun completion SHELL``: completions, which shtab makes of the parsers of all commands.

Jobs are completed from the directories of this host only: a completion must not wait for a store. Names with characters
that mean something to a shell are left out.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import shtab

from unirun.cli.commandline import add_options, parser_of_job
from unirun.cli.commands import COMMANDS, FAMILIES, SUBCOMMANDS, filled
from unirun.cli.options import OPTIONS

_LIST = r'env UNIRUN_STORE= unirun ls | tail -n +2 | tr " " "\t" | cut -f1'
_JOBS = f"{_LIST} | grep -x '[A-Za-z0-9._-]*'"
_WHO = r"""awk -F '[: ]' '/^[A-Za-z0-9._-]+:[0-9]+ /{print $1; print $1":"$2}' | sort -u"""
"""Picks the roles and workers out of what ``unirun status`` prints."""

_OF_JOBS = {
    "bash": "_unirun_jobs",
    "zsh": "_unirun_jobs",
    "fish": "(_unirun_jobs)",
    "tcsh": f"`{_LIST}`",
}

_OF_WORKERS = {"bash": "_unirun_workers", "zsh": "_unirun_workers", "fish": "(_unirun_workers)"}

_KINDS = {
    **dict.fromkeys(("job", "JOB"), _OF_JOBS),
    **dict.fromkeys(("who", "WHO"), _OF_WORKERS),
    **dict.fromkeys(("FILE", "JOBFILE", "SCRIPT"), shtab.FILE),
    "DIR": shtab.DIRECTORY,
}
"""The candidates for an argument, by its metavar or else its name."""

_BASH = f"""_unirun_jobs() {{
  local job
  {_JOBS} | while IFS= read -r job; do [[ $job == "$1"* ]] && echo "$job"; done
}}
_unirun_workers() {{
  local job= word
  for word in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
    [[ -z $job && $word != -* && $word =~ [^0-9] ]] && job=$word
  done
  env UNIRUN_STORE= unirun status ${{job:+"$job"}} 2>/dev/null | {_WHO} | while IFS= read -r word; do
    [[ $word == "$1"* ]] && echo "$word"
  done
}}
# Bash takes a colon for the end of a word; here it is in names of workers, as in actor:0.
_unirun() {{
  local words=() word at=0 index before current
  for index in "${{!COMP_WORDS[@]}}"; do
    word=${{COMP_WORDS[index]}}
    if (( ${{#words[@]}} > 1 )) && [[ $word == : || $before == *: ]]; then
      words[${{#words[@]}}-1]+=$word
    else
      words+=("$word")
    fi
    before=${{words[${{#words[@]}}-1]}}
    (( index == COMP_CWORD )) && at=$(( ${{#words[@]}} - 1 ))
  done
  local COMP_WORDS=("${{words[@]}}") COMP_CWORD=$at
  _shtab_unirun "$@"
  current=${{words[at]}}
  if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
    COMPREPLY=("${{COMPREPLY[@]#"${{current%"${{current##*:}}"}}"}}")
  fi
}}
# The first word is a command or a script; only arguments follow a script.
_shtab_unirun_pos_0_COMPGEN=_shtab_compgen_files
_shtab_unirun_pos_0_nargs=1"""

_ZSH = f"""_unirun_jobs() {{ compadd "$@" -- ${{(f)"$({_JOBS})"}} }}
_unirun_workers() {{
  compadd "$@" -- ${{(f)"$(env UNIRUN_STORE= unirun status ${{line[1]:#-*}} 2>/dev/null | {_WHO})"}}
}}
# The first word is a command or a script; files follow a script.
functions[_unirun_commands]=$functions[_shtab_unirun]
_shtab_unirun() {{
  local first=$(( CURRENT == 2 )) prefix=$PREFIX
  _unirun_commands "$@"
  [[ $prefix == -* ]] || (( ! first && compstate[nmatches] )) || _files
}}
# Of shtab's two ways to load it, neither is `source`.
[[ $zsh_eval_context[-1] == file ]] && {{ compdef _shtab_unirun unirun; return }}"""

_FISH = f"""function _unirun_jobs; {_JOBS}; end
function _unirun_workers
  set -l words (commandline -opc | string match -v -- '-*' | string match -rv '^[0-9]+$')
  env UNIRUN_STORE= unirun status $words[3] 2>/dev/null | {_WHO}
end"""

_PREAMBLES = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_AFTER = {
    "bash": "complete -o bashdefault -F _unirun unirun\n",
    # The first word may be a script. Options that have a value in some commands only would hide the word behind them.
    "fish": """complete -c unirun -n "_shtab_unirun_using; and test \\$_shtab_unirun_npos -eq 0" -F
set -g _shtab_unirun_opts_with_value (string match -rv -- '^(-f|--module)$' $_shtab_unirun_opts_with_value)
""",
}
"""The lines that follow the completions of shtab."""


def main(options: Any) -> int:
    """Print the completions for a shell. Returns 0."""
    sys.stdout.write(script(options.shell))
    return 0


def script(shell: str) -> str:
    """The completions for a shell."""
    parser = parser_of_job("unirun")
    commands = parser.add_subparsers(prog="unirun")
    for name in SUBCOMMANDS:
        about = FAMILIES.get(name) or COMMANDS[name].description
        command = filled(commands.add_parser(name, help=about, conflict_handler="resolve"), name)
        if name in COMMANDS and COMMANDS[name].describes:
            add_options(command.add_argument, OPTIONS)
            _add_script(command)
    if shell != "zsh":
        # In zsh, what follows commands would be hidden by it.
        _add_script(parser)
    _hint(parser)
    text: str = shtab.complete(parser, shell, preamble=_PREAMBLES.get(shell, ""))
    return f"{text}\n{_AFTER.get(shell, '')}"


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT")


def _hint(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _hint(inner)
        elif kind := _KINDS.get(str(action.metavar or action.dest)):
            action.complete = kind  # type: ignore[attr-defined]
            if action.nargs == "?" and not action.option_strings:
                # In bash, one that may be left out would hide those behind it.
                action.nargs = None
