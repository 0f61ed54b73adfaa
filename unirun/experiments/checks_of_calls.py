"""Checks of what calls ask of their models and interfaces; `graph` checks which data they need and make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirun.errors import Fault, UsageError
from unirun.experiments import derive
from unirun.experiments.graph import MFCDef, ModelInterfaceType, ParamReallocHook
from unirun.experiments.layout import AXES, PART_RULE, ModelName, ProcessTopology, is_part
from unirun.experiments.models.api import ModelInterface
from unirun.experiments.registry import INTERFACES
from unirun.experiments.results import check_reductions

if TYPE_CHECKING:
    from unirun.experiments.config import ExperimentConfig


def malformed_faults(config: ExperimentConfig) -> list[Fault]:
    """Values of which nothing else can be checked: they have the wrong type, or are no layouts."""
    found = [
        Fault(f"models.{name}", f"its topology has the axes {topo.axes!r} and sizes {topo.dims!r}", _LAYOUT)
        for name, topo in derive.topologies(config).items()
        if not _is_layout(topo)
    ]
    kinds = ", ".join(f"ModelInterfaceType.{kind.name}" for kind in ModelInterfaceType)
    for call in config.model_rpcs:
        where = f"model_rpcs.{call.name}"
        if not isinstance(call.model_name, ModelName):
            problem = f"model_name is {call.model_name!r}, which is no ModelName"
            found.append(Fault(where, problem, f"write ModelName({str(call.model_name)!r})"))
        if not isinstance(call.interface_type, ModelInterfaceType):
            problem = f"interface_type is {call.interface_type!r}, which is no ModelInterfaceType"
            found.append(Fault(where, problem, f"it is one of {kinds}"))
    return found


_LAYOUT = f"make it with topology(): it has {', '.join(AXES)}, each of 1 or more ranks"


def _is_layout(topo: ProcessTopology) -> bool:
    return (
        sorted(topo.axes) == sorted(AXES)
        and len(topo.dims) == len(AXES)
        and all(isinstance(size, int) and size >= 1 for size in topo.dims)
    )


def call_faults(config: ExperimentConfig) -> list[Fault]:
    """Names of calls and roles, methods that interfaces lack, and what a model without a network cannot do."""
    roles = {
        name.role: None for name in (*derive.model_names(config), *(c.model_name for c in config.model_rpcs))
    }
    found = [
        Fault("models", f"{role!r} is no name for a role", PART_RULE) for role in roles if not is_part(role)
    ]
    for call in config.model_rpcs:
        where = f"model_rpcs.{call.name}"
        if not is_part(call.name):
            found.append(Fault("model_rpcs", f"{call.name!r} is no name for a call", PART_RULE))
        if call.output_keys and call.interface_type in (
            ModelInterfaceType.TRAIN_STEP,
            ModelInterfaceType.EVALUATE,
        ):
            problem = f"it has output_keys, and {call.interface_type.value} makes no data"
            found.append(Fault(where, problem, "leave them out, or use inference"))
        if _lacks_method(call):
            problem = f"interface {call.interface_impl.type_!r} does not define {call.interface_type.value}()"
            found.append(Fault(where, problem, "define it, or correct interface_type or interface_impl"))
        try:
            check_reductions(getattr(INTERFACES.at_hand(call.interface_impl.type_), "reductions", {}))
        except UsageError as error:
            found.append(Fault(where, error.problem, error.remedy))
    return found + _hook_faults(config)


def _lacks_method(call: MFCDef) -> bool:
    """Return True if the interface has only the methods that `ModelInterface` defines. False if it is no
    class of this kind, or not imported yet."""
    cls = INTERFACES.at_hand(call.interface_impl.type_)
    if not isinstance(cls, type) or not issubclass(cls, ModelInterface):
        return False
    method = call.interface_type.value
    return getattr(cls, method) is getattr(ModelInterface, method)


def _hook_faults(config: ExperimentConfig) -> list[Fault]:
    """Hooks, also those that are added, of models without parameters."""
    empty = {name for name, (_, backend) in derive.types(config).items() if backend == "null"}
    found = []
    for call in derive.calls_with_hooks(config):
        for hook in (*call.pre_hooks, *call.post_hooks):
            others = (hook.source, hook.target) if isinstance(hook, ParamReallocHook) else ()
            found += [
                Fault(
                    f"model_rpcs.{call.name}",
                    f"its {type(hook).__name__} needs parameters of {name}, whose backend 'null' has none",
                    "leave the hook out; a role with this backend that is trained has one replica",
                )
                for name in sorted(empty)
                if name in (call.model_name, *others)
            ]
    return found
