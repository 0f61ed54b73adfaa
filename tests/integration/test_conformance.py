"""A worker is like a fresh process: what a program can find in itself, and what is left when it ends.

`scripts/probe.py` looks at a process from within, `scripts/ends.py` ends in many ways; both run under plain ``python -u``, and
under launchers. What differs is in `ALLOWED`, with the reason, and in docs/torchrun.md; everything else is a fault.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documents import text_of

from .conformance import (
    VARIANTS,
    faults,
    probe_in,
    reports_under_python,
    reports_under_torchrun,
    reports_under_unirun,
)
from .conformance_ends import CASES, ends_in, ends_under_python, ends_under_unirun, faults_of_ends
from .harness import SCRIPTS, Unirun
from .warm import Warm, warm_in

LOOKS = [
    name.replace("_", " ")
    for file in ("probe.py", "probe_process.py")
    for name in re.findall(r"^@look\ndef (\w+)", (SCRIPTS / file).read_text(), re.MULTILINE)
] + ["pool by fork", "pool by spawn", "pool by forkserver", "state of torch"]
"""The properties that the probe reads."""


@dataclass(frozen=True)
class Allowed:
    """A property in which workers of these start methods may differ, as far as `pattern` matches all of each difference
    (see `differences`). The reason is in docs/torchrun.md."""

    property: str
    methods: tuple[str, ...]
    pattern: str


BOTH = ("fork", "exec")
# fmt: off
TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""The variables that torchrun sets."""
# fmt: on

OURS = r"UNIRUN_(JOB|NODE|ROLE|RANK|GENERATION|INCARNATION|SOCKET)|(GLOO|NCCL|TP)_SOCKET_IFNAME"

FORMS = ("module", "directory", "zip")

ALLOWED = (
    Allowed("environment", BOTH, rf"\+({'|'.join(TORCHRUN)}|{OURS})"),
    Allowed("environment in proc", ("fork",), r"\+\w+"),
    Allowed("command line", BOTH, r"unirun \w+:0 .* instead of .*"),
    Allowed("title", BOTH, r"\w+:0 instead of .*"),
    Allowed(
        "call stack",
        BOTH,
        r"\+(boot|process|spawner|child|worker)\.py: .*|-<frozen runpy>: _run_module_as_main",
    ),
    Allowed("end: recursion", BOTH, ".*maximum recursion depth exceeded.*"),
    *(Allowed(f"end: uncaught exception, {form}", BOTH, ".*_run_module_as_main.*") for form in FORMS),
    Allowed("open descriptors", BOTH, r"\+9\d\d"),
    Allowed(
        "settings of the interpreter",
        BOTH,
        r"meta_path: \['unirun\.launcher\.(preloaded\._Later|imported\._Imported)', .*",
    ),
    Allowed("death signal", BOTH, "9 instead of 0"),
    Allowed("fault handler", BOTH, "True instead of False"),
    Allowed("signals in the kernel", BOTH, "SigCgt: 30*4ea instead of 0*2"),
    Allowed("end: killed by sigsegv", BOTH, "stderr: Fatal Python error: Segmentation fault\n.*"),
    Allowed("loaded modules", BOTH, r"\+.*"),
    Allowed("names of loggers", ("fork",), r"\+.*"),
    Allowed("warning filters", ("fork",), r"\+.*(torch|numpy).*"),
    Allowed("exit handlers", BOTH, r"\d+ instead of \d+"),
    Allowed("garbage collection", ("fork",), "much is frozen: True instead of False"),
    Allowed("hash of a text", ("fork",), ".*"),
)


def judge(method: str, found: dict[str, set[str]], among: list[str]) -> None:
    """Fail with each difference that is not allowed, and for each allowed one that does not occur."""
    allowed = {each.property: each.pattern for each in ALLOWED if method in each.methods}
    left = {
        name: {each for each in every if not re.fullmatch(allowed.get(name, "(?!)"), each, re.DOTALL)}
        for name, every in found.items()
    }
    left = {name: every for name, every in left.items() if every}
    new = [f"{name}\n" + "".join(f"    {each}\n" for each in sorted(left[name])) for name in sorted({*left})]
    assert not new, f"a worker ({method}) differs from a fresh process:\n{''.join(new)}"
    unused = {name for name in allowed if name in among and name not in found}
    assert not unused, f"these do not differ: take them out of ALLOWED and docs/torchrun.md: {sorted(unused)}"


COLD = pytest.param("fork", (*VARIANTS, "torch"), marks=pytest.mark.cold, id="cold")
WARM = pytest.param("fork", (*VARIANTS, "torch"), id="warm")


class TestTheTableOfDifferences:
    def test_the_table_of_differences_names_existing_properties(self) -> None:
        names = {*LOOKS, *CASES}
        assert {each.property for each in ALLOWED} <= names

    def test_the_table_of_differences_is_that_of_the_documentation(self) -> None:
        page = text_of("docs/torchrun.md").partition("## Where a forked worker differs")[2]
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in page.splitlines()
            if line[:3] == "| `"
        ]
        told = {(row[0].strip("`"), method) for row in rows for method in row[1].split(", ")}
        assert told == {(each.property, method) for each in ALLOWED for method in each.methods}
        assert all(row[2] for row in rows), "each with its reason"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """As users start them: what their workers have is looked at."""
    with warm_in(tmp_path_factory.mktemp("warm")) as processes:
        yield processes


class TestAWorkerIsLikeAFreshProcess:
    @pytest.mark.parametrize(("method", "variants"), [COLD, WARM, ("exec", VARIANTS)])
    def test_a_worker_is_like_a_fresh_process_for_each_kind_of_entry(
        self, unirun: Unirun, tmp_path: Path, method: str, variants: tuple[str, ...]
    ) -> None:
        program = probe_in(tmp_path / "program")
        plain = reports_under_python(unirun, program, variants)
        judge(method, faults(plain, reports_under_unirun(unirun, program, method, variants)), LOOKS)

    def test_torchruns_workers_are_like_fresh_processes(self, unirun: Unirun, tmp_path: Path) -> None:
        """Justifies the comparison with plain python: torchrun adds variables, and nothing else."""
        program = probe_in(tmp_path / "program")
        plain = reports_under_python(unirun, program, ["module"])
        differ = faults(plain, reports_under_torchrun(unirun, program, ["module"]))
        assert {*differ} == {"environment"}, differ
        assert differ["environment"] == {f"+{name}" for name in TORCHRUN}


class TestAWorkerEndsLikeAFreshProcess:
    @pytest.mark.chaos
    def test_a_worker_ends_like_a_fresh_process_by_fork_and_by_exec(
        self, unirun: Unirun, tmp_path: Path
    ) -> None:
        program = ends_in(tmp_path / "program")
        expected = ends_under_python(unirun, program)
        for method in BOTH:
            judge(method, faults_of_ends(expected, ends_under_unirun(unirun, program, method)), [*CASES])
            shutil.rmtree(unirun.job_dir())
