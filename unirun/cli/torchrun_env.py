"""Variables that torchrun itself reads, besides the ``PET_*`` of its options, and that unirun cannot honour.

The others are read where they count: ``TORCHELASTIC_ENABLE_FILE_TIMER`` and ``PYTHON_EXEC`` by the agent,
``TORCHELASTIC_ERROR_FILE`` and ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`` by the command,
``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` with the options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unirun.errors import UsageError

HEALTH = "TORCHELASTIC_HEALTH_CHECK_PORT"
SLEEP = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


def check_environment(environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings about torchrun's variables. Raises `UsageError` for one that asks for what unirun does not do."""
    if _seconds(environ.get(SLEEP, "")) > 0:
        raise UsageError(f"{SLEEP}: unirun does not watch for workers in uninterruptible sleep", "unset it")
    if HEALTH in environ:
        yield f"{HEALTH} has no effect: torch comes without a health check server, and unirun has none"


def _seconds(text: str) -> float:
    """As torch reads it: what is no number means nothing."""
    try:
        return float(text)
    except ValueError:
        return 0.0
