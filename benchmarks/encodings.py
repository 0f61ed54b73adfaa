"""The number of times that an agent encodes a message that all of its workers get."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, cast

from unirun.launcher import events
from unirun.launcher.agent import Agent
from unirun.observe.jobdir import JobDir
from unirun.spec.job import Entry, JobSpec, RoleSpec
from unirun.wire import aio, frames
from unirun.wire.handshake import new_token
from unirun.wire.messages import AgentTask, View


class Sink:
    """The receiver of all frames that an agent writes to one worker."""

    def __init__(self) -> None:
        self.frames = 0

    def is_closing(self) -> bool:
        """Return False: the stream never ends."""
        return False

    def write(self, frame: bytes) -> None:
        """Take one frame."""
        self.frames += 1


def agent_encodings(workers: int) -> float:
    """Let the agent's shell send one view to this number of workers. Returns the number of frames that it encodes."""
    made = 0

    def counted(payload: dict[str, Any]) -> bytes:
        nonlocal made
        made += 1
        return frames.encode_frame(payload)

    with tempfile.TemporaryDirectory() as folder:
        job = JobDir(Path(folder))
        job.token.write_text(new_token().hex())
        job.token.chmod(0o600)
        role = RoleSpec("worker", workers, Entry("workload", "a:B"))
        lock = os.open(folder, os.O_RDONLY)
        agent = Agent(
            job, AgentTask(JobSpec("job", "job", (role,), ("worker",)), "n0", ("n0",), "/", ""), {}, lock
        )
        sinks = [Sink() for _ in range(workers)]
        reader = cast(asyncio.StreamReader, None)
        for number, sink in enumerate(sinks):
            agent._links[number] = {aio.Stream(reader, cast(asyncio.StreamWriter, sink))}
        vars(aio)["encode_frame"] = counted
        try:
            agent._carry_out(events.ToLinks(View(())))
        finally:
            vars(aio)["encode_frame"] = frames.encode_frame
            os.close(lock)
    if [sink.frames for sink in sinks] != [1] * workers:
        raise AssertionError("not every worker was told")
    return float(made)
