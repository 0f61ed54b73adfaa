"""The main program of a worker that is a workload, a trainer or a function."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import cloudpickle
from omegaconf import DictConfig, OmegaConf

from unirun import atomic
from unirun.errors import UsageError
from unirun.roles.calls.group import WorkerHandle
from unirun.roles.calls.policy import invocations
from unirun.roles.context import Context, init
from unirun.roles.formation import Formation
from unirun.roles.interruption import main_thread
from unirun.roles.replicas import in_memory, newer
from unirun.roles.workload import BaseTrainer, BaseWorkload, MasterHandle, bind
from unirun.wire.reporting import report
from unirun.wire.reports import Serving

Made = TypeVar("Made")


def main(kind: str, target: str, args: Sequence[str] = ()) -> None:
    """Be the workload, the trainer or the function that `target`, ``pkg.mod:name``, is. A function finds `args` in
    ``sys.argv``."""
    if kind == "function":
        sys.argv = [target, *args]
        run_function(target)
    elif kind == "trainer":
        run_trainer(init(), load_class(target, BaseTrainer))
    else:
        serve_workload(init(), load_class(target, BaseWorkload))


def run_function(target: str) -> None:
    """Call a function without arguments, or with the worker's `Context` if it has a parameter for that.

    Raises `UsageError` when it is none, or takes anything else.
    """
    function = _load(target)
    if not callable(function) or isinstance(function, type):
        raise UsageError(
            f"{target} is no function", "name one that is defined at the top level of its module"
        )
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"{target} is async", "write def main(): asyncio.run(…)")
    parameters = inspect.signature(function).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        names = ", ".join(each.name for each in needed)
        raise UsageError(f"{target} takes {names}", "write def main() or def main(ctx)")
    if needed:
        function(init())
    else:
        function()


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _load(target: str) -> Any:
    """Load the object ``pkg.mod:name``. Raises `UsageError` when the module has no such name."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{target}: {found.__name__} has no {part!r}", "name one that is there")
        found = getattr(found, part)
    return found


def load_class(target: str, base: type) -> type[Any]:
    """The class that ``pkg.mod:Class`` names. Raises `UsageError` when it is not derived from `base`."""
    found = _load(target)
    if not (isinstance(found, type) and issubclass(found, base)):
        name = target.partition(":")[2]
        raise UsageError(
            f"{target} is not derived from {base.__name__}", f"write class {name}({base.__name__})"
        )
    return found


def serve_workload(context: Context, kind: type[BaseWorkload]) -> None:
    """Make the workload, take calls until the agent says stop."""
    peers, session = context.peers, context.session
    workload = make(kind, BaseWorkload, master_handle=MasterHandle(context), config=_config(context))
    _expect_base(workload, BaseWorkload, "_master_handle")
    formation = Formation(peers, partial(_formed, workload, Replica(workload)), main_thread())
    workload._synced, workload._anew = session.synced, formation.anew
    dispatcher = session.dispatcher(workload, invocations(workload), formation)
    workload._leave = dispatcher.leave

    peers.when_changed(formation.news)
    formation.enter(workload.setup)

    def changed() -> None:
        if formation.outdated:
            dispatcher.run_first(formation.follow)

    peers.when_changed(changed)
    # A view that came before the listener was registered has not called it.
    changed()
    signal.signal(signal.SIGTERM, _stop)
    session.serve(dispatcher)
    try:
        dispatcher.serve()
    finally:
        dispatcher.close()
        workload.teardown()


class Replica:
    """The state of a workload that offers ``get_state`` and ``set_state``: a rank that comes gets that of another."""

    def __init__(self, workload: BaseWorkload) -> None:
        self._workload, self._has = workload, False
        self._offered = all(hasattr(workload, name) for name in ("get_state", "set_state"))

    def complete(self) -> None:
        """Take the state of another rank, if this one is new and there is one that is not. All ranks call it."""
        workload: Any = self._workload
        if not self._offered or workload.world_size == 1:
            return
        found = newer(int(self._has), lambda: in_memory(workload.get_state()))
        if found is not None:
            workload.set_state(found[1])
        self._has = True


