"""``unirun completion bash|zsh``: completions, made from the table of options.

Jobs are completed from the directories of this host only: a completion must not wait for a store.
"""

from __future__ import annotations

import sys

from unirun.cli.commandline import Parser
from unirun.cli.options import GRAPH_OPTIONS, OPTIONS, PLAN_OPTIONS, SUBCOMMANDS

EVERY = (*OPTIONS, *PLAN_OPTIONS, *GRAPH_OPTIONS)

_BASH = """# unirun completion for bash: source <(unirun completion bash)
# compgen -W expands its words as the shell does, so it gets words of this script only, no names of jobs or files.
_unirun_jobs() {{
  local job
  while IFS= read -r job; do
    [[ $job == "$1"* && $job != *[!A-Za-z0-9._-]* ]] && COMPREPLY+=("$job")
  done < <(UNIRUN_STORE= unirun ls 2>/dev/null | tail -n +2 | cut -d' ' -f1)
}}
_unirun_files() {{
  local file
  while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$1")
}}
_unirun() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  COMPREPLY=()
  case ${{COMP_WORDS[1]}} in
    status|logs|events|stop|gc|weights)
      [[ $COMP_CWORD -eq 2 ]] && _unirun_jobs "$cur"
      return ;;
    agent)
      if [[ $COMP_CWORD -eq 2 ]]; then
        COMPREPLY=($(compgen -W "join drain" -- "$cur"))
      elif [[ $COMP_CWORD -ge 3 && $cur != -* ]]; then
        _unirun_jobs "$cur"
      fi
      return ;;
    graph)
      if [[ $COMP_CWORD -eq 2 && $cur != -* ]]; then
        _unirun_jobs "$cur"
        _unirun_files "$cur"
        return
      fi ;;
  esac
  case $prev in
{choices}
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "{options}" -- "$cur"))
  elif [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$cur"))
    _unirun_files "$cur"
  else
    _unirun_files "$cur"
  fi
}}
complete -o filenames -F _unirun unirun
"""

_ZSH = """#compdef unirun
# unirun completion for zsh: source <(unirun completion zsh)
_unirun_jobs() {{
  local -a jobs
  jobs=(${{(f)"$(UNIRUN_STORE= unirun ls 2>/dev/null | tail -n +2 | cut -d' ' -f1)"}})
  jobs=(${{jobs:#*[^A-Za-z0-9._-]*}})
  compadd -a jobs
}}
_unirun() {{
  local -a commands options
  commands=({commands})
  options=(
{options}
  )
  case $words[2] in
    status|logs|events|stop|gc|weights)
      _unirun_jobs
      return ;;
    agent)
      (( CURRENT == 3 )) && compadd join drain || _unirun_jobs
      return ;;
    graph)
      (( CURRENT == 3 )) && _unirun_jobs ;;
  esac
  if [[ $PREFIX == -* ]]; then
    _describe option options
  else
    (( CURRENT == 2 )) && compadd -a commands
    _files
  fi
}}
compdef _unirun unirun
"""


def main(argv: list[str]) -> int:
    """Print the completion script for a shell. Returns 0."""
    parser = Parser(prog="unirun completion", description="Print completions for a shell.")
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(argv).shell
    sys.stdout.write(bash() if shell == "bash" else zsh())
    return 0


def bash() -> str:
    """The script for bash."""
    choices = "\n".join(
        f'    {"|".join(o.names)}) COMPREPLY=($(compgen -W "{" ".join(o.choices)}" -- "$cur")); return ;;'
        for o in EVERY
        if o.choices
    )
    names = " ".join(name for option in EVERY for name in option.names)
    return _BASH.format(choices=choices, options=f"{names} --help", commands=" ".join(SUBCOMMANDS))


def zsh() -> str:
    """The script for zsh."""
    rows = []
    for option in EVERY:
        text = option.help.replace("'", "").replace(":", "\\:")
        rows.append(f"    '{option.name}:{text}'")
    return _ZSH.format(options="\n".join(rows), commands=" ".join(SUBCOMMANDS))
