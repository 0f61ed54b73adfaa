"""Questions, which of them are held out, and what the verifier gives for an answer."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer import ALPHABET, encode

if TYPE_CHECKING:
    from tasks import Task, Tasks, is_held_out

    TASKS: Tasks


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Imported when a test needs it: reasoning_gym takes seconds, which every process that collects tests would spend."""
    global TASKS, Task, Tasks, is_held_out
    from tasks import Task, Tasks, is_held_out

    TASKS = Tasks(2, 4)


def test_the_answer_to_a_question_is_the_value_of_its_sum() -> None:
    for task in islice(TASKS.training(0), 200):
        numbers = task.prompt.removesuffix("=").replace("-", "+-").split("+")
        assert int(task.answer) == sum(map(int, numbers))


@given(seed=st.integers(0, 1000))
def test_no_training_stream_has_a_held_out_question(seed: int) -> None:
    held_out = {task.prompt for task in TASKS.held_out(50)}
    seen = {task.prompt for task in islice(TASKS.training(seed), 50)}
    assert not held_out & seen
    assert not any(map(is_held_out, seen))


def test_held_out_questions_are_all_different_and_always_the_same() -> None:
    first = TASKS.held_out(300)
    assert len({task.prompt for task in first}) == 300
    assert Tasks(2, 4).held_out(300) == first


def test_streams_of_neighbouring_seeds_differ() -> None:
    first, second = ([task.prompt for task in islice(TASKS.training(seed), 100)] for seed in (0, 1))
    assert len(set(first) & set(second)) < 30


def test_every_question_and_answer_can_be_encoded() -> None:
    for task in islice(TASKS.training(3), 200):
        encode(task.prompt + task.answer)


@given(seed=st.integers(0, 100), text=st.none() | st.text(ALPHABET, max_size=4))
def test_a_score_is_1_for_the_right_number_only(seed: int, text: str | None) -> None:
    task = next(TASKS.training(seed))
    try:
        right = text is not None and int(text) == int(task.answer)
    except ValueError:
        right = False
    score = TASKS.score(task, text)
    assert (score == 1.0) == right
    assert 0.0 <= score <= 1.0


@pytest.mark.parametrize(
    ("answer", "score"), [("7", 1.0), ("07", 1.0), ("-7", 0.5), ("8", 0.0), ("", 0.0), (None, 0.0)]
)
def test_scores_are_those_of_the_dataset(answer: str | None, score: float) -> None:
    assert TASKS.score(Task("3+4=", "7"), answer) == score
