"""The examples that are jobs of workloads and a trainer, each run for real in a short form."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from unirun.train.setup import PRELOAD

from .harness import Unirun

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def result_of(unirun: Unirun) -> Any:
    """The value that the trainer's ``fit`` returned."""
    return cloudpickle.loads((unirun.job_dir() / "result.pkl").read_bytes())


class TestPPO:
    CLASSES = "actor=2@unified:Actor,rollout=2@unified:Rollout,critic=1@unified:Critic"

    @pytest.mark.usefixtures("warm_functions")
    def test_ppo_example_learns_to_balance_the_pole_despite_deaths(
        self, unirun: Unirun, tmp_path: Path
    ) -> None:
        out = tmp_path / "reward.png"
        short = ("config.solved=150", "config.bar=150", f"config.out={out}", "config.seeds=[0]")
        job = ("--config", "job.yaml", "--preload", ",".join(PRELOAD))
        running = unirun.start(*job, *short, cwd=EXAMPLES / "ppo_cartpole")
        for victim, update in (("actor:1", 1), ("critic:0", 4), ("rollout:1", 7)):
            running.lines(rf"update +(?:{'|'.join(map(str, range(update, 100)))}) ")
            os.kill(unirun.pid_of(victim), signal.SIGKILL)
            running.lines(rf"{victim} was killed by SIGKILL; restart 1 of 3: {victim} alone")
        done = running.end()
        assert done.code == 0, done.err
        results = result_of(unirun)
        assert set(results) == {0}
        assert min(results.values()) >= 150
        assert f"1 of 1 seeds reached 150; learning curves in {out}" in done.lines
        assert out.stat().st_size > 1000

    @pytest.mark.chaos
    @pytest.mark.timeout(600)
    def test_ppo_example_learns_though_a_rank_is_killed_every_five_seconds(
        self, unirun: Unirun, tmp_path: Path
    ) -> None:
        """For a minute. The ranks that are not killed keep their processes."""
        config = (f"config.out={tmp_path / 'reward.png'}", "config.seeds=[0,1,2,3,4,5,6,7]")
        running = unirun.start(
            "--config", "job.yaml", "--max-restarts", 30, *config, cwd=EXAMPLES / "ppo_cartpole"
        )
        running.lines(r"update +[2-9] ")
        schedule = ("--fault", "sigkill", "--every", "5s", "--for", "60s", "--seed", "1")
        found = unirun("inject", unirun.job_dir().name, "actor", *schedule, within=120)
        killed = Counter(re.findall(r"sigkill → (\w+:\d)", found.out))
        done = running.end(400)
        assert done.code == 0, done.err
        assert killed.total() >= 10, found
        assert min(result_of(unirun).values()) >= 400
        ranks = {
            f"{role['name']}:{rank['rank']}": rank["incarnation"]
            for role in unirun.status()["roles"]
            for rank in role["workers"]
        }
        assert {who: count for who, count in ranks.items() if count} == dict(killed)

    def test_ppo_example_can_be_described_on_the_command_line(self, unirun: Unirun) -> None:
        job = ("plan", "--roles", self.CLASSES, "--trainer", "unified:PPOTrainer")
        done = unirun(*job, cwd=EXAMPLES / "ppo_cartpole")
        assert done.code == 0, done.err
        assert "start: warm" in done.out


@pytest.mark.timeout(300)
@pytest.mark.chaos
class TestFineTuning:
    def test_fine_tuning_example_keeps_old_tasks_by_rehearsal(self, unirun: Unirun) -> None:
        command = [sys.executable, str(EXAMPLES / "sft_digits" / "main.py"), "--epochs", "10"]
        done = unirun.start_program(command).end(240.0)
        assert done.code == 0, done.err
        pretrained, forgetful, rehearsed = result_of(unirun)
        assert pretrained["0-4"] > 0.95
        assert pretrained["5-9"] == 0.0
        assert forgetful["5-9"] > 0.8
        assert forgetful["0-4"] < 0.3
        assert rehearsed["5-9"] > 0.8
        assert rehearsed["0-4"] > 0.6
        assert f"{rehearsed['model']:40} {rehearsed['0-4']:6.1%}" in done.out


class TestOnlineLearning:
    PHASE = 20

    def accuracies(self, unirun: Unirun, phase: int) -> tuple[float, float]:
        """Of the learner and of the frozen copy, at the end of a phase."""
        end = slice((phase + 1) * self.PHASE - 5, (phase + 1) * self.PHASE)
        learner, frozen = (sum(result_of(unirun)[name][end]) / 5 for name in ("learner", "frozen"))
        return learner, frozen

    @pytest.mark.chaos
    def test_online_learning_example_follows_each_drift_despite_deaths(
        self, unirun: Unirun, tmp_path: Path
    ) -> None:
        out = tmp_path / "drift.png"
        job = ("--config", "job.yaml", f"config.phase={self.PHASE}", f"config.out={out}")
        running = unirun.start(*job, cwd=EXAMPLES / "online_learning")
        running.lines("ranks of 4 roles up")
        for victim in ("preprocess:1", "trainer:0"):
            os.kill(unirun.pid_of(victim), signal.SIGKILL)
            running.lines(rf"{victim} was killed by SIGKILL; restart 1 of 3")
        done = running.end()
        assert done.code == 0, done.err
        assert self.accuracies(unirun, 0)[0] > 0.8
        for phase in (1, 2, 3):
            learner, frozen = self.accuracies(unirun, phase)
            assert learner > 0.75, phase
            assert frozen < 0.6, phase
        assert out.stat().st_size > 1000


@pytest.mark.chaos
class TestMultimodal:
    def test_multimodal_example_beats_single_modalities_despite_deaths(self, unirun: Unirun) -> None:
        job = ("--config", "job.yaml", "config.epochs=4")
        running = unirun.start(*job, cwd=EXAMPLES / "multimodal")
        running.lines("image +accuracy")
        os.kill(unirun.pid_of("names:0"), signal.SIGKILL)
        running.lines("name +accuracy")
        os.kill(unirun.pid_of("images:1"), signal.SIGKILL)
        done = running.end()
        assert done.code == 0, done.err
        accuracy = result_of(unirun)
        assert set(accuracy) == {"image", "name", "both"}
        assert min(accuracy["image"], accuracy["name"]) > 0.4
        assert accuracy["both"] > max(accuracy["image"], accuracy["name"]) + 0.08
