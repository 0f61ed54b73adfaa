"""The test for permanent errors, which a restart of the worker would raise again."""

from __future__ import annotations

from unirun.errors import UsageError

_PERMANENT = (ImportError, SyntaxError, NotImplementedError, UsageError)
_TRANSIENT = (OSError, MemoryError, RuntimeError)


def is_permanent(error: BaseException) -> bool:
    """Return True if `error` is in the code or its installation: a module that is not there, text that is no
    Python, a method that is missing, a wrong use of unirun.

    Conservative: what may have come from outside (files, network, devices: `OSError`, `RuntimeError`, `MemoryError`)
    may pass, and so may what was raised because of it.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, _TRANSIENT) and not isinstance(cause, _PERMANENT):
            return False
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return isinstance(error, _PERMANENT)
