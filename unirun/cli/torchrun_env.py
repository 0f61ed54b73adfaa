"""Variables that torchrun itself reads, besides the ``PET_*`` of its options, and that unirun cannot honour.

The others are read where they count: ``TORCHELASTIC_ENABLE_FILE_TIMER`` by the agent, ``TORCHELASTIC_ERROR_FILE`` and
``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`` by the command, ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` with the options.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping

from unirun.errors import UsageError
from unirun.spec import JobSpec

HEALTH = "TORCHELASTIC_HEALTH_CHECK_PORT"
SLEEP = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
PYTHON = "PYTHON_EXEC"


def check_environment(environ: Mapping[str, str], spec: JobSpec) -> Iterator[str]:
    """Warnings about torchrun's variables. Raises `UsageError` for one that asks for what unirun does not do."""
    if _seconds(environ.get(SLEEP, "")) > 0:
        raise UsageError(f"{SLEEP}: unirun does not watch for workers in uninterruptible sleep", "unset it")
    scripts = [role.entry.target for role in spec.roles if role.entry.kind in ("script", "module")]
    if scripts and not _is_this_python(environ.get(PYTHON, sys.executable)):
        raise UsageError(
            f"{PYTHON}={environ[PYTHON]}: scripts run with unirun's own interpreter, {sys.executable}",
            f"unset it, or use --no-python {environ[PYTHON]} -u {scripts[0]}",
        )
    if HEALTH in environ:
        yield f"{HEALTH} has no effect: torch comes without a health check server, and unirun has none"


def _is_this_python(name: str) -> bool:
    """Whether `name` is this interpreter in this environment (``python`` and ``python3`` of one directory are)."""
    path = os.path.abspath(shutil.which(name) or name)
    same_place = os.path.dirname(path) == os.path.dirname(os.path.abspath(sys.executable))
    return same_place and os.path.realpath(path) == os.path.realpath(sys.executable)


def _seconds(text: str) -> float:
    """As torch reads it: what is no number means nothing."""
    try:
        return float(text)
    except ValueError:
        return 0.0
