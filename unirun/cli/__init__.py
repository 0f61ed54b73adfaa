"""The command ``unirun``."""

from __future__ import annotations

import sys

from unirun.errors import UnirunError

SUBCOMMANDS = ("plan", "graph", "status", "logs", "stop", "ls", "gc", "stubs", "completion")


def main(argv: list[str] | None = None) -> None:
    """Entry point; leaves with the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(arguments)
    except UnirunError as error:
        for line in str(error).splitlines():
            print(f"unirun: {line}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of a table went away; there is nobody left to tell.
        sys.stderr.close()
        code = 141
    sys.exit(code)


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        import importlib

        module = importlib.import_module(f"unirun.cli.{argv[0]}")
        code: int = module.main(argv[1:])
        return code
    if argv and argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"unirun {version('torch-unirun')}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        from unirun.cli.options import build_parser

        build_parser("unirun").print_help()
        return 0
    from unirun.cli import run

    return run.main(argv)
