"""Role groups: the trainer's handle on the workers of a role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from unirun.errors import UsageError
from unirun.graph import spans
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.dispatcher import DESCRIBE
from unirun.roles.calls.pending import Method
from unirun.roles.calls.policy import ALL, ANY, DEFAULT, Invocation
from unirun.roles.calls.refs import InvocationRef, wait

_QUESTION = replace(DEFAULT, target=ANY, idempotent=True, retries=3)


class RoleMethods:
    """The methods of a role's workloads; when they are not `known`, a worker is asked at the first use."""

    def __init__(self, caller: Caller, role: str, known: Mapping[str, Invocation] | None = None) -> None:
        self.caller, self.role = caller, role
        self._known = known

    def all(self) -> Mapping[str, Invocation]:
        """Every method with its options. Waits until a worker serves, if one has to be asked."""
        if self._known is None:
            question = self.caller.method(self.role, DESCRIBE, _QUESTION)
            self._known = self.caller.invoke(question, (), {}).result()
        return self._known

    def find(self, name: str) -> Invocation:
        """The options of a method. Raises `AttributeError`, with a list of those there are."""
        found = self.all().get(name)
        if found is None:
            there = ", ".join(sorted(self.all())) or "none"
            raise AttributeError(f"role {self.role} has no method {name!r}; its methods are: {there}")
        return found


class _Ranks:
    """What a role group and a handle on one worker share."""

    def __init__(self, methods: RoleMethods, ranks: Sequence[int]) -> None:
        self._methods, self._ranks = methods, tuple(ranks)
        self._called: dict[tuple[str, bool], Method] = {}

    @property
    def role(self) -> str:
        """The role's name."""
        return self._methods.role

    def call_async(self, method: str, /, *args: Any, **kwargs: Any) -> InvocationRef[Any]:
        """Start a call of `method` and return at once, also if the method is ``blocking=True``.

        Raises `AttributeError` for an unknown method, `EncodingError` for an argument that cannot be pickled,
        `UsageError` for one that cannot be split. What happens in the workers is raised by ``ref.result()``.
        """
        return self._methods.caller.invoke(self._by_name(method, False), args, kwargs)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call `method` and wait for its result, also if the method is ``blocking=False``.

        It also reaches methods whose names are taken here, like ``call``, ``map`` and ``role``. Raises what
        `call_async` and `InvocationRef.result` raise.
        """
        return self._methods.caller.invoke(self._by_name(method, True), args, kwargs).result()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        options = self._options(name)
        method, invoke, blocking = self._method(name, options), self._methods.caller.invoke, options.blocking

        def call(*args: Any, **kwargs: Any) -> Any:
            ref = invoke(method, args, kwargs)
            return ref.result() if blocking else ref

        call.__name__ = call.__qualname__ = name
        # Found here the next time, without asking again.
        self.__dict__[name] = call
        return call

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._methods.all()]

    def _options(self, name: str) -> Invocation:
        return self._methods.find(name)

    def _by_name(self, name: str, blocking: bool) -> Method:
        if (name, blocking) not in self._called:
            options = replace(self._options(name), blocking=blocking)
            self._called[name, blocking] = self._method(name, options)
        return self._called[name, blocking]

    def _method(self, name: str, options: Invocation) -> Method:
        return self._methods.caller.method(self.role, name, options, self._ranks)


class WorkerHandle(_Ranks):
    """One worker of a role: ``RG_ACTOR[2].update(x)`` calls that worker, whatever the method's `target` is.

    It returns the bare result, or an `InvocationRef` if the method is ``blocking=False``.
    """

    @property
    def rank(self) -> int:
        """Its rank."""
        return self._ranks[0]

    def _options(self, name: str) -> Invocation:
        return replace(super()._options(name), target=self.rank)

    def __repr__(self) -> str:
        return f"<{self.role}:{self.rank}>"


class RoleGroup(_Ranks, Sequence[WorkerHandle]):
    """All workers of a role, or some of them: ``self.RG_ACTOR`` in a trainer, ``ctx.role_group("actor")`` in a script.

    Each public method of the workload is a method here. ``group.update(x)`` calls the workers that the method's
    `trainer_invocation` names, and returns a list of results in rank order, or an `InvocationRef` if the method is
    ``blocking=False``. An unknown method raises `AttributeError`, which lists the known ones.

    ``group[2]`` is the `WorkerHandle` of one worker. ``group[1:3]`` is a smaller group, in which target ``"ALL"``
    stands for its own workers. ``len(group)`` is the number of workers, and iterating gives their handles in rank
    order.

    A call raises what the method raised in the worker, `InvocationTimeout` at its deadline, `WorkerLost` when a worker
    died, `EncodingError` for an argument that cannot be pickled.
    """

    def __init__(self, methods: RoleMethods, ranks: Sequence[int]) -> None:
        super().__init__(methods, ranks)
        self._handles: dict[int, WorkerHandle] = {}

    @property
    def rank0(self) -> WorkerHandle:
        """The first worker of the group."""
        return self[0]

    def map(self, method: str, items: Iterable[Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` once for each of `items`, each time on the worker with the fewest open calls.

        Returns the results in the order of `items`. `args` and `kwargs` follow the item in every call. At most two
        calls per worker are open at a time, so a slow worker does not keep calls that others could do. Raises the
        first error, in the order of `items`.
        """
        options = replace(self._options(method), target=ANY, blocking=False, auto_shard=False)
        called, invoke = self._method(method, options), self._methods.caller.invoke
        refs: list[InvocationRef[Any]] = []
        open_refs: list[InvocationRef[Any]] = []
        for item in items:
            if len(open_refs) >= 2 * len(self):
                _, open_refs = wait(open_refs)
            refs.append(invoke(called, (item, *args), kwargs))
            open_refs.append(refs[-1])
        return [ref.result() for ref in refs]

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> WorkerHandle: ...

    @overload
    def __getitem__(self, index: slice) -> RoleGroup: ...

    def __getitem__(self, index: int | slice) -> WorkerHandle | RoleGroup:
        if isinstance(index, slice):
            if not self._ranks[index]:
                raise UsageError(f"{self!r}[{index.start}:{index.stop}] is empty", "name at least one rank")
            return RoleGroup(self._methods, self._ranks[index])
        try:
            rank = self._ranks[index]
        except IndexError:
            workers = "1 worker" if len(self._ranks) == 1 else f"{len(self._ranks)} workers"
            raise IndexError(f"[{index}] is out of range: {self!r} has {workers}") from None
        return self._handle(rank)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return map(self._handle, self._ranks)

    def _handle(self, rank: int) -> WorkerHandle:
        # The same one each time: it remembers the methods that were asked for.
        if rank not in self._handles:
            self._handles[rank] = WorkerHandle(self._methods, (rank,))
        return self._handles[rank]

    def _options(self, name: str) -> Invocation:
        options = super()._options(name)
        target = options.target
        wanted = [] if isinstance(target, str) else [target] if isinstance(target, int) else target
        if not set(wanted) <= set(self._ranks):
            raise UsageError(f"{name} has target {target}, which is not in {self!r}", "use the whole group")
        return options

    def __repr__(self) -> str:
        return f"<role group {self.role} with rank{'s' * (len(self._ranks) > 1)} {spans(self._ranks)}>"


def role_group(
    caller: Caller, role: str, size: int, methods: Mapping[str, Invocation] | None = None
) -> RoleGroup:
    """The group of all ranks of a role, with its `methods` if they are known here."""
    return RoleGroup(RoleMethods(caller, role, methods), range(size))


__all__ = ["ALL", "RoleGroup", "RoleMethods", "WorkerHandle", "role_group"]
