"""torchrun's own variables are honoured, known to have no effect, or refused; none is overlooked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed

from unirun.cli.compose import HEALTH, SLEEP, environment_warnings
from unirun.errors import UsageError
from unirun.launcher.environment import INTERPRETER
from unirun.spec.read import RESERVED_ENV

TORCH = Path(torch.distributed.__file__).parent

HONOURED = {
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    INTERPRETER,
}
WITHOUT_EFFECT = {
    "TORCHELASTIC_TIMER_FILE",  # the pipe is in the job's directory, and workers are told
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # torchrun sets it for itself, from its option
    "TORCH_ELASTIC_WORKER_IDENTICAL",  # about the ranks of several nodes
    "TORCHELASTIC_ETCD_BINARY_PATH",  # for torch's own tests with etcd
    HEALTH,
}
REFUSED = {SLEEP}


def test_every_variable_that_torchrun_reads_is_known() -> None:
    sources = [*(TORCH / "elastic").rglob("*.py"), *(TORCH / "launcher").glob("*.py"), TORCH / "run.py"]
    text = "".join(path.read_text() for path in sources)
    found = set(re.findall(r'"(TORCH_?ELASTIC_[A-Z_]+|PYTHON_EXEC)"', text))
    assert found >= {"TORCHELASTIC_ENABLE_FILE_TIMER", "PYTHON_EXEC"}, "they are found where torch reads them"
    assert found <= HONOURED | WITHOUT_EFFECT | REFUSED | RESERVED_ENV


def test_a_health_check_that_nobody_serves_is_told() -> None:
    (told,) = environment_warnings({HEALTH: "8080"})
    assert told.startswith("TORCHELASTIC_HEALTH_CHECK_PORT has no effect: torch comes without")
    assert [*environment_warnings({"TORCHELASTIC_TIMER_FILE": "/tmp/x"})] == []


def test_a_watch_over_uninterruptible_sleep_is_refused() -> None:
    with pytest.raises(UsageError, match=f"{SLEEP}: unirun does not watch for .*; unset it"):
        [*environment_warnings({SLEEP: "30"})]
    for off in ("", "0", "-1", "never"):
        assert [*environment_warnings({SLEEP: off})] == []
