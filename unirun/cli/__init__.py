"""The command ``unirun``."""

from __future__ import annotations

import signal
import sys

from unirun.cli.terminal import give_up_stdout, prepare_streams, say, warn
from unirun.errors import UnirunError

SUBCOMMANDS = ("plan", "graph", "status", "logs", "stop", "ls", "gc", "stubs", "completion")


def main(argv: list[str] | None = None) -> None:
    """Entry point; leaves with the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    prepare_streams()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except UnirunError as error:
        warn(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of a table went away, as head does; a shell expects the code of SIGPIPE.
        give_up_stdout()
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        import importlib

        module = importlib.import_module(f"unirun.cli.{argv[0]}")
        code: int = module.main(argv[1:])
        return code
    if argv and argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        say(f"unirun {version('torch-unirun')}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        from unirun.cli.options import build_parser

        build_parser("unirun").print_help()
        return 0
    from unirun.cli import run

    return run.main(argv)
