"""The resources of workers, sampled by their agent."""

from __future__ import annotations

import os

from msgspec.structs import replace

from tests.unit.launcher.agent import worker
from tests.unit.launcher.nvml import Nvml
from unirun.launcher.events import AgentState
from unirun.launcher.monitoring import Devices, sample_of


def test_a_worker_has_its_memory_processor_time_step_and_device() -> None:
    held = replace(worker(1, "actor", 0), pid=os.getpid())
    state = AgentState("n0").with_worker(held)
    sample = sample_of(state, lambda number: 12, {os.getpid(): (40.0, 1 << 30)})
    assert sample.node == "n0"
    assert sample.memory["actor:0"] > 1 << 20
    assert (sample.steps, sample.gpus) == ({"actor:0": 12}, {"actor:0": (40.0, 1 << 30)})


def test_one_without_a_process_or_a_step_is_left_out() -> None:
    state = AgentState("n0").with_worker(worker(1, "actor", 0))
    assert sample_of(state, lambda number: -1, {}).memory == {}


def test_devices_tell_the_processes_that_use_them_and_those_that_fail_tell_nothing() -> None:
    nvml = Nvml(0, 0)
    devices = Devices(nvml)
    assert devices.usage() == {7: (40.0, 1 << 30), 8: (40.0, 0)}
    devices.close()
    assert nvml.open == 0
