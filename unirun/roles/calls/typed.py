"""The static types of methods that `trainer_invocation` decorates. Nothing of this is used at run time.

A decorated method is seen as an `Invocable`. In an object of its class it is a plain method. In a class that is derived
from `RoleGroup` and the workload it is a `RemoteMethod` with the same parameters::

    class ActorGroup(RoleGroup, Actor): ...

    class Trainer(BaseTrainer):
        RG_ACTOR: ActorGroup
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar, overload

from unirun.roles.calls.group import RemoteMethod, RoleGroup
from unirun.roles.calls.open_call import InvocationRef

P = ParamSpec("P")
R = TypeVar("R")
Local = TypeVar("Local")
Waited = TypeVar("Waited")
Plain = TypeVar("Plain")


class Options(TypedDict, total=False):
    """The options of `trainer_invocation` on which no type depends."""

    is_async: bool
    timeout: float | None
    auto_shard: bool
    idempotent: bool
    concurrency: int
    retries: int | None


class Invocable(Generic[P, Local, R, Waited, Plain]):
    """A method that returns `Local` in the worker. See `RemoteMethod` for the other parameters."""

    @overload
    def __get__(self, instance: None, owner: Any) -> Callable[Concatenate[Any, P], Local]: ...
    @overload
    def __get__(self, instance: RoleGroup, owner: Any) -> RemoteMethod[P, R, Waited, Plain]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[P, Local]: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        raise NotImplementedError

    def __call__(self, instance: Any, /, *args: P.args, **kwargs: P.kwargs) -> Local:
        raise NotImplementedError


class AllBlocking(Protocol):
    """Several workers are called and waited for."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
    ) -> Invocable[P, Coroutine[Any, Any, R], R, list[R], list[R]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Invocable[P, R, R, list[R], list[R]]: ...


class AllAsync(Protocol):
    """Several workers are called and not waited for."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
    ) -> Invocable[P, Coroutine[Any, Any, R], R, list[R], InvocationRef[list[R]]]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], R]
    ) -> Invocable[P, R, R, list[R], InvocationRef[list[R]]]: ...


class OneBlocking(Protocol):
    """One worker is called and waited for."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
    ) -> Invocable[P, Coroutine[Any, Any, R], R, R, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> Invocable[P, R, R, R, R]: ...


class OneAsync(Protocol):
    """One worker is called and not waited for."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
    ) -> Invocable[P, Coroutine[Any, Any, R], R, R, InvocationRef[R]]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], R]
    ) -> Invocable[P, R, R, R, InvocationRef[R]]: ...
