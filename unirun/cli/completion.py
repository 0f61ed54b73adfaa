"""``unirun completion bash|zsh``: completions, made from the table of options.

Jobs are completed from the directories that are here: a key must not wait for a store.
"""

from __future__ import annotations

import sys

from unirun.cli import SUBCOMMANDS
from unirun.cli.options import Parser
from unirun.cli.optiontable import GRAPH_OPTIONS, OPTIONS, PLAN_OPTIONS

EVERY = (*OPTIONS, *PLAN_OPTIONS, *GRAPH_OPTIONS)

_BASH = """# unirun completion for bash: source <(unirun completion bash)
_unirun() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  COMPREPLY=()
  case ${{COMP_WORDS[1]}} in
    status|logs|stop|gc)
      local jobs=$(UNIRUN_STORE= unirun ls 2>/dev/null | tail -n +2 | cut -d' ' -f1)
      [[ $COMP_CWORD -eq 2 ]] && COMPREPLY=($(compgen -W "$jobs" -- "$cur"))
      return ;;
    graph)
      if [[ $COMP_CWORD -eq 2 && $cur != -* ]]; then
        local seen=$(UNIRUN_STORE= unirun ls 2>/dev/null | tail -n +2 | cut -d' ' -f1)
        COMPREPLY=($(compgen -W "$seen" -- "$cur") $(compgen -f -- "$cur"))
        return
      fi ;;
  esac
  case $prev in
{choices}
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "{options}" -- "$cur"))
  elif [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$cur") $(compgen -f -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}}
complete -o filenames -F _unirun unirun
"""

_ZSH = """#compdef unirun
# unirun completion for zsh: source <(unirun completion zsh)
_unirun() {{
  local -a commands options jobs
  commands=({commands})
  options=(
{options}
  )
  case $words[2] in
    status|logs|stop|gc)
      jobs=(${{(f)"$(UNIRUN_STORE= unirun ls 2>/dev/null | tail -n +2 | cut -d' ' -f1)"}})
      compadd -a jobs
      return ;;
    graph)
      jobs=(${{(f)"$(UNIRUN_STORE= unirun ls 2>/dev/null | tail -n +2 | cut -d' ' -f1)"}})
      (( CURRENT == 3 )) && compadd -a jobs ;;
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
        rows.append(f"    '{option.names[-1]}:{text}'")
    return _ZSH.format(options="\n".join(rows), commands=" ".join(SUBCOMMANDS))
