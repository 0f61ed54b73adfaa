"""The task of the staleness trials, and what is computed from their figures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from experiments import prove, staleness
from experiments.digits import ASKED, BASE, Digits, rows, score, share
from experiments.staleness import KINDS, SYNC, accuracy, ages_of, bound, losses_of


def test_each_prompt_is_trained_on_or_held_out() -> None:
    trained, held_out = rows(held_out=False), rows(held_out=True)
    prompts = [row["prompt"] for row in (*trained, *held_out)]
    assert len(prompts) == len({*prompts}) == BASE**ASKED
    assert len(held_out) == 64


@pytest.mark.parametrize(("text", "reward"), [("3", 1.0), ("1", 0.5), ("33", 0.5), ("", 0.0), ("13", 0.0)])
def test_the_reward_is_the_share_of_the_digit_and_the_end_that_are_right(text: str, reward: float) -> None:
    tokens = [*Digits().encode(text), Digits.eos_token_id][:2]
    assert share({"answer": "3"}, tokens) == reward
    assert score({"answer": "3"}, Digits().decode(tokens)) == float(text == "3")


def test_the_answer_is_the_last_digit_one_higher() -> None:
    answers = {row["prompt"]: row["answer"] for held_out in (True, False) for row in rows(held_out=held_out)}
    assert (answers["2012="], answers["2013="]) == ("3", "0")


def test_the_bound_of_the_mean_is_students_for_so_many_seeds() -> None:
    assert bound([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3.0 + 2.132 * (2.5 / 5) ** 0.5)
    assert bound([7.0] * 5) == 7.0


def test_the_trials_of_one_seed_are_a_pair() -> None:
    figures = {
        str(seed): {
            kind: {"curve": [[0, 0.0], [52, end]]} for kind, end in ((SYNC, 90.0 + seed), ("η=4", 88.0))
        }
        for seed in range(3)
    }
    assert accuracy(figures, SYNC) == [90.0, 91.0, 92.0]
    assert losses_of(figures, "η=4") == [2.0, 3.0, 4.0]


def test_the_ages_of_all_steps_are_added_up(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    lines = [{"step": n, "trajectories/staleness_0": n, "trajectories/staleness_1": 1.0} for n in (1, 2)]
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ages_of(steps) == {"0": 3, "1": 2}


class Trials:
    """Trials that end at once; those of the seed ``interrupted`` do not go on after the first one."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.plot, self._patch = folder / "staleness.svg", patch
        self.run: list[tuple[str, str]] = []
        self.drawn: list[list[str]] = []
        patch.setattr(staleness, "measured", self._measured)
        patch.setattr(staleness, "draw", lambda figures, out: self.drawn.append([*figures]))

    def _measured(self, kind: str, seed: str, root: Path, settings: list[str]) -> dict[str, Any]:
        if self.run and seed == "interrupted":
            raise KeyboardInterrupt
        self.run.append((seed, kind))
        return {"curve": [[0, 0.0], [36, 90.0]], "ages": {}}

    def start(self, *words: str) -> int:
        """Run the command."""
        self._patch.setattr(sys, "argv", ["staleness", "--out", str(self.plot), *words])
        return staleness.main()


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(tmp_path, monkeypatch)


def test_trials_that_are_in_the_file_are_not_run_again(trials: Trials) -> None:
    assert trials.start("--seeds", "0") == 0
    assert trials.start("--seeds", "0,1") == 0
    assert trials.run == [(seed, kind) for seed in ("0", "1") for kind in KINDS]


def test_a_file_of_trials_with_other_settings_is_refused(trials: Trials) -> None:
    trials.start("--seeds", "0")
    with pytest.raises(
        SystemExit, match=r"staleness\.json has trials with the defaults, not with lr=0\.004: give another"
    ):
        trials.start("--seeds", "0", "lr=0.004")
    assert len(trials.run) == len(KINDS)


def test_seeds_that_are_not_asked_for_are_in_no_result(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        trials.start("--seeds", "interrupted")
    assert trials.start("--seeds", "1") == 0
    assert trials.drawn == [["1"]]
    assert "at most" not in capsys.readouterr().out


def test_sigterm_ends_the_trial_before_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Trial:
        def __init__(self, command: list[str], **_: Any) -> None: ...

        def wait(self, timeout: float | None = None) -> int:
            calls.append("wait")
            if timeout is None:
                signal.raise_signal(signal.SIGTERM)
            return 0

        def terminate(self) -> None:
            calls.append("terminate")

    monkeypatch.setattr(subprocess, "Popen", Trial)
    before = signal.getsignal(signal.SIGTERM)
    with (tmp_path / "log").open("w") as log, pytest.raises(SystemExit) as ended:
        prove.run(["unirun"], log)
    assert ended.value.code == 128 + signal.SIGTERM
    assert calls == ["wait", "terminate", "wait"]
    assert signal.getsignal(signal.SIGTERM) == before
