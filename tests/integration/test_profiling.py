"""``unirun profile``: a flame graph and a trace of a running rank."""

from __future__ import annotations

import gzip
import json

from .harness import Script, Unirun

TRAINING = """
    import torch, unirun

    def step(numbers):
        return (numbers @ numbers).relu().sum().item()

    numbers = torch.rand(64, 64)
    for number in range(1_000_000):
        unirun.progress(number)
        step(numbers)
        if number == 10:
            print("trains", flush=True)
"""


def test_a_rank_is_profiled_without_a_restart(unirun: Unirun, script: Script) -> None:
    """
    1. One of two ranks is profiled for half a second.
    2. The flame graph has the function of its step, and the trace its operators.
    3. No rank was started again. A rank that is not there is refused.
    """
    job = unirun.start("--nproc-per-node", 2, "--role", "actor", script(TRAINING))
    job.lines("(trains)", 2)
    name, folder = unirun.job_dir().name, unirun.home / "profile"
    result = unirun("profile", name, "actor:1", "--seconds", "0.5", "-o", folder)
    assert result.code == 0, result.err
    assert "step (train.py" in (folder / "flame.svg").read_text()
    assert "step (" in (folder / "stacks.folded").read_text()
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert "aten::mm" in {each["name"] for each in trace["traceEvents"]}
    assert {each["incarnation"] for each in unirun.workers().values()} == {0}
    assert unirun("profile", name, "actor", "-o", folder).code == 2
    assert unirun("stop", name, "--now").code == 0
    job.end()
