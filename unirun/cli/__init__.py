"""The command ``unirun``."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import sys

from unirun.cli.commandline import parser_of_job
from unirun.cli.commands import SUBCOMMANDS, call
from unirun.errors import EXIT_FAILURE, UnirunError, UsageError
from unirun.launcher.foreground.terminal import (
    drop_output,
    outlast_user_signals,
    prepare_streams,
    say,
    warn,
)
from unirun.wire.reporting import NO_THREAD, lacks_threads

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: list[str] | None = None) -> None:
    """Entry point; leaves with the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if os.getpid() == 1:
        _end_by_signals()
    prepare_streams()
    outlast_user_signals()
    # At its end the interpreter looks for cycles among all objects, which takes a sixth of a short command.
    atexit.register(gc.freeze)
    try:
        code = _dispatch_and_flush(arguments)
    except UnirunError as error:
        warn(str(error))
        code = error.exit_code
    except RuntimeError as error:
        if not lacks_threads(error):
            raise
        warn(NO_THREAD)
        code = EXIT_FAILURE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


def _end_by_signals() -> None:
    """Let signals end this process as they end any other, until a job has handlers of its own.

    The first process of a container has no default action: a signal that it does not handle yet is lost.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, lambda number, _: os._exit(128 + number))


def _dispatch_and_flush(argv: list[str]) -> int:
    """Run the command and flush stdout. Output that cannot be written is dropped before the interpreter exits."""
    try:
        try:
            return _dispatch(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as head does. A shell expects the code of SIGPIPE.
        drop_output()
        return 128 + signal.SIGPIPE
    except FileNotFoundError as error:
        # An error of os.getcwd() has no file name.
        if str(error.filename).startswith("/proc/") and not os.path.exists("/proc/self"):
            from unirun.launcher.launch import no_proc

            raise no_proc() from error
        if error.filename is not None or _cwd_is_there():
            raise
        raise UsageError("the working directory is gone", "call unirun in another one") from error
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        drop_output()
        warn(f"the output cannot be written: {error.strerror}")
        return EXIT_FAILURE


def _cwd_is_there() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        return call(argv[0], argv[1:])
    if argv and argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        say(f"unirun {version('torch-unirun')}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        parser_of_job("unirun").print_help()
        return 0
    from unirun.cli import run

    return run.main(argv)
