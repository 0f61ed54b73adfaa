"""A warm worker compared with a cold one."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conformance import BETWEEN, Report, differences, probe_in, report_in
from tests.integration.harness import (
    Unirun,
)
from tests.integration.warm import Warm, WarmUnirun

LOOKS = """
    import json, logging, os, sys, time
    import probe_process
    from unirun.launcher.warm.key import state_of

    def parent():
        with open(f"/proc/{os.getppid()}/comm") as file:
            return file.read().strip()

    def logs():
        import torch
        return {name: logging.getLogger(name).level for name in ("torch", "torch._dynamo", "torch.distributed")}

    def look():
        looks = {name: function() for name, function in probe_process.LOOKS.items()}
        looks["state of torch"] = probe_process.state_of_torch()
        looks["kernel"] = state_of()
        looks["parent"] = parent()
        looks["logs"] = logs()
        # Else since long ago, when the warm process has imported it.
        looks["logging began"] = time.time() - logging.makeLogRecord({}).relativeCreated / 1000 > BEGAN - 1.0
        looks["modules"] = sorted(sys.modules)
        looks["flags"] = [repr(sys.flags), repr(sys.argv), repr(sys.path), repr(sys.orig_argv), repr(sys.warnoptions)]
        print("\\n" + json.dumps(looks), flush=True)

    with open("began") as file:
        BEGAN = float(file.read())

    if __name__ == "__main__":
        look()
"""

CALLS = """
    from unirun import BaseTrainer, BaseWorkload
    from looks import look

    class Served(BaseWorkload):
        def setup(self):
            look()

        def is_up(self):
            return True

    class Trained(BaseTrainer):
        def init(self):
            pass

        def fit(self):
            assert all(self.RG_SERVED.is_up())
            look()
"""

JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "one script": {"a": {"count": 1, "script": "looks.py"}},
    "several scripts and a module": {
        "a": {"count": 2, "script": "looks.py"},
        "b": {"count": 1, "module": "pack.probe"},
    },
    "workloads and their trainer": {
        "served": {"count": 2, "workload": "calls:Served"},
    },
}

OF_THE_JOB = re.compile(
    r"(MASTER_PORT|TORCHELASTIC_ERROR_FILE|TORCHELASTIC_RUN_ID|UNIRUN_JOB|UNIRUN_SOCKET|UNIRUN_WARM): .* instead of .*"
)

NAMED = {
    "environment": OF_THE_JOB,
    # The stack of a fork begins in the warm process.
    "call stack": re.compile(r"\+process\.py: (lend|serve|main)|-spawner\.py: main"),
    # What the kernel shows is what the process that was forked was started with: the warm one.
    "environment in proc": re.compile(r"[+-]\w+"),
    # As of any two workers of one spawner: all forks of one process salt alike.
    "hash of a text": re.compile(".*"),
    **dict.fromkeys(("random numbers", "key of multiprocessing"), re.compile(".*")),
}
"""The differences of a warm worker."""


CONNECTING = {("trainer:0", "threads"), ("trainer:0", "open descriptors")}
"""Not compared: while a trainer looks, a thread of it is connecting to its workloads."""


class TestAWorker:
    @pytest.mark.parametrize("of", JOBS)
    def test_a_warm_worker_is_like_one_after_a_cold_start(
        self, warm: Warm, tmp_path: Path, program: Path, of: str
    ) -> None:
        unirun = WarmUnirun(tmp_path, warm)
        cold = reports(unirun, program, of, {"UNIRUN_WARM": "0"})
        again = reports(unirun, program, of, {"UNIRUN_WARM": ""})
        differ = {
            (who, name): left
            for who, report in cold.items()
            for name, value in report.items()
            if (who, name) not in CONNECTING
            if (left := {d for d in differences(value, again[who][name]) if not _is_named(name, d)})
        }
        assert differ == {}
        for name in {*BETWEEN} - {"hash of a text"}:
            numbers = [n for every in (cold, again) for report in every.values() for n in report[name]]
            assert len({*numbers}) == len(numbers), name
        unirun.assert_nothing_left()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the workers' programs."""
    folder = probe_in(tmp_path_factory.mktemp("program")).folder
    (folder / "looks.py").write_text(textwrap.dedent(LOOKS))
    (folder / "calls.py").write_text(textwrap.dedent(CALLS))
    return folder


def reports(unirun: Unirun, program: Path, of: str, env: Mapping[str, str]) -> dict[str, Report]:
    """The findings of each worker of one job, with its own directory and umask."""
    (program / "began").write_text(str(time.time()))
    path = unirun.root / "job.json"
    trainer = {"trainer": "calls:Trained"} if of == "workloads and their trainer" else {}
    env_of_workers = {"TORCH_LOGS": "+dynamo", "PYTHONPATH": str(program / "more")}
    job = {"name": "looks", "env": env_of_workers, "roles": JOBS[of], **trainer}
    path.write_text(json.dumps(job))
    result = unirun("-v", "--config", path, env=env, cwd=program, umask=0o027)
    assert result.code == 0, result.err
    assert ("start: cold" in result.err, "start: warm" in result.err) == (
        env["UNIRUN_WARM"] == "0",
        env["UNIRUN_WARM"] != "0",
    ), result.err
    found = {
        f"{role}:{rank}": report_in(unirun.log(role, rank).decode())
        for role, count in [
            *((name, each["count"]) for name, each in JOBS[of].items()),
            *([("trainer", 1)] if trainer else []),
        ]
        for rank in range(count)
    }
    shutil.rmtree(unirun.job_dir())
    return found


def _is_named(name: str, difference: str) -> bool:
    return name in NAMED and NAMED[name].fullmatch(difference) is not None


# what keeps a job from it
