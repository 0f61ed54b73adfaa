"""The ready asynchronous experiment to its end: servers generate, an agent makes trajectories, model workers train."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.documents import ROOT
from unirun.experiments.buffer import Buffer

from .harness import Unirun

STEPS, BATCH, ETA = 8, 4, 1

SETTINGS = (
    f"steps={STEPS}",
    f"batch={BATCH}",
    f"eta={ETA}",
    "updates=2",
    "group=4",
    "samples=200",
    "ckpt_freq_steps=100",
)


def check(root: Path) -> None:
    """Versions rise, no step has trained on older trajectories than it may, and each has trained on those that were
    accepted next."""
    figures = [json.loads(line) for line in (root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in figures] == [*range(1, STEPS + 1)]
    # The servers have the weights that are trained.
    assert figures[0]["actorTrain/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    taken = [json.loads(line) for line in (root / "recover/buffer/taken.jsonl").read_text().splitlines()]
    assert [line["step"] for line in taken] == [*range(STEPS)]
    buffer = Buffer(root / "recover/buffer")
    arrived = [meta.ids[0] for _, meta in buffer.since(0)[1]]
    dropped = {each for line in taken for each in line["old"]}
    used = [each for line in taken for each in line["ids"]]
    assert len(used) == STEPS * BATCH
    assert used == [each for each in arrived if each not in dropped][: len(used)]
    newest = 0
    for line in taken:
        sample = buffer.read(line["ids"])
        made = sample["versions"][~sample["prompt_mask"]]
        assert bool((made >= max(line["step"] - ETA, 0)).all())
        assert bool((made <= line["step"]).all())
        newest = max(newest, int(made.max()))
    assert newest >= STEPS - 1 - ETA


@pytest.mark.chaos
@pytest.mark.usefixtures("warm_models")
@pytest.mark.timeout(300)
def test_with_a_critic_whose_worker_works_for_the_next_step_and_is_killed(unirun: Unirun) -> None:
    env = {"PYTHONPATH": str(ROOT / "examples")}
    trial = ("-e", "async-ppo", "-f", "first", "--module", "experiments.async_ppo")
    settings = ("steps=5", "batch=16", "samples=200", "ckpt_freq_steps=2", "servers=1")
    job = unirun.start("experiment", "start", *trial, *settings, env=env)
    job.lines(r"step 3: (.*)", within=200)
    os.kill(int(unirun.workers()["model_worker:2"]["pid"]), signal.SIGKILL)
    result = job.end(within=200)
    assert result.code == 0, result.err
    root = unirun.home / "experiments/async-ppo/first"
    figures = [json.loads(line) for line in (root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in figures] == [1, 2, 3, 4, 5]
    # The servers have the weights that are trained.
    assert figures[0]["actorTrain/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert all(line["criticTrain/loss"] > 0.0 for line in figures)
    evaluated = [json.loads(line) for line in (root / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluated] == [0, 5]
    assert all(0.0 <= line["actorTrain/eval_reward"] <= 1.0 for line in evaluated)
    assert all(1.0 <= line["actorTrain/eval_tokens"] <= 4.0 for line in evaluated)


@pytest.mark.chaos
@pytest.mark.usefixtures("warm_models")
@pytest.mark.timeout(300)
def test_what_an_environment_says_between_two_turns_is_not_trained_on(unirun: Unirun) -> None:
    env = {"PYTHONPATH": str(ROOT / "examples")}
    trial = ("-e", "async-two-turns", "-f", "first", "--module", "experiments.two_turns")
    settings = (
        "steps=1",
        "batch=4",
        "updates=2",
        "group=4",
        "samples=200",
        "ckpt_freq_steps=100",
        "servers=1",
    )
    result = unirun("experiment", "start", *trial, *settings, env=env, within=240)
    assert result.code == 0, result.err
    buffer = Buffer(unirun.home / "experiments/async-two-turns/first/recover/buffer")
    sample = buffer.read([meta.ids[0] for _, meta in buffer.since(0)[1]])
    lengths = sample.lengths("packed_input_ids")
    for key in ("prompt_mask", "versions"):
        assert sample.lengths(key) == lengths
    said = 0
    for masks, versions in zip(sample.sequences("prompt_mask"), sample.sequences("versions"), strict=True):
        assert bool(((versions < 0) == masks).all())
        first = int((~masks).nonzero()[0])
        said += int(masks[first:].sum())
    assert said > 0


@pytest.mark.chaos
@pytest.mark.usefixtures("warm_models")
@pytest.mark.timeout(300)
def test_a_dead_server_and_a_dead_rollout_worker_lose_nothing_that_was_accepted(unirun: Unirun) -> None:
    env = {"PYTHONPATH": str(ROOT / "examples")}
    trial = ("-e", "async-grpo", "-f", "first", "--module", "experiments.async_grpo")
    job = unirun.start("experiment", "start", *trial, *SETTINGS, env=env)
    for step, worker in ((2, "generation_server:0"), (4, "rollout_worker:0"), (6, "generation_server:1")):
        job.lines(rf"step {step}: (.*)", within=200)
        os.kill(int(unirun.workers()[worker]["pid"]), signal.SIGKILL)
    result = job.end(within=200)
    assert result.code == 0, result.err
    check(unirun.home / "experiments" / "async-grpo" / "first")
