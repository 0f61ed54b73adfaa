"""An experiment as text: its configuration, where its models are, and its graph."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from unirun.experiments.config import ExperimentConfig
from unirun.experiments.topology import ModelName, ProcessTopology


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
    if isinstance(value, list | tuple | frozenset):
        return [plain(each) for each in value]
    return value if isinstance(value, bool | int | float) or value is None else str(value)
