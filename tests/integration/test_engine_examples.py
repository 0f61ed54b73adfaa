"""The examples of programs beside ranks, with stand-ins for their servers: each is run as its README says."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .harness import Unirun

EXAMPLES = Path(__file__).parents[2] / "examples"


class TestRLStack:
    FOLDER = EXAMPLES / "rl_stack"

    def test_rl_stack_learns_with_the_latest_weights_in_all_engines_despite_deaths(
        self, unirun: Unirun, tmp_path: Path
    ) -> None:
        """An engine and the router are killed while requests run. None is lost, and both engines have the last version."""
        short = ("separations=[]", "config.steps=30", f"config.weights={tmp_path / 'weights'}")
        running = unirun.start("--config", "job.yaml", *short, cwd=self.FOLDER)
        for victim, step in (("engine:0", 3), ("router:0", 8)):
            running.lines(rf"step (?:{'|'.join(map(str, range(step, 30)))}): reward")
            os.kill(int(unirun.workers()[victim]["pid"]), signal.SIGKILL)
            running.lines(rf"{victim} was killed by SIGKILL; restart 1 of 10")
        done = running.end()
        assert done.code == 0, done.err
        assert "accuracy 100%, versions {30}" in done.lines
        assert [len(re.findall(rf"step {step}: ", done.out)) for step in range(30)] == [1] * 30
        assert not [line for line in done.lines if "Traceback" in line]

    def test_the_picture_of_rl_stack_is_that_of_its_job(self, unirun: Unirun) -> None:
        picture = unirun("graph", "--config", "job.yaml", "--format", "svg", cwd=self.FOLDER)
        assert picture.out == (self.FOLDER / "job.svg").read_text()
        assert len((self.FOLDER / "job.yaml").read_text().splitlines()) <= 40


class TestTRLServer:
    FOLDER = EXAMPLES / "trl_server"

    def environment(self) -> dict[str, str]:
        """The stand-in for vLLM is found before the real one."""
        return {"PATH": f"{self.FOLDER / 'cpu'}:{os.environ['PATH']}"}

    def test_the_script_learns_from_the_server_which_has_the_weights_of_each_step(
        self, unirun: Unirun
    ) -> None:
        done = unirun("--config", "job.yaml", cwd=self.FOLDER, env=self.environment())
        assert done.code == 0, done.err
        rewards = [float(text) for text in re.findall(r"step \d+: reward (\S+)", done.out)]
        assert len(rewards) == 20
        assert rewards[0] < 0.6
        assert min(rewards[-3:]) > 0.9

    def test_the_job_ends_with_the_server_that_dies(self, unirun: Unirun) -> None:
        long = unirun.start(
            "--config", "job.yaml", "config.steps=100000", cwd=self.FOLDER, env=self.environment()
        )
        long.lines("step 2: reward")
        os.kill(int(unirun.workers()["vllm:0"]["pid"]), signal.SIGKILL)
        done = long.end()
        assert done.code == 128 + signal.SIGKILL
        assert "vllm:0 was killed by SIGKILL; role vllm has no restarts" in done.err

    def test_the_picture_of_trl_server_is_that_of_its_job(self, unirun: Unirun) -> None:
        picture = unirun(
            "graph", "--config", "job.yaml", "--format", "svg", cwd=self.FOLDER, env=self.environment()
        )
        assert picture.out == (self.FOLDER / "job.svg").read_text()
        assert len((self.FOLDER / "job.yaml").read_text().splitlines()) <= 12


class TestVLLMGRPO:
    """The parts that need no vLLM; `tests/engines` runs the job."""

    FOLDER = EXAMPLES / "vllm_grpo"

    def test_the_picture_of_vllm_grpo_is_that_of_its_job(self, unirun: Unirun) -> None:
        vllm = unirun.root / "bin" / "vllm"
        vllm.parent.mkdir()
        vllm.touch(mode=0o755)
        path = {"PATH": f"{vllm.parent}:{os.environ['PATH']}"}
        picture = unirun("graph", "--config", "job.yaml", "--format", "svg", cwd=self.FOLDER, env=path)
        assert picture.out == (self.FOLDER / "job.svg").read_text()


@pytest.mark.chaos
@pytest.mark.usefixtures("warm_models")
def test_asynchronous_grpo_trains_on_groups_of_its_last_versions_although_a_server_is_killed(
    unirun: Unirun, tmp_path: Path
) -> None:
    short = ("config.steps=4", "config.prompts=8", f"config.out={tmp_path / 'accuracy.png'}")
    more = ("+config.warmup_steps=100", "+config.evaluate_every=1", "config.bar=-100", "+config.held_out=50")
    job = unirun.start("--config", "job.yaml", *short, *more, cwd=EXAMPLES / "grpo_text_async")
    job.lines(r"GRPO step   1  reward", within=240)
    os.kill(int(unirun.workers()["engine:0"]["pid"]), signal.SIGKILL)
    done = job.end(within=240)
    assert done.code == 0, done.err
    ages = [int(age) for age in re.findall(r"ages \d+ to (\d+)", done.out)]
    assert len(ages) == 4
    assert max(ages) <= 2
