"""The asynchronous twin: groups of a pool as tensors, and a step on them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from unirun.rollout.completing import NOT_MADE, Group, Trajectory

sys.path.insert(0, str(Path(__file__).parents[4] / "examples" / "grpo_text_async"))


def group(question: str, *answers: str, version: int = 0) -> Group:
    """A group with the first answer right."""
    from tokenizer import END, encode

    begin = encode(question)
    made = []
    for number, text in enumerate(answers):
        tokens = (*begin, *encode(text), END)
        count, new = len(begin), len(tokens) - len(begin)
        logprobs = (0.0,) * count + (-0.5,) * new
        versions = (NOT_MADE,) * count + (version,) * new
        trained = (False,) * count + (True,) * new
        made.append(Trajectory(tokens, trained, logprobs, versions, float(not number)))
    return Group(f"{question}:0", {"id": question, "input_ids": begin}, tuple(made), version)


def test_answers_of_groups_are_padded_beside_their_prompts() -> None:
    from learner_async import answers_of
    from tokenizer import decode

    prompts, tokens, log_probs = answers_of([group("1+1=", "2", "13"), group("12+1=", "13")])
    assert prompts.shape == (3, 5)
    assert [decode(each) for each in tokens.tolist()] == ["2", "13", "13"]
    assert log_probs[0].tolist() == [-0.5, -0.5, 0.0]


def test_a_step_makes_the_right_answer_of_a_group_more_likely() -> None:
    from learner_async import Learner, answers_of
    from llama import answer_log_probs
    from recipe import Recipe

    learner = Learner(Recipe(minibatches=1, rate=1e-3, steps=2))
    groups = [group("1+1=", "2", "3")]
    prompts, tokens, _ = answers_of(groups)

    def chances() -> torch.Tensor:
        with torch.no_grad():
            return answer_log_probs(learner.model, prompts, tokens)[:, 0]

    before = chances()
    assert learner.learn(groups, 0) == pytest.approx(0.5)
    assert chances()[0] > before[0]
    assert chances()[1] < before[1]
