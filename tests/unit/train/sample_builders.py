"""A builder that has said all it must, and what it finds wrong."""

from __future__ import annotations

from typing import Any

import pytest

from unirun.errors import Fault, SpecError
from unirun.train import DLJobBuilder


def complete_builder() -> DLJobBuilder:
    """A builder that has said all it must, with a workload of two ranks on eight devices."""
    builder = (
        DLJobBuilder()
        .dl_type("RL")
        .node_num(1)
        .device_per_node(8)
        .config({"lr": 0.1})
        .trainer("algo", "PPOTrainer")
    )
    builder.workload("actor", "algo", "Actor").total(2).per_node(2)
    return builder


def faults(builder: Any) -> list[Fault]:
    with pytest.raises(SpecError) as caught:
        builder.build()
    return [*caught.value.faults]
