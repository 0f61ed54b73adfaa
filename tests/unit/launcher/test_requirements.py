"""A host that lacks what the processes of a job need is refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from unirun.errors import JobError
from unirun.launcher.launch import TEMPORARY, check_host
from unirun.spec.job import Entry, JobSpec, RoleSpec

SCRIPT = RoleSpec("actor", 1, Entry("script", "a.py"))


def job(*roles: RoleSpec) -> JobSpec:
    return JobSpec("job", "job-1", roles, (roles[0].name,))


@pytest.fixture
def writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory that can be written."""
    for name in TEMPORARY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: str(path) == str(tmp_path))
    return tmp_path


def test_a_role_that_uses_torch_needs_a_temporary_directory(writable: Path) -> None:
    with pytest.raises(JobError, match=r"role actor has no temporary directory, .*/tmp, .*; set TMPDIR"):
        check_host(job(SCRIPT))


@pytest.mark.parametrize("variable", TEMPORARY)
def test_it_may_be_named_by_a_variable_of_the_command_the_job_or_the_role(
    writable: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    own = {variable: str(writable)}
    check_host(job(replace(SCRIPT, env=own)))
    check_host(replace(job(SCRIPT), env=own))
    monkeypatch.setenv(variable, str(writable))
    check_host(job(SCRIPT))


def test_a_variable_of_the_role_counts_before_that_of_the_job_and_of_the_command(
    writable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = {"TMPDIR": str(writable)}, {"TMPDIR": "/nowhere"}
    for command, of_job, of_role, fits in (
        (good, {}, {}, True),
        (good, bad, {}, False),
        (bad, good, {}, True),
        (good, good, bad, False),
        (bad, bad, good, True),
    ):
        monkeypatch.setenv("TMPDIR", command["TMPDIR"])
        spec = replace(job(replace(SCRIPT, env=of_role)), env=of_job)
        if fits:
            check_host(spec)
        else:
            with pytest.raises(JobError, match="/nowhere"):
                check_host(spec)


def test_the_working_directory_is_the_last_resort_as_it_is_pythons(writable: Path) -> None:
    check_host(job(replace(SCRIPT, cwd=str(writable))))


def test_programs_need_none(writable: Path) -> None:
    check_host(job(RoleSpec("tool", 1, Entry("program", "/bin/true"))))
