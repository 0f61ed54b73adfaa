"""Trials of experiments on one host, whose processes are killed in each phase of a step."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.documents import ROOT

from .harness import Unirun

pytestmark = [pytest.mark.usefixtures("warm_models"), pytest.mark.timeout(600), pytest.mark.long]

TRIALS = Path(__file__).parent / "scripts" / "trials"
TIMES = ("seconds", "master_seconds", "bytes_moved", "bytes_needed")
"""Figures that differ from run to run."""

SMALL = ("-e", "killing", "--module", "killing")


def environment(unirun: Unirun, **more: str) -> dict[str, str]:
    killed = unirun.root / "killed"
    killed.mkdir(exist_ok=True)
    return {"PYTHONPATH": f"{ROOT / 'examples'}:{TRIALS}", "KILLED": str(killed), **more}


def trial(unirun: Unirun, name: str) -> Path:
    return unirun.home / "experiments" / "killing" / name


def steps(path: Path) -> list[dict[str, Any]]:
    """The figures of each step."""
    lines = (path / "steps.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def saved(path: Path) -> dict[str, torch.Tensor]:
    """The actor after the last step."""
    *_, found = sorted((path / "checkpoints" / "actor").glob("step*/model.safetensors"))
    weights: dict[str, torch.Tensor] = load_file(found)
    return weights


def saves(path: Path) -> list[dict[str, Any]]:
    """The findings of the evaluator, in the order in which models were saved."""
    return [json.loads(line) for line in (path / "saves.jsonl").read_text().splitlines()]


def equal(one: Path, other: Path) -> None:
    assert steps(one) == steps(other)
    first, second = saved(one), saved(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def unbroken(home: Unirun) -> Path:
    """A trial of which no process is killed."""
    result = home("experiment", "start", *SMALL, "-f", "unbroken", env=environment(home), within=240)
    assert result.code == 0, result.err
    assert len(steps(trial(home, "unbroken"))) == 6
    assert [each["save"] for each in saves(trial(home, "unbroken"))] == [
        "step000002",
        "step000004",
        "step000006",
    ]
    return trial(home, "unbroken")


@pytest.mark.chaos
def test_a_trial_whose_workers_die_in_each_call_is_the_same_as_one_in_which_nobody_dies(
    home: Unirun, unbroken: Path
) -> None:
    phases = (
        "actorGen:1:0",
        "rewInf:2:1",
        "refInf:1:1",
        "criticInf:2:0",
        "actorTrain:2:0",
        "criticTrain:2:1",
    )
    kills = ",".join((*phases, "evaluate:1:1", "evaluator:2:0"))
    result = home(
        "experiment", "start", *SMALL, "-f", "broken", env=environment(home, KILL=kills), within=240
    )
    assert result.code == 0, result.err
    assert {*kills.split(",")} <= {*os.listdir(home.root / "killed")}
    # The evaluator is no part of the training: it is started again, and its model evaluated again.
    assert len(re.findall("goes on from its last checkpoint", result.err)) == 7
    assert saves(trial(home, "broken")) == saves(unbroken)
    equal(trial(home, "broken"), unbroken)


@pytest.mark.chaos
def test_a_trial_whose_workers_die_while_they_read_and_write_files_is_the_same(
    home: Unirun, unbroken: Path
) -> None:
    kills = "load:5:0,checkpoint:1:0,checkpoint:2:1,load on:2:1,restore:1:0,restore:2:1,save:2:0"
    result = home("experiment", "start", *SMALL, "-f", "files", env=environment(home, KILL=kills), within=240)
    assert result.code == 0, result.err
    assert {*kills.split(",")} <= {*os.listdir(home.root / "killed")}
    assert len(re.findall(r"killed by SIGKILL; restart", result.err)) == 7
    # Reading a checkpoint is tried again, which is no new attempt unless the worker is lost before it has begun to read.
    assert 5 <= len(re.findall("goes on from its last checkpoint", result.err)) <= 7
    equal(trial(home, "files"), unbroken)


@pytest.mark.chaos
def test_models_in_layouts_of_their_own_are_the_same_though_workers_of_each_die_in_calls_beside_others(
    home: Unirun,
) -> None:
    kills = "actorTrain:1:0,criticTrain:2:1,actorTrain:3:3,refInf:2:0"
    marks = home.root / "killed-apart"
    marks.mkdir()
    # With a worker that has just come, all go on from the checkpoint twice.
    for name, more in (("apart", {}), ("apart-broken", {"KILL": kills, "LOST_AFTER": "actorTrain:3:3"})):
        env = environment(home, **more, KILLED=str(marks))
        result = home("experiment", "start", *SMALL, "-f", name, "separate=true", env=env, within=240)
        assert result.code == 0, result.err
    assert len(re.findall("goes on from its last checkpoint", result.err)) == 5
    equal(trial(home, "apart"), trial(home, "apart-broken"))


@pytest.mark.chaos
def test_a_trial_whose_trainer_dies_in_each_phase_goes_on_with_the_workers_that_live(
    home: Unirun, unbroken: Path
) -> None:
    phases = (
        "load:9:0",
        "actorGen:2:0",
        "rewInf:1:1",
        "refInf:2:0",
        "criticInf:3:1",
        "actorTrain:2:1",
        "criticTrain:3:0",
        "evaluate:1:0",
        "checkpoint:1:1",
        "save:2:0",
        "load on:1:0",
        "restore:1:1",
    )
    kills = [f"trainer@{phase}" for phase in phases]
    # More often than the ten times that it may end otherwise.
    how = ("experiment", "start", *SMALL, "-f", "headless", "--ignore-worker-error")
    running = home.start(*how, env=environment(home, KILL=",".join(kills)))
    workers = {rank: home.pid_of(f"model_worker:{rank}") for rank in range(2)}
    # The last two are of one load, so both may kill the same trainer.
    running.lines(f"trainer:0 was killed by SIGKILL; restart {len(phases) - 1}", within=240)
    assert {rank: home.pid_of(f"model_worker:{rank}") for rank in range(2)} == workers
    assert running.end(240).code == 0
    assert {*kills} <= set(os.listdir(home.root / "killed"))
    equal(trial(home, "headless"), unbroken)


def test_an_error_of_an_interface_ends_the_trial_at_once_with_its_traceback(home: Unirun) -> None:
    # The first one of all, as the command tries the networks of a home once, which takes longer than this trial.
    result = home(
        "experiment", "start", *SMALL, "-f", "wrong", "failing=always", env=environment(home), within=120
    )
    assert result.code == 1, result.err
    assert "ValueError: this is wrong" in result.err
    assert "restart" not in result.err


def test_a_trial_that_was_stopped_is_resumed_and_two_at_once_do_not_meet(home: Unirun) -> None:
    long = (*SMALL, "epochs=2", "samples=32")
    stopped = home.start("experiment", "start", *long, "-f", "one", env=environment(home))
    other = home.start("experiment", "start", *long, "-f", "two", env=environment(home))
    stopped.lines(r"step 2: criticTrain")
    assert home("experiment", "stop", "-e", "killing", "-f", "one").code == 0
    assert stopped.end().code == 143
    done = len(steps(trial(home, "one")))
    assert 2 <= done < 8
    assert other.end(240).code == 0
    resumed = home.start(
        "experiment", "start", *long, "-f", "one", "--recover-mode", "auto", env=environment(home)
    )
    resumed.lines(rf"step {done + 1}: criticTrain")
    # It would end before the next one has started.
    trainer = home.pid_of("trainer:0")
    os.kill(trainer, signal.SIGSTOP)
    again = home("experiment", "start", *long, "-f", "one", env=environment(home))
    os.kill(trainer, signal.SIGCONT)
    assert (again.code, "runs already" in again.err) == (2, True), again.err
    assert resumed.end(240).code == 0
    equal(trial(home, "one"), trial(home, "two"))
    listed = home("experiment", "list").out
    assert re.search(r"killing +one +succeeded", listed)
    assert re.search(r"killing +two +succeeded", listed)


@pytest.mark.chaos
def test_a_trial_that_has_failed_is_started_again_from_its_checkpoint(home: Unirun, unbroken: Path) -> None:
    how = ("--recover-mode", "fault", "--recover-after", "0", "failing=once")
    result = home("experiment", "start", *SMALL, "-f", "again", *how, env=environment(home), within=240)
    assert result.code == 0, result.err
    assert re.search("killing/again has failed with 1; it is started again in 0 s", result.err)
    equal(trial(home, "again"), unbroken)


def test_a_worker_that_ends_in_a_call_each_time_is_not_started_for_ever(home: Unirun) -> None:
    result = home(
        "experiment", "start", *SMALL, "-f", "exits", "failing=exit", env=environment(home), within=120
    )
    assert result.code == 3, result.err
    assert len(re.findall("goes on from its last checkpoint", result.err)) == 2
    told = r"a worker was lost in step 1, actorTrain: model_worker:\d was lost: exit code 3; that is the same end 3 times"
    assert re.search(told, result.err)
    assert "idempotent" not in result.err


@pytest.mark.chaos
def test_a_copy_on_the_same_workers_has_the_parameters_of_what_is_trained_and_a_reference_follows_it(
    home: Unirun,
) -> None:
    how = ("-e", "hooked", "--module", "hooked", "-f", "first")
    shown = home("experiment", "start", *how, "--dry-run", env=environment(home))
    assert shown.code == 0, shown.err
    assert "  actor@0 -> actor@1\n  actor@0 -> ref@0\n" in shown.out
    result = home("experiment", "start", *how, env=environment(home), within=120)
    assert result.code == 0, result.err
    found = steps(home.home / "experiments" / "hooked" / "first")
    assert [each["actorTrain/compared"] for each in found] == [1.0] * 4
    # Of both data-parallel ranks: the sum, the largest one, and the mean.
    assert [each["actorTrain/samples"] for each in found] == [8.0] * 4
    assert [each["actorTrain/last"] for each in found] == [1.0] * 4
    assert all(0.0 < each["actorTrain/each"] < 1.0 for each in found)
    assert all(0.0 <= each["actorEval/accuracy"] <= 1.0 for each in found)


@pytest.mark.chaos
def test_a_second_start_sets_the_files_of_the_first_aside_and_a_damaged_checkpoint_is_skipped(
    home: Unirun,
) -> None:
    how = ("experiment", "start", "-e", "sft", "-f", "twice", "samples=128", "epochs=2", "ckpt_freq_steps=2")
    for lr in (1e-3, 2e-3):
        result = home(*how, f"lr={lr}", env=environment(home), cwd=ROOT / "examples", within=120)
        assert result.code == 0, result.err
    path = home.home / "experiments" / "sft" / "twice"
    models = [load_file(each) for each in sorted(path.glob("**/step000004/model.safetensors"))]
    assert len(models) == 2
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert len((path / "earlier" / "1" / "steps.jsonl").read_text().splitlines()) == 4
    before = steps(path)
    other = (*how, "lr=3e-3", "--recover-mode", "auto")
    refused = home(*other, env=environment(home), cwd=ROOT / "examples", within=120)
    assert refused.code == 2, refused.err
    assert "models.default@0.backend.lr: 0.002 → 0.003" in refused.err
    assert "unirun: job" not in refused.err
    (path / "recover" / "000004" / "default@0" / "00001.pt").write_bytes(b"damaged")
    resumed = home(
        *how,
        "lr=2e-3",
        "--recover-mode",
        "resume",
        env=environment(home),
        cwd=ROOT / "examples",
        within=120,
    )
    assert resumed.code == 0, resumed.err
    assert "00001.pt cannot be read" in resumed.err
    assert "an earlier checkpoint is used" in resumed.err
    assert steps(path) == before


def test_what_would_go_wrong_again_is_told_once(home: Unirun) -> None:
    how = ("experiment", "start", *SMALL, "-f", "tiny", "samples=4", "--ignore-worker-error")
    result = home(*how, env=environment(home), within=120)
    assert result.code != 0
    assert "the dataset has 4 samples, and actorGen needs 8 in each step" in result.err
    assert "restart" not in result.err


@pytest.mark.chaos
def test_the_example_of_fine_tuning_learns_as_a_pipeline_and_its_saved_models_are_evaluated(
    home: Unirun,
) -> None:
    how = ("-e", "sft", "-f", "learns", "epochs=4", "lr=3e-3", "pipe=2", "data=1", "auto_eval=true")
    result = home("experiment", "start", *how, env=environment(home), cwd=ROOT / "examples", within=240)
    assert result.code == 0, result.err
    path = home.home / "experiments" / "sft" / "learns"
    evaluated = [json.loads(line)["trainDefault/eval_right"] for line in open(path / "evaluations.jsonl")]
    assert evaluated[0] == 0.0
    assert evaluated[-1] > 0.1
    assert saves(path)[-1]["right"] == evaluated[-1]
    assert "<svg" in (path / "graph.svg").read_text()
