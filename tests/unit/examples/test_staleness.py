"""The task of the staleness trials, and what is computed from their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.digits import ASKED, BASE, Digits, rows, score, share
from experiments.staleness import SYNC, accuracy, ages_of, bound, losses_of


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
