"""The ready asynchronous experiments with real vLLM as their server: steps are on the policy that it has generated with."""

from __future__ import annotations

import json

import pytest

from tests.documents import ROOT
from tests.engines.environment import binaries
from tests.engines.server import ENVIRONMENT, START_TIMEOUT
from tests.integration.harness import Unirun
from tests.integration.test_killing_every_role import VICTIMS, begun, check, kill_in_turn
from unirun.experiments.buffer import Buffer

STEPS, ETA = 4, 1


@pytest.mark.parametrize(
    ("name", "module"),
    [("async-grpo", "async_grpo"), ("async-ppo", "async_ppo"), ("async-two-turns", "two_turns")],
)
def test_an_experiment_trains_on_what_vllm_has_generated_with_the_versions_of_its_steps(
    unirun: Unirun, name: str, module: str
) -> None:
    env = {"PYTHONPATH": str(ROOT / "examples"), **ENVIRONMENT}
    trial = ("-e", name, "-f", "vllm", "--module", f"experiments.{module}")
    settings = (
        f"steps={STEPS}",
        "batch=4",
        f"eta={ETA}",
        "group=4",
        "updates=2",
        "samples=200",
        "servers=1",
        "ckpt_freq_steps=100",
    )
    engine = ("backend=vllm", f"python={binaries().parent}")
    result = unirun("experiment", "start", *trial, *settings, *engine, env=env, within=START_TIMEOUT)
    assert result.code == 0, result.err
    root = unirun.home / "experiments" / name / "vllm"
    figures = [json.loads(line) for line in (root / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in figures] == [*range(1, STEPS + 1)]
    # vLLM has the weights that are trained: its log-probabilities are those of a forward pass.
    assert figures[0]["actorTrain/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    buffer, newest = Buffer(root / "recover/buffer"), 0
    for line in map(json.loads, (root / "recover/buffer/taken.jsonl").read_text().splitlines()):
        sample = buffer.read(line["ids"])
        made = sample["versions"][~sample["prompt_mask"]]
        assert bool((made >= max(line["step"] - ETA, 0)).all() and (made <= line["step"]).all())
        newest = max(newest, int(made.max()))
    assert newest > 0


def test_whatever_is_killed_every_ten_seconds_nothing_that_vllm_has_made_is_lost_or_used_twice(
    unirun: Unirun,
) -> None:
    engine = ("backend=vllm", f"python={binaries().parent}")
    job, noted = begun(unirun, *engine, env=ENVIRONMENT)
    job.lines(r"step 2: (.*)", within=START_TIMEOUT)
    killed = kill_in_turn(unirun, job)
    result = job.end(within=2 * START_TIMEOUT)
    assert result.code == 0, result.err
    assert {*VICTIMS} <= {*killed}
    check(unirun.home / "experiments/noted-grpo/first", noted)
