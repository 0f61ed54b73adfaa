"""`@trainer_invocation`: how a method of a workload is called through its role group."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, TypeVar, overload

from unirun.errors import UsageError

if TYPE_CHECKING:
    from typing import Unpack

    from unirun.roles.calls.group import AllAsync, AllBlocking, Invocable, OneAsync, OneBlocking, Options

P = ParamSpec("P")
R = TypeVar("R")

_OneWorker = Literal["RANK0", "ANY"] | int
_Workers = Literal["ALL"] | Sequence[int]
Target = _OneWorker | _Workers

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
        """True if it goes to one worker, so that the bare result is returned."""
        return self.target in (RANK0, ANY) or isinstance(self.target, int)


_NAMES = tuple(field.name for field in fields(Invocation))

_OF_A_CALL = ("timeout", "target", "auto_shard", "pre_func", "post_func", "idempotent", "retries")
"""The options that the calling process carries out, besides the choice to wait."""

DEFAULT = Invocation()
"""The options of public methods that are not decorated."""


@overload
def trainer_invocation(
    method: Callable[Concatenate[Any, P], R], /
) -> Invocable[P, R, R, list[R], list[R]]: ...


@overload
def trainer_invocation(
    *, target: _OneWorker, blocking: Literal[True] = ..., **options: Unpack[Options]
) -> OneBlocking: ...


@overload
def trainer_invocation(
    *, target: _OneWorker, blocking: Literal[False], **options: Unpack[Options]
) -> OneAsync: ...


@overload
def trainer_invocation(
    *, target: _Workers = ..., blocking: Literal[True] = ..., **options: Unpack[Options]
) -> AllBlocking: ...


@overload
def trainer_invocation(
    *, target: _Workers = ..., blocking: Literal[False], **options: Unpack[Options]
) -> AllAsync: ...


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
) -> Callable[[Callable[..., R]], Invocable[..., R, Any, Any, Any]]: ...


def trainer_invocation(*method: Any, **options: Any) -> Any:
    """Decorate a method of a workload with how a trainer's call of it is carried out. The method itself is unchanged.

    Public methods without it are called with the defaults::

        class Actor(BaseWorkload):
            @trainer_invocation(timeout=60)
            def update(self, samples):  # RG_ACTOR.update(shard(samples)) returns a list, one loss for each worker
                return self.step(samples)

            @trainer_invocation(target="RANK0")
            def weights(self):  # RG_ACTOR.weights() returns the bare result of rank 0
                return self.model.state_dict()

    - `blocking`: True (the default), the call waits for all results and returns them. False, it returns an
      `InvocationRef` at once.
    - `is_async`: True, the call waits for all results like a blocking one, and its `timeout` is 10 s by default.
      Cannot be given together with ``blocking=False``.
    - `timeout`: the deadline of the call in seconds. None (the default) stands for the job's ``call_timeout``, which is
      1800 s by default. At the deadline the caller gets `InvocationTimeout`, which names the workers that have not
      answered and has the results of the others.
    - `target`: which workers are called. ``"ALL"`` (the default) returns a list of results in rank order; a list of
      ranks returns a list in the order given. ``"RANK0"``, a single rank, and ``"ANY"`` (the worker with the fewest
      open calls) return the bare result of that worker.
    - `auto_shard`: True (the default), arguments that the caller marks with `shard` are split over the workers. If no
      argument is marked and each one is a list with as many items as there are workers, each worker gets its item.
      Everything else goes to all workers whole. False, everything goes to all workers whole, and `shard` is an error.
    - `pre_func`: called in the trainer with the arguments, before they are split. It returns the new ones: a tuple, a
      dict of keywords, a pair ``(args, kwargs)``, or one value.
    - `post_func`: called in the trainer with the result (the list, or the bare result). The call returns what it
      returns.
    - `idempotent`: True, the method may run more than once. When a worker is lost during the call, the call is made
      again in all its workers as soon as the lost one is back. False (the default), the caller gets `WorkerLost`.
    - `retries`: how many times an idempotent call is made again, 3 by default.
    - `concurrency`: more than 1, up to so many calls of this method run at the same time, in threads of the worker.
      All other calls run in the main thread, one at a time, in the order of arrival; ``async def`` methods run in an
      event loop beside it.

    Raises `UsageError` for a wrong option, when the class is defined.
    """
    if method and not options:
        return _mark(method[0], DEFAULT)
    if method:
        raise UsageError("@trainer_invocation takes named options only", "write blocking=…, timeout=…")
    invocation = _checked("@trainer_invocation", options)
    return lambda decorated: _mark(decorated, invocation)


def with_options(invocation: Invocation, method: str, options: Mapping[str, Any]) -> Invocation:
    """`invocation` with other `options`, those that a caller may change. Raises `UsageError` for a wrong one.

    `method` is its name in errors.
    """
    what = f"{method}.options"
    _expect_names(what, options, _OF_A_CALL)
    before = {name: getattr(invocation, name) for name in _NAMES}
    if "idempotent" in options:
        before["retries"] = None
    return _checked(what, {**before, **options})


def _mark(method: Any, invocation: Invocation) -> Any:
    if not callable(method) and not isinstance(method, classmethod):
        raise UsageError(f"@trainer_invocation decorates methods, not {method!r}", "write it above a def")
    setattr(method, _MARK, invocation)
    return method


def _checked(what: str, options: dict[str, Any]) -> Invocation:
    """The invocation with these options. Errors begin with `what`."""
    _expect_names(what, options, _NAMES)

    def expect(name: str, right: Callable[[Any], bool], wanted: str) -> None:
        if name in options and not right(options[name]):
            raise UsageError(f"{what}: {name}={options[name]!r}", f"give {wanted}")

    for name in ("blocking", "is_async", "auto_shard", "idempotent"):
        expect(name, lambda value: isinstance(value, bool), "True or False")
    for name in ("pre_func", "post_func"):
        expect(name, lambda value: value is None or callable(value), "a function")
    expect(
        "timeout",
        lambda value: value is None or (_is_number(value) and 0 < value < math.inf),
        "seconds above 0",
    )
    expect("target", _is_target, "'ALL', 'RANK0', 'ANY', a rank or a list of different ranks")
    expect("concurrency", lambda value: _is_int(value) and value >= 1, "a whole number from 1")
    expect("retries", lambda value: value is None or (_is_int(value) and value >= 0), "a whole number")
    if options.get("is_async") and options.get("blocking") is False:
        raise UsageError(f"{what}: is_async waits for results, blocking=False does not", "choose one")
    if options.get("retries") and not options.get("idempotent"):
        raise UsageError(f"{what}: retries would run the method again", "add idempotent=True if it may be")
    if options.get("retries") is None:
        options["retries"] = IDEMPOTENT_RETRIES if options.get("idempotent") else 0
    if options.get("is_async") and options.get("timeout") is None:
        options["timeout"] = ASYNC_TIMEOUT
    return Invocation(**options)


def _expect_names(what: str, options: Iterable[str], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{what} has no option {name}", remedy)


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


def called_ranks(role: str, size: int, options: Invocation, ranks: Sequence[int] | None) -> Sequence[int]:
    """The ranks of a role with `size` that may be called: `ranks` come before the target in `options`.

    Raises `UsageError` for ranks that there are not.
    """
    target = options.target
    if isinstance(target, int):
        ranks = (target,)
    elif not isinstance(target, str):
        ranks = tuple(target)
    elif ranks is None:
        ranks = range(size)
    if target == RANK0:
        ranks = ranks[:1]
    for rank in ranks:
        if not 0 <= rank < size:
            raise UsageError(f"role {role} has no rank {rank}", f"it has ranks 0 to {size - 1}")
    return ranks


def invocations(target: Any, base: type = object) -> dict[str, Invocation]:
    """The public methods of an object or a class, and their options; of those of `base` only the ones that are marked.

    Raises `UsageError` for a method called ``role``, an attribute of every role group.
    """
    found = {}
    kind = target if isinstance(target, type) else type(target)
    for name in dir(kind):
        if name.startswith("_"):
            continue
        method = inspect.getattr_static(kind, name)
        plain = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        if hasattr(base, name) and not hasattr(plain, _MARK):
            continue
        if callable(plain) and not isinstance(plain, type):
            found[name] = getattr(method, _MARK, getattr(plain, _MARK, DEFAULT))
    if "role" in found:
        raise UsageError(f"{kind.__name__} has a method called role, as every role group has", "rename it")
    return found
