"""`@trainer_invocation`: how a method of a workload is called through its role group."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeVar, overload

from unirun.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

Target = Literal["ALL", "RANK0", "ANY"] | int | Sequence[int]

ALL: Final[Literal["ALL"]] = "ALL"
RANK0: Final[Literal["RANK0"]] = "RANK0"
ANY: Final[Literal["ANY"]] = "ANY"

ASYNC_TIMEOUT: Final = 10.0
"""Seconds that ``is_async=True`` waits when no timeout is given, as in DLRover's guide."""

IDEMPOTENT_RETRIES: Final = 3

_MARK = "__unirun_invocation__"


@dataclass(frozen=True, slots=True)
class Invocation:
    """The options of one method; see `trainer_invocation`. `ranks` of None stands for `target` ALL or ANY."""

    blocking: bool = True
    is_async: bool = False
    timeout: float | None = None
    target: Target = ALL
    auto_shard: bool = True
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[[Any], Any] | None = None
    idempotent: bool = False
    concurrency: int = 1
    retries: int = 0

    @property
    def one(self) -> bool:
        """Whether it goes to one worker, so that the bare result is returned."""
        return self.target in (RANK0, ANY) or isinstance(self.target, int)


DEFAULT = Invocation()
"""For public methods without a decorator."""


@overload
def trainer_invocation(method: F, /) -> F: ...


@overload
def trainer_invocation(
    *,
    blocking: bool = True,
    is_async: bool = False,
    timeout: float | None = None,
    target: Target = ALL,
    auto_shard: bool = True,
    pre_func: Callable[..., Any] | None = None,
    post_func: Callable[[Any], Any] | None = None,
    idempotent: bool = False,
    concurrency: int = 1,
    retries: int | None = None,
) -> Callable[[F], F]: ...


def trainer_invocation(*method: Any, **options: Any) -> Any:
    """Say how a trainer's call of this method is carried out. The method itself is left as it is.

    blocking
        True: the call returns the results, in rank order. False: it returns an `InvocationRef` at once
        (``result(timeout)``, ``done()``, ``add_done_callback``, awaitable; see also `unirun.wait`).
    is_async
        True: wait `timeout` seconds (10 if none is given) for **all** results; those that are missing then are
        named in `InvocationTimeout`, which has the finished ones.
    timeout
        The deadline of the call in seconds, whatever the other options; without one the job's ``call_timeout``
        (30 minutes) counts. Every call has a deadline, and `InvocationTimeout` at its end.
    target
        ``"ALL"`` ranks; ``"RANK0"``, a rank, or ``"ANY"`` (the least busy worker): the bare result of that one is
        returned instead of a list; or a list of ranks: their results in the order given.
    auto_shard
        True: what the caller marks with ``unirun.shard(x)`` is split over the ranks (lists, tuples, tensors, dicts
        of these and whatever has a length and slices; parts differ by one at most); and when every argument is a
        list of exactly as many items as there are targets, each rank gets its item. Everything else, and what is
        marked with ``unirun.replicate(x)``, goes to every rank. ``ref.sharding`` tells what was done.
    pre_func
        Takes the method's arguments in the trainer, before they are split, and returns new ones: a tuple, a dict
        (keywords), an ``(args, kwargs)`` pair, or one value.
    post_func
        Takes the result in the trainer (the list, or the bare result) and returns what the call returns.
    idempotent
        The method may run again: when a worker is lost in mid-call the whole call is made again, once the worker
        is back, up to `retries` times (3 if none are given). Otherwise `WorkerLost` is raised.
    concurrency
        More than 1: up to so many calls of this method run in threads beside the main thread, where all other
        calls run one at a time in the order of their arrival. ``async def`` methods run in an event loop beside it.

    Raises `UsageError` for a wrong option, when the class is defined.
    """
    if method and not options:
        return _mark(method[0], DEFAULT)
    if method:
        raise UsageError("@trainer_invocation takes named options only", "write blocking=…, timeout=…")
    invocation = _checked(options)
    return lambda decorated: _mark(decorated, invocation)


def _mark(method: Any, invocation: Invocation) -> Any:
    if not callable(method) and not isinstance(method, classmethod):
        raise UsageError(f"@trainer_invocation decorates methods, not {method!r}", "write it above a def")
    setattr(method, _MARK, invocation)
    return method


def _checked(options: dict[str, Any]) -> Invocation:
    known = [field.name for field in fields(Invocation)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"@trainer_invocation has no option {name}", remedy)
    for name in ("blocking", "is_async", "auto_shard", "idempotent"):
        _expect(name, options, lambda value: isinstance(value, bool), "True or False")
    for name in ("pre_func", "post_func"):
        _expect(name, options, lambda value: value is None or callable(value), "a function")
    _expect(
        "timeout",
        options,
        lambda value: value is None or (_is_number(value) and 0 < value < math.inf),
        "seconds above 0",
    )
    _expect("target", options, _is_target, "'ALL', 'RANK0', 'ANY', a rank or a list of different ranks")
    _expect("concurrency", options, lambda value: _is_int(value) and value >= 1, "a whole number from 1")
    _expect(
        "retries", options, lambda value: value is None or (_is_int(value) and value >= 0), "a whole number"
    )
    if options.get("is_async") and options.get("blocking") is False:
        raise UsageError(
            "@trainer_invocation: is_async waits for results, blocking=False does not", "choose one"
        )
    if options.get("retries") and not options.get("idempotent"):
        raise UsageError(
            "@trainer_invocation: retries would run the method again", "add idempotent=True if it may be"
        )
    if options.get("retries") is None:
        options["retries"] = IDEMPOTENT_RETRIES if options.get("idempotent") else 0
    if options.get("is_async") and options.get("timeout") is None:
        options["timeout"] = ASYNC_TIMEOUT
    return Invocation(**options)


def _expect(name: str, options: dict[str, Any], right: Callable[[Any], bool], what: str) -> None:
    if name in options and not right(options[name]):
        raise UsageError(f"@trainer_invocation: {name}={options[name]!r}", f"give {what}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_target(value: Any) -> bool:
    if isinstance(value, str):
        return value in (ALL, RANK0, ANY)
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_int(r) and r >= 0 for r in value) and len(set(value)) == len(value)
    return _is_int(value) and value >= 0


def invocations(target: Any, base: type = object) -> dict[str, Invocation]:
    """What can be called on an object: its public methods that are not those of `base`."""
    found = {}
    for name in dir(type(target)):
        if name.startswith("_") or hasattr(base, name):
            continue
        method = inspect.getattr_static(type(target), name)
        plain = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        if callable(plain) and not isinstance(plain, type):
            found[name] = getattr(method, _MARK, getattr(plain, _MARK, DEFAULT))
    return found
