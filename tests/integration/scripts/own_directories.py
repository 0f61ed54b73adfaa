"""The command, with agents that have a job directory each below the first argument, as on hosts that share none.

All that such a directory has at first is what an agent must be told: the token, which job it is, and its store.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from unirun.cli import main
from unirun.launcher import local
from unirun.launcher.agent import Agent
from unirun.observe.jobdir import JobDir
from unirun.wire.messages import AgentTask

HOSTS = Path(sys.argv[1])


class Elsewhere(Agent):
    """An agent with its own directory."""

    def __init__(self, job: JobDir, task: AgentTask, *rest: Any) -> None:
        own = HOSTS / task.node / job.run_id
        (own / "logs").mkdir(mode=0o700, parents=True)
        for name in ("token", "uid", "store"):
            shutil.copy2(job.path / name, own / name)
        (own / "events.jsonl").touch()
        super().__init__(JobDir(own), task, *rest)


vars(local)["Agent"] = Elsewhere
main(sys.argv[2:])
