"""The task of the staleness trials, and what is computed from their figures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import digits, prove, staleness
from experiments.digits import ASKED, BASE, HELD_OUT, Digits, FullQueue, rows, score, share
from experiments.staleness import HEAD, KINDS, SYNC, accuracy, age, ages_of, bound, losses_of, row, too_young

from tests.documents import ROOT
from unirun.experiments import SequenceSample


def test_a_prompt_is_trained_on_or_held_out() -> None:
    trained, held_out = rows(BASE**ASKED, held_out=False), rows(0, held_out=True)
    prompts = [row["prompt"] for row in (*trained, *held_out)]
    assert len(prompts) == len({*prompts}) == BASE**ASKED
    assert len(held_out) == HELD_OUT
    assert rows(768, held_out=False) == trained[:768]


@pytest.mark.parametrize(("text", "reward"), [("3", 1.0), ("1", 0.5), ("33", 0.5), ("", 0.0), ("13", 0.0)])
def test_the_reward_is_the_share_of_the_digit_and_the_end_that_are_right(text: str, reward: float) -> None:
    tokens = [*Digits().encode(text), Digits.eos_token_id][:2]
    assert share({"answer": "3"}, tokens) == reward
    assert score({"answer": "3"}, Digits().decode(tokens)) == float(text == "3")


def test_the_answer_is_the_sum_of_the_last_two_digits_modulo_7() -> None:
    each = [row for held_out in (True, False) for row in rows(BASE**ASKED, held_out=held_out)]
    answers = {row["prompt"]: row["answer"] for row in each}
    assert (answers["2013="], answers["2034="]) == ("4", "0")


def made_with(version: int) -> SequenceSample:
    """A group of one trajectory whose two tokens have these weights and the next ones."""
    versions = torch.tensor([-1, version, version + 1])
    return SequenceSample.of({"versions": [[versions]], "rewards": [[torch.tensor(1.0)]]}, ["group"])


def test_a_step_waits_for_all_groups_that_the_gate_lets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "ACCEPTED", threading.Semaphore(0))
    intake, policy = (FullQueue(eta=1, batch=2, drop_equal=False) for _ in range(2))
    monkeypatch.setattr(digits, "FULL_TIMEOUT", 0.0)
    for version, groups in enumerate((4, 2, 2)):
        for _ in range(groups):
            with pytest.raises(TimeoutError, match="not full"):
                policy.wait()
            assert intake.accepts(made_with(version))
        policy.wait()


def test_a_group_that_is_too_old_for_its_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "ACCEPTED", threading.Semaphore(0))
    intake = FullQueue(eta=1, batch=2, drop_equal=False)
    assert [intake.accepts(made_with(0)) for _ in range(5)] == [True, True, True, True, False]
    assert intake.accepts(made_with(1))


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
    assert age(ages_of(steps)) == 0.4


def test_a_row_of_the_table_has_all_seeds() -> None:
    figures: dict[str, dict[str, dict[str, Any]]] = {
        seed: {
            SYNC: {"curve": [[96, 75.0]], "ages": {}},
            "η=1": {"curve": [[96, end]], "ages": {"1": 90, "0": 6}},
        }
        for seed, end in (("0", 70.0), ("1", 72.0))
    }
    assert row(figures, SYNC) == "| synchronous | 75.0 | 75.0 75.0 |  |  |  |"
    assert row(figures, "η=1") == "| η=1 | 71.0 | 70.0 72.0 | 4.0 | 10.3 | 12, 180 |"


def test_the_documents_have_the_figures_that_are_kept() -> None:
    kept = json.loads((ROOT / "docs/pictures/staleness.json").read_text())
    lines = (ROOT / "docs/experiments.md").read_text().splitlines()
    assert kept["settings"] == []
    for each in (*HEAD.splitlines(), *(row(kept["seeds"], kind) for kind in KINDS)):
        assert each in lines
    assert too_young(kept["seeds"]) == []


def test_trajectories_that_are_too_young_compare_nothing() -> None:
    def trial(**ages: int) -> dict[str, Any]:
        return {"curve": [[0, 0.0]], "ages": {name.removeprefix("of_"): some for name, some in ages.items()}}

    old = {SYNC: trial(), "η=0": trial(of_0=9), "η=1": trial(of_0=1, of_1=9), "η=4": trial(of_3=1, of_4=1)}
    assert too_young({"0": old}) == []
    young = {**old, "η=4": trial(of_2=2, of_4=4), "η=1, plain": trial(of_0=3, of_1=7)}
    assert too_young({"0": old, "1": young}) == [
        "seed 1, η=4: 3.33 versions",
        "seed 1, η=1, plain: 0.70 versions",
    ]


class Trials:
    """Trials that end at once; those of the seed ``interrupted`` do not go on after the first one, and those of ``young``
    have no stale trajectory, and of those of ``worse`` one has learned less."""

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
        oldest = "0" if seed == "young" else kind[2]
        last = 80.0 if seed == "worse" and kind == "η=4" else 90.0
        return {"curve": [[0, 0.0], [36, last]], "ages": {oldest: 16} if kind != SYNC else {}}

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


def test_trials_that_are_too_young_are_a_failure(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    assert trials.start("--seeds", "young") == 1
    assert capsys.readouterr().out.count("MISSED: too young: seed young, η=") == 4


def test_a_bound_beyond_the_margin_is_a_failure(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    assert trials.start("--seeds", "0,worse") == 1
    assert "MISSED: η=4: 36.6 points behind, and the margin is 8" in capsys.readouterr().out


def test_seeds_that_are_not_asked_for_are_in_no_result(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        trials.start("--seeds", "interrupted")
    assert trials.start("--seeds", "1") == 0
    assert trials.drawn == [["1"]]
    assert "| η=4 | 90.0 | 90.0 | 0.0 |  | 16 |" in capsys.readouterr().out.splitlines()


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