def _formed(workload: BaseWorkload, replica: Replica, generation: int) -> None:
    """The group is formed: first a state for the ranks that have none, then the user's method."""
    replica.complete()
    workload.on_generation(generation)


def run_trainer(context: Context, kind: type[BaseTrainer]) -> None:
    """Make the trainer, let it train, and keep what `fit` returns."""
    peers, session = context.peers, context.session
    roles = [role for role in peers.roles() if role != peers.role]
    groups = {role: session.role_group(role) for role in roles}
    workloads = {r: b.target for r in roles if (b := peers.brief(r)) is not None and b.kind == "workload"}
    trainer = make(
        kind,
        BaseTrainer,
        actor_handles=_ByRole(groups, list[WorkerHandle]),
        actor_classes=_ByRole(workloads, lambda target: load_class(target, BaseWorkload)),
        config=_config(context),
    )
    _expect_base(trainer, BaseTrainer, "_actor_handles")
    welcome = peers.welcome
    # Other receivers, such as engines, get versions by themselves.
    channels = {
        name: (publisher, *(role for role in receivers if role in workloads))
        for name, (publisher, *receivers) in (welcome.channels if welcome else {}).items()
    }
    bind(trainer, groups, MasterHandle(context), {role: _resource(context, role) for role in roles}, channels)
    peers.tell(Serving({}, recoverable=bool(trainer.is_recoverable())))
    try:
        trainer.init()
        result = trainer.fit()
    except Exception:
        # It may know that this error would come again.
        peers.tell(Serving({}, recoverable=bool(trainer.is_recoverable())))
        raise
    if session.folder is not None and result is not None:
        _keep(session.folder / "result.pkl", result)


def make(kind: type[Made], base: type, **arguments: Any) -> Made:
    """``kind(*arguments)``. Raises `UsageError` if the constructor does not take the arguments of `base`."""
    try:
        return kind(*arguments.values())
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            # Raised inside the constructor.
            raise
        words = f"write def __init__(self, {', '.join(arguments)}), or leave it out"
        raise UsageError(f"{error}; {base.__name__} takes {', '.join(arguments)}", words) from None


def _stop(signum: int, frame: FrameType | None) -> None:
    """End the current call with SystemExit, so that `teardown` runs. The signal may come again, from a batch system and
    by order of the master: it must not end `teardown`, which has the grace period."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def _expect_base(made: Any, base: type, attribute: str) -> None:
    if attribute not in made.__dict__:
        name = type(made).__name__
        raise UsageError(
            f"{name}.__init__ does not call {base.__name__}'s", "call super().__init__ with what it was given"
        )


def _keep(path: Path, result: Any) -> None:
    """Write the result for `JobHandle.result`. If it cannot be pickled, the job succeeds all the same."""
    try:
        atomic.replace(path, cloudpickle.dumps(result))
    except Exception as error:  # noqa: BLE001 - pickling raises what it likes
        report(f"unirun: what fit() returned cannot be kept as the job's result: {error!r}")


def _config(context: Context) -> DictConfig:
    return OmegaConf.create(dict(context.config))


def _resource(context: Context, role: str) -> dict[str, Any]:
    brief = context.peers.brief(role)
    return {
        "role": role,
        "total": context.peers.known(role).world_size,
        "per_node": brief.per_node if brief else None,
        "collocation": context.peers.collocation(role),
        "class": brief.target if brief else "",
    }


class _ByRole(Mapping[str, Made]):
    """A value for each role, made at each use: roles grow, and the package of a class may not be installed here."""

    def __init__(self, given: Mapping[str, Any], make: Callable[[Any], Made]) -> None:
        self._given, self._make = given, make

    def __getitem__(self, role: str) -> Made:
        return self._make(self._given[role])

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)
