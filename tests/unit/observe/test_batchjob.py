"""The state of a batch job, read from the output of the commands of Slurm 22.05."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import JobError, RendezvousError, UnirunError, UsageError
from unirun.observe.batchjob import (
    BatchState,
    ask_slurm,
    batch_state,
    failure,
    is_active,
    own_batch,
    parse_sacct,
    parse_scontrol,
    read_batch,
    write_batch,
)
from unirun.observe.jobdir import JobDir

ENDED = (
    "JobId=11 JobName=t.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901749 Nice=0 Account=(null) "
    "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=137:0 RunTime=00:00:06 TimeLimit=UNLIMITED Partition=debug AllocNode:Sid=localhost:9488 "
    "ReqNodeList=(null) ExcNodeList=n9 NodeList=n[1-2] BatchHost=n1 NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "NtasksPerN:B:S:C=1:0:*:* Command=/tmp/sl/t.sh WorkDir=/tmp/sl StdErr=/tmp/a b/t.out StdIn=/dev/null "
    "StdOut=/tmp/a b/t.out Power= \n"
)
PENDING = (
    ENDED.replace("FAILED", "PENDING").replace("NonZeroExitCode", "BeginTime").replace("137:0", "0:0")
).replace("NodeList=n[1-2]", "NodeList=")


def test_a_batch_job_that_has_ended_has_an_exit_code() -> None:
    assert parse_scontrol(ENDED) == BatchState(
        "FAILED", "NonZeroExitCode", "n[1-2]", output="/tmp/a b/t.out", code=137, requeues=True
    )
    assert not parse_scontrol(ENDED.replace("Requeue=1", "Requeue=0")).requeues
    assert not parse_scontrol(ENDED).active


def test_a_pending_batch_job_has_a_reason() -> None:
    found = parse_scontrol(PENDING.replace("Restarts=0", "Restarts=2"))
    assert (found.active, found.code, found.restarts) == (True, None, 2)
    assert found.words == "PENDING (BeginTime), requeued 2 times"


def test_a_heterogeneous_job_is_as_its_first_component() -> None:
    assert parse_scontrol(PENDING + ENDED).state == "PENDING"


def test_fields_in_a_comment_do_not_count() -> None:
    found = parse_scontrol(ENDED.rstrip() + " Comment=a JobState=RUNNING ExitCode=0:0\n")
    assert (found.state, found.code) == ("FAILED", 137)


@pytest.mark.parametrize(
    ("state", "code", "shell"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "7:0", 7),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED", "0:0", 143),
        ("TIMEOUT", "0:15", 143),
        ("NODE_FAIL", "0:0", 1),
        ("COMPLETING", "7:0", None),
        ("RUNNING", "0:0", None),
    ],
)
def test_the_exit_code_is_as_a_shell_has_it(state: str, code: str, shell: int | None) -> None:
    text = ENDED.replace("FAILED", state).replace("137:0", code)
    assert parse_scontrol(text).code == shell
    assert parse_sacct(f"{state} by 0|{code}\n").code == shell


def test_accounting_tells_what_the_controller_has_forgotten() -> None:
    assert parse_sacct("CANCELLED by 1000|0:15\n") == BatchState("CANCELLED", code=143)
    with pytest.raises(JobError, match="does not know"):
        parse_sacct("")


@given(st.text())
def test_any_answer_is_a_state_or_refused(text: str) -> None:
    for parse in (parse_scontrol, parse_sacct):
        try:
            assert isinstance(parse(text), BatchState)
        except JobError:
            continue


REFUSED = """\
sbatch: error: ****************************
sbatch: error: Please name an account.

sbatch: error: Batch job submission failed: Unspecified error
"""
NOWHERE = """\
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("said", "kind", "shown"),
    [
        (
            REFUSED,
            JobError,
            "***; Please name an account.; Batch job submission failed: Unspecified error; see",
        ),
        (
            NOWHERE,
            UsageError,
            "this host is in no Slurm cluster: sbatch: fetch_config: DNS SRV lookup failed; fatal:",
        ),
        (
            "sbatch: error: Unable to contact slurm controller (connect failure)",
            RendezvousError,
            "does not answer",
        ),
        ("", JobError, "sbatch: it failed without a word"),
    ],
)
def test_all_that_sbatch_says_when_it_fails_is_shown(said: str, kind: type[UnirunError], shown: str) -> None:
    error = failure("sbatch", said)
    assert type(error) is kind
    assert shown in str(error)


def test_accounting_is_asked_for_a_job_that_the_controller_has_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*words: str) -> str:
        asked.append(words)
        if words[0] == "scontrol":
            raise JobError("Invalid job id specified")
        return "FAILED|7:0\n"

    monkeypatch.setattr("unirun.observe.batchjob.ask_slurm", ask)
    assert batch_state("12") == BatchState("FAILED", code=7)
    assert asked == [
        ("scontrol", "show", "job", "--oneliner", "12"),
        ("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", "12"),
    ]


@pytest.mark.starts_processes
def test_what_a_command_says_besides_is_told() -> None:
    told: list[str] = []
    found = ask_slurm(
        "sh", "-c", "echo $A; echo sh: note: low budget >&2", environ={"A": "12"}, tell=told.append
    )
    assert (found, told) == ("12\n", ["note: low budget"])


@pytest.mark.starts_processes
def test_what_is_no_text_in_the_answer_of_slurm_leaves_the_rest() -> None:
    assert ask_slurm("printf", r"JobName=caf\351 JobState=RUNNING") == "JobName=caf\ufffd JobState=RUNNING"
    with pytest.raises(JobError, match="no job caf\ufffd"):
        ask_slurm("sh", "-c", r"printf 'no job caf\351' >&2; exit 1")


def test_the_record_of_a_batch_job_is_in_the_jobs_directory(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    assert read_batch(job) is None
    assert not is_active(job)
    job.batch.mkdir()
    write_batch(job, "12")
    assert read_batch(job) == "12"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (False, 0)),
        ({"UNIRUN_BATCH": "job-2"}, (False, 0)),
        ({"UNIRUN_BATCH": "job-2", "SLURM_RESTART_COUNT": "1"}, (False, 0)),
        ({"UNIRUN_BATCH": "job-1"}, (True, 0)),
        ({"UNIRUN_BATCH": "job-1", "SLURM_RESTART_COUNT": "0"}, (True, 0)),
        ({"UNIRUN_BATCH": "job-1", "SLURM_RESTART_COUNT": "2"}, (True, 2)),
    ],
)
def test_a_process_knows_its_own_batch_job(environ: dict[str, str], found: tuple[bool, int]) -> None:
    assert own_batch("job-1", environ) == found


@pytest.mark.starts_processes
def test_a_batch_job_of_which_slurm_says_nothing_may_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobDir(tmp_path)
    job.batch.mkdir()
    write_batch(job, "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="scontrol is not found"):
        batch_state("12")
    assert is_active(job)
