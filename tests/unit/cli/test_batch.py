"""The batch job that `unirun --slurm` submits, as far as that needs no Slurm."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unirun.cli import run
from unirun.cli.batch import words_of
from unirun.cli.commandline import parse
from unirun.errors import SpecError, UsageError

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([["-q"], ["--detach"], ["--slurm", "nodes=2"], ["--rdzv-id=x"], ["--run-path"]]),
            st.builds(lambda value: ["--env", f"A={value}"], WORDS),
            st.builds(lambda count: [f"--roles=a={count}"], st.integers(1, 9)),
        ),
        max_size=4,
    ).map(lambda lists: [word for words in lists for word in words]),
    st.lists(WORDS, max_size=3),
)
@example(["--slurm", "nodes=1"], ["-x", "--roles", "--", "a=b"])
def test_the_passed_on_arguments_describe_the_same_job(options: list[str], args: list[str]) -> None:
    line = parse([*options, "--", "-train.py", *args])
    again = parse([*words_of(line)])
    here = ("slurm", "detach", "rdzv_id")
    assert again.options == {name: value for name, value in line.options.items() if name not in here}
    assert (again.script, again.args) == ("-train.py", tuple(args))


@pytest.mark.parametrize(
    "argv",
    [
        "--config job.yaml a.b=1 --quiet c=2 train.py -- -x y",
        "--config job.yaml -- train.py",
        "--config job.yaml",
        "--roles a=1@m:C --trainer m:T -- x=1",
    ],
)
def test_job_files_and_overrides_are_passed_on(argv: str) -> None:
    line = parse(argv.split())
    again = parse([*words_of(line)])
    assert (again.options, again.overrides) == (line.options, line.overrides)
    assert (again.script, again.args) == (line.script, line.args)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path / "train.py"


def test_dry_run_prints_the_script_and_leaves_nothing(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = "--slurm nodes=2,gres=gpu:4 --dry-run --roles actor=gpu,rollout=2 train.py --lr 1"
    assert run.main(argv.split()) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --gres=gpu:4\n" in text
    assert "\nrun_id=train-" in text
    assert f'{sys.executable} -m unirun --rdzv-id "$run_id" --roles=' in text
    assert "--roles=actor=gpu,rollout=2 -- train.py --lr 1 &\n" in text
    assert not (script.parent / "home").exists()


def test_extra_options_and_setup_lines_are_in_the_script(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--slurm-extra", "--account=x", "--slurm-extra=-C a", "--slurm-setup", "module load 'a b'"]
    run.main(["--slurm", "nodes=1", *extra, "--dry-run", "train.py"])
    text = capsys.readouterr().out
    assert "#SBATCH --account=x\n#SBATCH -C a\n" in text
    assert "\neval 'module load '\"'\"'a b'\"'\"'' || failed " in text
    assert "--slurm" not in text.partition("unirun --rdzv-id")[2]


@pytest.mark.parametrize(
    "what", [["train.py"], ["-m", "no_such.module"], ["--roles", "actor=1@no_such:Actor"]]
)
def test_a_container_has_unirun_on_its_path_and_its_own_modules(
    what: list[str], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.main(["--slurm", "container_image=a:1", "--dry-run", *what])
    assert " --container-image=a:1 unirun --rdzv-id " in capsys.readouterr().out
    run.main(["--slurm", "nodes=1", "--slurm-setup", "export PYTHONPATH=/apps", "--dry-run", *what])
    assert what[-1] in capsys.readouterr().out
    if what != ["train.py"]:
        with pytest.raises(SpecError, match="no_such"):
            run.main(["--slurm", "nodes=1", "--dry-run", *what])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--dry-run train.py", "--dry-run prints the batch script of --slurm"),
        ("--slurm nodes=1 --stdin a:0 train.py", "a batch job has no stdin"),
        ("--slurm nodes=1 --inventory fake: train.py", "the nodes are those of the allocation"),
        (
            "--slurm nodes=1 --hosts a train.py",
            "--hosts: the nodes are those that Slurm gives the job; leave",
        ),
        ("--slurm nodes=1 --hostfile a train.py", "leave out one of --hostfile and --slurm"),
        ("--slurm nodes=2 --nnodes 2 train.py", "--slurm nodes=N gives the number of nodes"),
        ("--slurm nodes=2 --node-rank 1 train.py", "the nodes are in Slurm's order"),
        ("--slurm nodes=2 --sync train.py", "it is for hosts that are reached by ssh"),
        ("--slurm-extra=--account=x train.py", "--slurm-extra is for jobs that are submitted to Slurm; add"),
        ("--slurm-setup true train.py", "--slurm-setup is for jobs that are submitted to Slurm"),
    ],
)
def test_options_that_make_no_sense_in_a_batch_job_are_refused(script: Path, argv: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        run.main(argv.split())


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        ("--slurm nodes=1 missing.py", "missing.py"),
        ("--slurm nodes=many train.py", "--slurm nodes"),
        (
            "--slurm roles=actr --slurm nodes=1 --roles actor=2 train.py",
            "no role 'actr'; did you mean 'actor'?",
        ),
        (
            "--slurm nodes=1 --slurm nodes=2 --component actor=1 --roles actor=2,rollout=1 train.py",
            "several components name no roles, and rollout may be on any of them; write roles=actor",
        ),
    ],
)
def test_faults_are_found_before_anything_is_submitted(script: Path, argv: str, fault: str) -> None:
    with pytest.raises(SpecError, match=fault):
        run.main(argv.split())
    assert not (script.parent / "home").exists()


def test_roles_may_name_their_components_themselves(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def components(text: str) -> set[str]:
        assert run.main(f"{text} --dry-run --component actor=0 --component rollout=1 train.py".split()) == 0
        return set(re.findall(r"--component=\S+", capsys.readouterr().out))

    own = {"--component=actor=0", "--component=rollout=1"}
    assert components("--slurm nodes=1 --slurm nodes=2 --roles actor=2,rollout=1") == own
    named = "--slurm nodes=1,roles=x --slurm nodes=2 --roles actor=2,rollout=1,x=1"
    assert components(named) == {*own, "--component=x=0"}


class TestEnginesThatReceiveWeights:
    """The companion of engines is a role that the job file does not have."""

    @pytest.fixture
    def job(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (script.parent / "vllm").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
        roles = "{actor: {script: train.py}, engine: {kind: vllm, model: m}}"
        channels = "{policy: {publisher: actor, receivers: [engine]}}"
        (script.parent / "job.yaml").write_text(f"roles: {roles}\nchannels: {channels}\n")
        return "--config job.yaml"

    def test_their_companion_is_on_the_component_of_the_engines(
        self, job: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = f"--slurm nodes=1,roles=actor --slurm nodes=1,gres=gpu:4 --dry-run {job}"
        assert run.main(argv.split()) == 0
        words = {*re.findall(r"--component=\S+", capsys.readouterr().out)}
        assert words == {"--component=actor=0", "--component=engine=1"}

    def test_their_companion_needs_no_component_where_all_others_have_said_theirs(
        self, job: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        own = "roles.actor.component=0 roles.engine.component=1"
        assert run.main(f"--slurm nodes=1 --slurm nodes=2 --dry-run {job} {own}".split()) == 0
        assert "--component" not in capsys.readouterr().out

    def test_their_companion_cannot_be_named(self, job: str) -> None:
        with pytest.raises(SpecError, match="no role 'engine-weights'; did you mean 'engine'"):
            run.main(f"--slurm roles=engine-weights --slurm nodes=1 --dry-run {job}".split())


def test_without_slurm_the_job_leaves_nothing(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirun.launcher.slurm.submit.ask_slurm", refuse)
    with pytest.raises(UsageError, match="sbatch is not found"):
        run.main(["--slurm", "nodes=2", "train.py"])
    assert [*(script.parent / "home" / "jobs").iterdir()] == []


def refuse(*command: str, **_: object) -> str:
    raise UsageError(f"{command[0]} is not found")
