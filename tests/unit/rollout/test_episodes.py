"""The turns of an episode as sequences to be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rollout.fake_completer import made
from unirun.rollout.completing import NOT_MADE, Completion, Trajectory, Turn, oldest, recorded, trajectories


def test_one_turn_is_a_prompt_that_is_not_trained_on_and_an_answer_that_is() -> None:
    (found,) = trajectories([Turn((5, 6), made(7, 8, version=3))], 0.5)
    assert found == Trajectory(
        (5, 6, 7, 8),
        (False, False, True, True),
        (0.0, 0.0, -0.5, -0.5),
        (NOT_MADE, NOT_MADE, 3, 3),
        0.5,
    )


def test_what_the_environment_says_between_two_turns_is_not_trained_on() -> None:
    (found,) = trajectories([Turn((1,), made(2, version=0)), Turn((1, 2, 9), made(3, version=1))], 1.0)
    assert found.token_ids == (1, 2, 9, 3)
    assert found.trained == (False, True, False, True)
    assert found.versions == (NOT_MADE, 0, NOT_MADE, 1)


def test_a_prompt_that_does_not_go_on_with_what_was_said_begins_another_trajectory() -> None:
    first, second = trajectories([Turn((1,), made(2)), Turn((1, 3), made(4)), Turn((1, 2, 5), made(6))], 1.0)
    assert first.token_ids == (1, 2, 5, 6)
    assert second.token_ids == (1, 3, 4)
    assert first.reward == second.reward == 1.0


def test_a_prompt_that_goes_on_with_two_trajectories_goes_on_with_the_later_one() -> None:
    turns = [Turn((1,), made(2)), Turn((1,), made(2, 3)), Turn((1, 2, 3, 4), made(5))]
    first, second = trajectories(turns, 1.0)
    assert first.token_ids == (1, 2)
    assert second.token_ids == (1, 2, 3, 4, 5)
    assert second.trained == (False, True, True, False, True)


def test_the_version_of_a_group_is_the_oldest_that_has_made_a_token() -> None:
    mixed = Completion((1, 2), (0.0, 0.0), (4, 5), "stop")
    assert oldest([made(1, version=6), mixed]) == 4
    assert oldest([made()]) is None


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), max_size=3))))
def test_each_token_that_was_made_is_trained_on_once_and_no_other(
    rounds: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> None:
    turns, context = [], tuple[int, ...]()
    for number, (said, answer) in enumerate(rounds):
        prompt = (*context, *said) if number % 3 else tuple(said)
        turns.append(Turn(prompt, made(*answer, version=number)))
        context = (*prompt, *answer)
    found = trajectories(turns, 0.0)
    trained = [
        version
        for each in found
        for version, is_trained in zip(each.versions, each.trained, strict=True)
        if is_trained
    ]
    assert sorted(trained) == sorted(v for turn in turns for v in turn.completion.versions)
    for each in found:
        assert len(each.token_ids) == len(each.trained) == len(each.logprobs) == len(each.versions)


ROUNDS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=6)
"""Numbers of tokens that the environment and the model have said; True if something else was asked of the model before."""


@given(ROUNDS, st.integers(0, 2), st.randoms(use_true_random=False))
def test_a_sequence_that_an_agent_has_put_together_has_what_its_turns_have_recorded(
    rounds: Sequence[tuple[int, int, bool]], end: int, random: Random
) -> None:
    turns: list[Turn] = []
    tokens: list[int] = []
    expected: list[tuple[float, int]] = []
    for version, (said, answered, aside) in enumerate(rounds):
        if aside:
            turns.append(Turn((-1,), made(-2, version=version)))
        tokens += range(len(tokens), len(tokens) + said)
        logprobs = tuple(-float(version + n) for n in range(1, answered + 1))
        answer = tuple(range(len(tokens), len(tokens) + answered))
        turns.append(Turn((*tokens,), Completion(answer, logprobs, (version,) * answered, "stop")))
        tokens += answer
        expected += [(0.0, NOT_MADE)] * said + [(each, version) for each in logprobs]
    tokens += range(len(tokens), len(tokens) + end)
    expected += [(0.0, NOT_MADE)] * end
    masked = [random.random() < 0.3 for _ in tokens] if random.random() < 0.7 else None
    found = recorded(tokens, turns, 0.5, masked)
    assert (found.token_ids, found.reward) == (tuple(tokens), 0.5)
    assert [*zip(found.logprobs, found.versions, strict=True)] == expected
    hidden = masked or [False] * len(tokens)
    assert found.trained == tuple(
        version != NOT_MADE and not mask for (_, version), mask in zip(expected, hidden, strict=True)
    )
