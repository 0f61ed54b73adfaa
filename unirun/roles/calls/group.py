"""Role groups: the trainer's handle on the workers of a role, and on each of their methods; `trainer_invocation`, which
says how a method is called."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from unirun.errors import UsageError
from unirun.roles.calls.call import InvocationRef, Method, wait
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.policy import (
    ALL,
    ANY,
    DEFAULT,
    Invocation,
    OneWorker,
    Target,
    Workers,
    checked,
    mark,
    with_options,
)
from unirun.values import show_ranks

P = ParamSpec("P")
R = TypeVar("R")
Waited = TypeVar("Waited")
Plain = TypeVar("Plain")


_OWN = "a worker has its own: unirun.init().role_group(NAME), and [RANK] for one worker of it"


class RemoteMethod(Generic[P, R, Waited, Plain]):
    """A method of the workers of a role group, or of one worker: ``self.RG_ACTOR.update``.

    ``RG_ACTOR.update(x)`` calls it as its `trainer_invocation` says. The methods below say otherwise for one call; the
    target is that of the decorator where nothing else is said. Each of them raises `EncodingError` for an argument
    that cannot be pickled, and `UsageError` for one that cannot be split. Those that wait raise what
    `InvocationRef.result` raises.

    For type checkers, `P` are the parameters, `R` is what one worker returns, `Waited` what `call` returns (``list[R]``
    or ``R``), and `Plain` what the plain call returns (`Waited` or ``InvocationRef[Waited]``).
    """

    __slots__ = ("__name__", "_caller", "_invocation", "_methods", "_plain", "_workers")
    _send_instead = _OWN

    def __init__(self, workers: _Workers, name: str, invocation: Invocation) -> None:
        """Raises `UsageError` if the target is not among `workers`."""
        target = invocation.target
        wanted = [] if isinstance(target, str) else [target] if isinstance(target, int) else target
        if not set(wanted) <= set(workers._own_ranks):
            raise UsageError(
                f"{name} has target {target}, which is not in {workers!r}", "use the whole group"
            )
        self.__name__, self._workers, self._invocation = name, workers, invocation
        self._caller = workers._caller
        self._methods: dict[bool, Method] = {}
        self._plain = self._method(blocking=invocation.blocking)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Plain:
        ref: Any = self._caller.invoke(self._plain, args, kwargs)
        returned: Plain = ref.result() if self._invocation.blocking else ref
        return returned

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Waited:
        """Call the method and wait for its result, also if it is ``blocking=False``."""
        result: Waited = self._caller.invoke(self._method(blocking=True), args, kwargs).result()
        return result

    def call_async(self, *args: P.args, **kwargs: P.kwargs) -> InvocationRef[Waited]:
        """Start a call and return its `InvocationRef` at once, also if the method is ``blocking=True``."""
        return self._caller.invoke(self._method(blocking=False), args, kwargs)

    def rank0(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method in the first worker of the group only, whatever its target is. Waits for the result."""
        invocation = replace(self._invocation, target=self._workers._own_ranks[0])
        first = RemoteMethod[P, R, R, Any](self._workers, self.__name__, invocation)
        return first.call(*args, **kwargs)

    def map(self, items: Iterable[Any], /, *args: Any, **kwargs: Any) -> list[R]:
        """Call the method once for each of `items`, in one worker each time. Returns the results in their order.

        The first items go to the workers in rank order, each further one to the worker with the fewest open calls. At
        most two calls per worker are open at a time, so items of an iterator are taken as they are needed. `args` and
        `kwargs` follow the item in every call. Raises the first error, in the order of `items`::

            scores = self.RG_REWARD.score.map(batches)
        """
        invocation = replace(self._invocation, target=ANY, auto_shard=False)
        each = replace(
            RemoteMethod(self._workers, self.__name__, invocation)._method(blocking=False), turns={}
        )
        refs: list[InvocationRef[R]] = []
        open_refs: list[InvocationRef[R]] = []
        for item in items:
            if len(open_refs) >= 2 * len(self._workers._own_ranks):
                _, open_refs = wait(open_refs)
            refs.append(self._caller.invoke(each, (item, *args), kwargs))
            open_refs.append(refs[-1])
        return [ref.result() for ref in refs]

    if TYPE_CHECKING:

        @overload
        def options(
            self,
            *,
            timeout: float | None = ...,
            auto_shard: bool = ...,
            idempotent: bool = ...,
            retries: int | None = ...,
        ) -> Self: ...

        @overload
        def options(
            self,
            *,
            target: Target = ...,
            pre_func: Callable[..., Any] | None = ...,
            post_func: Callable[[Any], Any] | None = ...,
            timeout: float | None = ...,
            auto_shard: bool = ...,
            idempotent: bool = ...,
            retries: int | None = ...,
        ) -> RemoteMethod[..., Any, Any, Any]: ...

    def options(self, **options: Any) -> Any:
        """The same method with other options: ``RG_ACTOR.update.options(timeout=5).call(x)``.

        Those of `trainer_invocation` but `blocking`, `is_async` and `concurrency`. Raises `UsageError` for a wrong one.
        """
        name = f"{self._workers.role}.{self.__name__}"
        return RemoteMethod(self._workers, self.__name__, with_options(self._invocation, name, options))

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self._workers!r}>"

    if not TYPE_CHECKING:
        # Type checkers know the names.

        def __getattr__(self, name: str) -> None:
            text = f"'RemoteMethod' object has no attribute {name!r}"
            if name == "remote":
                text += (
                    f": write {self.__name__}(…); {self.__name__}.call_async(…) does not wait for the result"
                )
            raise AttributeError(text, name=name, obj=self)

    def _method(self, *, blocking: bool) -> Method:
        if blocking not in self._methods:
            invocation = replace(self._invocation, blocking=blocking)
            role, ranks = self._workers.role, self._workers._own_ranks
            self._methods[blocking] = self._caller.method(role, self.__name__, invocation, ranks)
        return self._methods[blocking]


