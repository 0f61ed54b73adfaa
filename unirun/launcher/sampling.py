"""The resources that the workers of an agent use."""

from __future__ import annotations

import contextlib

from unirun.launcher.state import AgentState
from unirun.wire.reports import Sample


def sample_of(state: AgentState) -> Sample:
    """The memory and the processor time of each worker that has a process."""
    import psutil

    memory: dict[str, int] = {}
    cpu: dict[str, float] = {}
    for worker in state.workers.values():
        if worker.pid is not None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(worker.pid)
                memory[str(worker.who)] = process.memory_info().rss
                cpu[str(worker.who)] = round(sum(process.cpu_times()[:2]), 2)
    return Sample(state.node, memory, cpu)
