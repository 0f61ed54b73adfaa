"""The batch script, read by a real shell; what Slurm makes of it is in tests/integration."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.launcher.slurm.options import parse_slurm
from unirun.launcher.slurm.submit import Batch, batch_script


def of_job(words: Sequence[str], folder: Path) -> Batch:
    """The batch that `unirun --slurm` submits, in `folder`, which is also the home of jobs."""
    return Batch("ppo", tuple(words), "ppo-1", folder, folder, "/logs/o.log")


BATCH = of_job(["--roles", "actor=4", "train.py"], Path("/data/my job"))


def script(*texts: str, batch: Batch = BATCH) -> list[str]:
    return batch_script(parse_slurm(texts or ["nodes=1"]), batch).splitlines()


def directives(lines: list[str]) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_the_script_asks_for_what_the_options_say() -> None:
    assert directives(script("nodes=4,partition=debug,time=1:00:00,gres=gpu:8,exclude=n[1-2]")) == [
        "--job-name=ppo-1",
        "--output=/logs/o.log",
        "--open-mode=append",
        "--signal=B:TERM@60",
        "--no-kill",
        "--requeue",
        "--nodes=4",
        "--partition=debug",
        "--time=1:00:00",
        "--gres=gpu:8",
        '--exclude="n[1-2]"',
        "--ntasks-per-node=1",
    ]


def test_requeueing_the_grace_period_and_exclusive_nodes_can_be_chosen() -> None:
    found = directives(script("requeue=no,grace=120,exclusive=yes,qos=high"))
    assert {"--no-requeue", "--signal=B:TERM@120", "--exclusive", "--qos=high"} <= {*found}


def test_options_of_the_user_come_last_so_that_they_count() -> None:
    """Of two with one name, sbatch takes the last."""
    options = parse_slurm(["nodes=1,roles=a", "nodes=2"], extra=["--signal=B:USR1@30", "--comment='a b'"])
    found = directives(batch_script(options, BATCH).splitlines())
    assert found[found.index("hetjob") - 2 :] == [
        "--signal=B:USR1@30",
        "--comment='a b'",
        *("hetjob", "--nodes=2", "--ntasks-per-node=1"),
        "--signal=B:USR1@30",
        "--comment='a b'",
    ]


def test_options_of_ours_can_be_left_out() -> None:
    everything = "job_name+no_kill+nodes+ntasks_per_node+open_mode+output+requeue+signal"
    assert directives(script(f"partition=debug,without={everything}")) == ["--partition=debug"]
    assert directives(script(f"requeue=no,without={everything}")) == []


def test_an_option_of_the_user_stays_where_ours_is_left_out() -> None:
    options = parse_slurm(["nodes=1,without=signal+nodes"], extra=["--signal=B:USR1@30", "--nodes=2"])
    found = directives(batch_script(options, BATCH).splitlines())
    assert [each for each in found if "signal" in each or "nodes" in each] == [
        "--signal=B:USR1@30",
        "--nodes=2",
    ]


def test_components_of_a_heterogeneous_job_are_started_as_one_step() -> None:
    lines = script(
        "nodes=1,roles=a,cpus_per_task=4", "nodes=2,roles=b,container_image=img:1,container_mounts=/a:/b"
    )
    found = directives(lines)
    assert found[found.index("hetjob") :] == ["hetjob", "--nodes=2", "--ntasks-per-node=1"]
    (step,) = [line for line in lines if line.startswith("srun")]
    first, second = step.removesuffix(" &").split(" : ")
    assert "--het-group=0 --cpus-per-task=4 unirun" in first
    assert "--het-group=1 --container-image=img:1 --container-mounts=/a:/b unirun" in second


def test_the_loss_of_a_task_or_a_node_does_not_end_the_step() -> None:
    (step,) = [line for line in script() if line.startswith("srun")]
    assert step == (
        "srun --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=0 --wait=0 --no-kill "
        'unirun --rdzv-id "$run_id" --roles actor=4 train.py &'
    )


STUBS = """\
srun() { for word; do printf '%s\\0' "$word"; done >words; return CODE; }
scancel() { :; }
sleep() { command sleep 0.1; }
scontrol() { case $1 in show) echo "JobId=1 PreemptTime=$PREEMPTED Power=";; *) echo "$@" >told;; esac; }
"""


def run_with_stubs(
    folder: Path, text: str, code: int = 0, environ: Mapping[str, str] | None = None, shell: str = "sh"
) -> subprocess.CompletedProcess[str]:
    """The script in a shell in which `srun` keeps its arguments."""
    head, _, body = text.partition("\n")
    (folder / "script").write_text(f"{head}\n{STUBS.replace('CODE', str(code))}{body}")
    return subprocess.run(
        [shell, folder / "script"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


WORDS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12), max_size=4
)


@pytest.mark.starts_processes
@examples(20)
@given(WORDS)
@example(["a b", "it's", "$(touch x)", "`id`", "\n", '"', "&", "", "*", "~", "--"])
def test_arguments_and_variables_arrive_as_they_were_given(
    tmp_path_factory: pytest.TempPathFactory, words: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("a 'folder'")
    batch = of_job(words, folder)
    done = run_with_stubs(folder, batch_script(parse_slurm(["env_vars=A=1 & 2"]), batch))
    assert (done.returncode, done.stderr) == (0, "")
    expected = ["unirun", "--rdzv-id", "ppo-1", *words]
    assert (folder / "words").read_bytes().decode().split("\0")[5:-1] == expected


@pytest.mark.starts_processes
def test_setup_lines_run_before_the_job_and_in_one_shell(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export A=1; declare -x B='2 3'")
    lines = ["source ./env.sh", "# 'only' a comment", 'export C="$A it\'s"']
    text = batch_script(parse_slurm(["nodes=1"], setup=lines), of_job((), tmp_path))
    assert text.startswith("#!/bin/bash -l\n")
    text = text.replace("srun", "env >environ; srun")
    assert run_with_stubs(tmp_path, text, shell="bash").returncode == 0
    assert {"A=1", "B=2 3", "C=1 it's"} <= {*(tmp_path / "environ").read_text().splitlines()}


@pytest.mark.starts_processes
@pytest.mark.parametrize("line", ["cd nowhere", "(exit 3)", "echo 'never closed"])
def test_a_setup_line_that_fails_ends_the_job_before_it_starts(tmp_path: Path, line: str) -> None:
    text = batch_script(parse_slurm(["nodes=1"], setup=[line]), of_job((), tmp_path))
    done = run_with_stubs(tmp_path, text, shell="bash")
    assert done.returncode > 0
    assert f"unirun: --slurm-setup has failed with {done.returncode}: {line}\n" in done.stderr
    assert not (tmp_path / "words").exists()


@pytest.mark.starts_processes
@pytest.mark.parametrize("code", [0, 1, 3, 143])
def test_the_exit_code_is_that_of_srun_where_the_job_tells_none(tmp_path: Path, code: int) -> None:
    batch = of_job((), tmp_path)
    assert run_with_stubs(tmp_path, batch_script(parse_slurm(["nodes=1"]), batch), code).returncode == code


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("summary", "code"),
    [
        ('{"ended":1764.5,"code":0,"roles":{"code":4}}', 0),
        ('{"ended":1764.5,"code":5,"roles":{"a":1}}', 5),
        ('{"ended":null,"code":null,"roles":{"code":4}}', 137),
    ],
)
def test_the_exit_code_is_the_jobs_own_where_a_node_was_lost(tmp_path: Path, summary: str, code: int) -> None:
    batch = of_job((), tmp_path)
    text = batch_script(parse_slurm(["nodes=1"]), batch)
    (tmp_path / "jobs" / "ppo-1").mkdir(parents=True)
    (tmp_path / "jobs" / "ppo-1" / "summary.json").write_text("{}")
    late = f"echo {shlex.quote(summary)} > jobs/ppo-1/summary.json\n"
    done = run_with_stubs(tmp_path, text.replace("again=yes\nwhile", f"again=yes\n{late}while"), 137)
    assert done.returncode == code


@pytest.mark.starts_processes
def test_a_task_of_a_lost_node_holds_the_script_only_for_a_moment_after_the_end_of_the_job(
    tmp_path: Path,
) -> None:
    """srun waits for it until Slurm has noticed."""
    text = batch_script(parse_slurm(["nodes=1"]), of_job((), tmp_path))
    waits = (
        """srun() { echo '{"ended":1764.5,"code":3,"roles":{}}' >jobs/ppo-1/summary.json; exec sleep 600; }"""
    )
    done = run_with_stubs(tmp_path, text.replace("\nrun_id=", f"\n{waits}\nrun_id=", 1))
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.starts_processes
def test_a_script_for_others_runs_where_it_is_submitted_and_is_called_after_its_slurm_job(
    tmp_path: Path,
) -> None:
    text = batch_script(parse_slurm(["nodes=1"]), Batch("ppo", ("--config", "job.yaml")))
    assert "--job-name=ppo\n" in text
    done = run_with_stubs(tmp_path, text, environ={"SLURM_JOB_ID": "12", "HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    words = (tmp_path / "words").read_text().split("\0")
    assert words[5:-1] == ["unirun", "--rdzv-id", "ppo-12", "--config", "job.yaml"]


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("code", "preempted", "options", "requeued"),
    [
        (143, "2026-11-23T07:26:52", "nodes=1", True),
        (143, "None", "nodes=1", False),
        (0, "2026-11-23T07:26:52", "nodes=1", False),
        (143, "2026-11-23T07:26:52", "nodes=1,requeue=no", False),
    ],
)
def test_a_job_that_has_ended_because_it_was_preempted_is_requeued(
    tmp_path: Path, code: int, preempted: str, options: str, requeued: bool
) -> None:
    """Slurm itself requeues only what is still there at the end of the grace time."""
    text = batch_script(parse_slurm([options]), of_job((), tmp_path))
    done = run_with_stubs(tmp_path, text, code, environ={"PREEMPTED": preempted, "SLURM_JOB_ID": "12"})
    assert done.returncode == code
    assert (tmp_path / "told").exists() == requeued
    assert not requeued or (tmp_path / "told").read_text() == "requeue 12\n"


@pytest.mark.starts_processes
def test_a_script_for_others_needs_a_home(tmp_path: Path) -> None:
    text = batch_script(parse_slurm(["nodes=1"]), Batch("ppo", ("train.py",)))
    done = run_with_stubs(tmp_path, text, environ={"SLURM_JOB_ID": "7"})
    assert done.returncode != 0
    assert "HOME is not set: set UNIRUN_HOME to a directory that the nodes share" in done.stderr
    assert not (tmp_path / "words").exists()