class _Workers:
    """The common part of a role group and a handle on one worker."""

    _send_instead = _OWN

    def __init__(self, caller: Caller, role: str, ranks: Sequence[int]) -> None:
        # Those of a whole role are a list that the caller keeps up to date.
        self._caller, self._role, self._own_ranks = caller, role, ranks

    @property
    def role(self) -> str:
        """The role's name."""
        return self._role

    def __getattr__(self, name: str) -> RemoteMethod[..., Any, Any, Any]:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = RemoteMethod[..., Any, Any, Any](self, name, self._invocation(name))
        # Found here the next time, without asking again.
        self.__dict__[name] = method
        return method

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._caller.methods(self.role)]

    def _invocation(self, name: str) -> Invocation:
        methods = self._caller.methods(self.role)
        if name not in methods:
            near = difflib.get_close_matches(name, methods, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            there = ", ".join(sorted(methods)) or "none"
            raise AttributeError(f"role {self.role} has no method {name!r}; {meant}its methods are: {there}")
        return methods[name]


class WorkerHandle(_Workers):
    """One worker of a role: ``RG_ACTOR[2].update(x)`` calls that worker, whatever the method's `target` is.

    It returns the bare result, or an `InvocationRef` if the method is ``blocking=False``.
    """

    @property
    def rank(self) -> int:
        """Its rank."""
        return self._own_ranks[0]

    def _invocation(self, name: str) -> Invocation:
        return replace(super()._invocation(name), target=self.rank)

    def __repr__(self) -> str:
        return f"<{self.role}:{self.rank}>"


class RoleGroup(_Workers):
    """All workers of a role, or some of them: ``self.RG_ACTOR`` in a trainer, ``ctx.role_group("actor")`` in a script.

    Each public method of the workload is a `RemoteMethod` here. ``group.update(x)`` calls the workers that the method's
    `trainer_invocation` names, and returns a list of results in rank order, or an `InvocationRef` if the method is
    ``blocking=False``. An unknown method raises `AttributeError`, which names the nearest one.

    ``group[2]`` is the `WorkerHandle` of one worker. ``group[1:3]`` is a smaller group, in which target ``"ALL"``
    stands for its own workers. ``len(group)`` is the number of workers, and iterating gives their handles in rank
    order. That number changes between two calls, of an elastic role that grows or has become smaller.

    A call raises what the method raised in the worker, `InvocationTimeout` at its deadline, `WorkerLost` when a worker
    died, `EncodingError` for an argument that cannot be pickled.

    For type checkers, derive a class from this one and the workload, and annotate the trainer with it. It has the
    signatures of all methods that are decorated with `trainer_invocation`::

        class ActorGroup(RoleGroup, Actor): ...

        class PPOTrainer(BaseTrainer):
            RG_ACTOR: ActorGroup
    """

    def __init__(self, caller: Caller, role: str, ranks: Sequence[int]) -> None:
        super().__init__(caller, role, ranks)
        self._worker_handles: dict[int, WorkerHandle] = {}

    def __len__(self) -> int:
        return len(self._own_ranks)

    @overload
    def __getitem__(self, index: int) -> WorkerHandle: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> WorkerHandle | RoleGroup:
        if isinstance(index, slice):
            if not self._own_ranks[index]:
                raise UsageError(f"{self!r}[{index.start}:{index.stop}] is empty", "name at least one rank")
            return RoleGroup(self._caller, self.role, self._own_ranks[index])
        try:
            rank = self._own_ranks[index]
        except IndexError:
            workers = "1 worker" if len(self) == 1 else f"{len(self)} workers"
            raise IndexError(f"[{index}] is out of range: {self!r} has {workers}") from None
        return self._handle(rank)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return map(self._handle, self._own_ranks)

    def _handle(self, rank: int) -> WorkerHandle:
        # The same one each time: it remembers the methods that were asked for.
        if rank not in self._worker_handles:
            self._worker_handles[rank] = WorkerHandle(self._caller, self.role, (rank,))
        return self._worker_handles[rank]

    def __repr__(self) -> str:
        return f"<role group {self.role} with rank{'s' * (len(self) > 1)} {show_ranks(self._own_ranks)}>"


def role_group(
    caller: Caller, role: str, size: int, methods: Mapping[str, Invocation] | None = None
) -> RoleGroup:
    """The group of all ranks of a role, with its `methods` if they are known here."""
    if methods is not None:
        caller.described[role] = methods
    return RoleGroup(caller, role, caller.ranks(role, size))


# `trainer_invocation`, and the static types of the methods that it decorates, which are not used at run time.
#
# A decorated method is seen as an `Invocable`. In an object of its class it is a plain method. In a class that is
# derived from `RoleGroup` and the workload it is a `RemoteMethod` with the same parameters::
#
#     class ActorGroup(RoleGroup, Actor): ...
#
#     class Trainer(BaseTrainer):
#         RG_ACTOR: ActorGroup

Local = TypeVar("Local")
Whose = TypeVar("Whose")
Blocking = TypeVar("Blocking")


class Options(TypedDict, total=False):
    """The options of `trainer_invocation` on which no type depends."""

    is_async: bool
    timeout: float | None
    auto_shard: bool
    idempotent: bool
    concurrency: int
    retries: int | None


class Invocable(Generic[P, Local, Whose, Blocking]):
    """A method with the parameters `P` that returns `Local` in the worker.

    `Whose` is ``Literal["ALL"]`` if a call of the trainer goes to several workers, ``Literal["ONE"]`` if to one;
    `Blocking` says whether it waits. Both are Any if that is not known. A coroutine's result is awaited in the worker.
    """

    @overload
    def __get__(self, instance: None, owner: Any) -> Callable[Concatenate[Any, P], Local]: ...
    # The first that fits if `Whose` and `Blocking` are Any.
    @overload
    def __get__(
        self: Invocable[P, R, None, None], instance: RoleGroup, owner: Any
    ) -> RemoteMethod[P, R, Any, Any]: ...
    @overload
    def __get__(
        self: Invocable[P, Coroutine[Any, Any, R], Literal["ALL"], Literal[True]],
        instance: RoleGroup,
        owner: Any,
    ) -> RemoteMethod[P, R, list[R], list[R]]: ...
    @overload
    def __get__(
        self: Invocable[P, R, Literal["ALL"], Literal[True]], instance: RoleGroup, owner: Any
    ) -> RemoteMethod[P, R, list[R], list[R]]: ...
    @overload
    def __get__(
        self: Invocable[P, Coroutine[Any, Any, R], Literal["ALL"], Literal[False]],
        instance: RoleGroup,
        owner: Any,
    ) -> RemoteMethod[P, R, list[R], InvocationRef[list[R]]]: ...
    @overload
    def __get__(
        self: Invocable[P, R, Literal["ALL"], Literal[False]], instance: RoleGroup, owner: Any
    ) -> RemoteMethod[P, R, list[R], InvocationRef[list[R]]]: ...
    @overload
    def __get__(
        self: Invocable[P, Coroutine[Any, Any, R], Literal["ONE"], Literal[True]],
        instance: RoleGroup,
        owner: Any,
    ) -> RemoteMethod[P, R, R, R]: ...
    @overload
    def __get__(
        self: Invocable[P, R, Literal["ONE"], Literal[True]], instance: RoleGroup, owner: Any
    ) -> RemoteMethod[P, R, R, R]: ...
    @overload
    def __get__(
        self: Invocable[P, Coroutine[Any, Any, R], Literal["ONE"], Literal[False]],
        instance: RoleGroup,
        owner: Any,
    ) -> RemoteMethod[P, R, R, InvocationRef[R]]: ...
    @overload
    def __get__(
        self: Invocable[P, R, Literal["ONE"], Literal[False]], instance: RoleGroup, owner: Any
    ) -> RemoteMethod[P, R, R, InvocationRef[R]]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[P, Local]: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        raise NotImplementedError

    def __call__(self, instance: Any, /, *args: P.args, **kwargs: P.kwargs) -> Local:
        raise NotImplementedError


@overload
def trainer_invocation(
    method: Callable[Concatenate[Any, P], Local], /
) -> Invocable[P, Local, Literal["ALL"], Literal[True]]: ...


@overload
def trainer_invocation(
    *, target: OneWorker, blocking: Literal[True] = ..., **options: Unpack[Options]
) -> Callable[[Callable[Concatenate[Any, P], Local]], Invocable[P, Local, Literal["ONE"], Literal[True]]]: ...


@overload
def trainer_invocation(
    *, target: OneWorker, blocking: Literal[False], **options: Unpack[Options]
) -> Callable[
    [Callable[Concatenate[Any, P], Local]], Invocable[P, Local, Literal["ONE"], Literal[False]]
]: ...


@overload
def trainer_invocation(
    *, target: Workers = ..., blocking: Literal[True] = ..., **options: Unpack[Options]
) -> Callable[[Callable[Concatenate[Any, P], Local]], Invocable[P, Local, Literal["ALL"], Literal[True]]]: ...


@overload
def trainer_invocation(
    *, target: Workers = ..., blocking: Literal[False], **options: Unpack[Options]
) -> Callable[
    [Callable[Concatenate[Any, P], Local]], Invocable[P, Local, Literal["ALL"], Literal[False]]
]: ...


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
) -> Callable[[Callable[..., Local]], Invocable[..., Local, Any, Any]]: ...


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
      argument is marked and each one is a list with as many items as there are workers, each worker gets its item; a
      single worker gets the list. Everything else goes to all workers whole. False, everything goes to all workers
      whole, and `shard` is an error.
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
        return mark(method[0], DEFAULT)
    if method:
        raise UsageError("@trainer_invocation takes named options only", "write blocking=…, timeout=…")
    invocation = checked("@trainer_invocation", options)
    return lambda decorated: mark(decorated, invocation)
