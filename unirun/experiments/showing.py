"""An experiment as text: its configuration, where its models are, and its graph."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from unirun.collocation.graph import Edge, Role
from unirun.collocation.graph import RoleGraph as Picture
from unirun.collocation.graph.svg import svg
from unirun.experiments.config import ExperimentConfig, Resolved
from unirun.experiments.graph import ModelName, ProcessTopology


def show(config: ExperimentConfig) -> str:
    """The resolved configuration, in JSON, then the placement and the graph."""
    resolved = config.resolved
    assert resolved is not None
    rows = [
        f"{name!s:16} {topo!s:32} workers {', '.join(map(str, resolved.workers_of(name)))}"
        for name, topo in resolved.topologies.items()
    ]
    graph = [
        f"{number}. " + ", ".join(f"{name} ({resolved.graph.calls[name].model_name})" for name in level)
        for number, level in enumerate(resolved.graph.levels(), 1)
    ]
    edges = [f"{a} -> {b}: {', '.join(keys)}" for a, b, keys in resolved.graph.edges]
    return "\n".join(
        [
            json.dumps(plain(config), indent=1),
            "",
            "models:",
            *(f"  {row}" for row in rows),
            "calls, those of one line at the same time where their workers differ:",
            *(f"  {row}" for row in graph),
            "data:",
            *(f"  {row}" for row in edges),
            "parameters:",
            *(f"  {a} -> {b}" for a, b in resolved.sync_param_pairs),
            "",
        ]
    )


def picture(resolved: Resolved) -> str:
    """The graph as SVG: calls with their models, and the data between them."""
    graph = resolved.graph
    names = {name: f"{name} ({call.model_name})" for name, call in graph.calls.items()}
    roles = tuple(
        Role(names[name], resolved.topologies[call.model_name].world_size())
        for name, call in graph.calls.items()
    )
    edges = tuple(
        Edge(names[producer], names[consumer], invocation=", ".join(keys), kind="")
        for producer, consumer, keys in graph.edges
    )
    return svg(Picture(roles, edges))


def plain(value: Any) -> Any:
    """A value of a configuration as JSON has it."""
    if isinstance(value, ModelName):
        return str(value)
    if isinstance(value, ProcessTopology):
        return dict(zip(value.axes, value.dims, strict=True))
    if dataclasses.is_dataclass(value):
        shown = (field for field in dataclasses.fields(value) if field.name != "resolved")
        return {field.name: plain(getattr(value, field.name)) for field in shown}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        # The order of a set differs between processes.
        return [plain(each) for each in sorted(value, key=repr)]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such number, and null would mean None: this is a setting, not a figure.
        return str(value)
    return value if isinstance(value, bool | int | float) or value is None else str(value)
