"""``unirun trace``: the trace of a job with calls, of which each is there once in its caller and in its workers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from .harness import Script, Unirun

ADDERS = """
    from unirun import BaseTrainer, BaseWorkload, trainer_invocation

    class Adder(BaseWorkload):
        def setup(self):
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.all_reduce(torch.ones(4))

        @trainer_invocation()
        def add(self, number):
            return number + 1

    class Trainer(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            for number in range(10):
                self.RG_ADDER.add(number)
"""

ADDING = """
    name: adding
    roles:
      adder: {count: 2, workload: "adders:Adder"}
    trainer: adders:Trainer
"""


def test_each_call_is_there_once_and_joined_to_its_runs(
    unirun: Unirun, script: Script, tmp_path: Path
) -> None:
    """
    1. A trainer calls two workers ten times, with spans.
    2. The trace of the job that is over has ten calls and twenty runs, joined by twenty flows.
    3. It has the starts of all processes, and the rendezvous of the two.
    """
    script(ADDERS, "adders.py")
    job = script(ADDING, "job.yaml")
    result = unirun("--config", job, cwd=tmp_path, env={"UNIRUN_TRACE": "collectives"})
    assert result.code == 0, result.err
    out = tmp_path / "trace.json"
    found = unirun("trace", "-o", out)
    assert (found.code, "10 calls" in found.out) == (0, True), found.err
    rows = json.loads(out.read_text())["traceEvents"]
    named = Counter((row.get("cat"), row["name"]) for row in rows if row["ph"] == "X")
    assert (named["call", "adder.add"], named["run", "add"]) == (10, 20)
    assert (named["life", "start of the process"], named["life", "rendezvous"]) == (3, 2)
    assert (
        sum(
            count
            for (kind, name), count in named.items()
            if (kind, name[:10]) == ("collective", "all_reduce")
        )
        == 2
    )
    starts, ends = (Counter(row["id"] for row in rows if row["ph"] == phase) for phase in "sf")
    assert (len(starts), starts) == (20, ends)
    assert set(starts.values()) == {1}
