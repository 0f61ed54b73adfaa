"""The pure parts of the example with vLLM: sums, their tokens, and the losses of answers."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from additions import END, careless, questions, right, text_of, tokens_of
from learning import advantages, grpo, log_probs, mean
from torch import Tensor, nn

FOLDER = Path(__file__).parents[3] / "examples" / "vllm_grpo"


class Bigrams(nn.Module):
    """A model whose next token depends on the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(END + 1, END + 1, generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def test_tokens_are_characters_and_an_answer_stops_at_its_end() -> None:
    assert text_of(tokens_of("37+58=")) == "37+58="
    assert text_of([*tokens_of("95"), END, END]) == "95"


@pytest.mark.parametrize(
    ("question", "sum_", "without_carrying"),
    [("37+58=", "95", "85"), ("11+22=", "33", "33"), ("99+99=", "198", "88"), ("55+55=", "110", "00")],
)
def test_a_sum_has_a_right_answer_and_a_careless_one(question: str, sum_: str, without_carrying: str) -> None:
    assert (right(question), careless(question)) == (sum_, without_carrying)


def test_no_question_that_measures_accuracy_is_trained_with() -> None:
    training, held_out = questions()
    assert questions() == (training, held_out)
    assert len({*training, *held_out}) == len(training) + len(held_out) == 90 * 90
    assert {len(question) for question in training} == {6}


def test_log_probabilities_are_those_of_each_token_after_the_ones_before_it() -> None:
    model = Bigrams()
    tokens = torch.tensor([[9, 5, END], [1, 2, 3]])
    found = log_probs(model, ["37+58=", "61+62="], tokens)
    equals = tokens_of("=")[0]
    chain = [[equals, 9, 5, END], [equals, 1, 2, 3]]
    expected = [[model.table[a].log_softmax(0)[b] for a, b in pairwise(c)] for c in chain]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_mean_counts_an_answer_up_to_its_end() -> None:
    tokens = torch.tensor([[9, END, END], [1, 2, 3]])
    values = torch.tensor([[1.0, 2.0, 1000.0], [3.0, 4.0, 5.0]])
    assert mean(values, tokens) == 3.0


def test_advantages_compare_the_answers_to_one_question() -> None:
    found = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1.0, -1.0, 1.0], [0.0] * 4]), atol=1e-3, rtol=0)


def test_the_loss_follows_the_ratio_to_the_policy_that_has_drawn_a_token_and_is_clipped() -> None:
    old = torch.zeros(2, 3)
    new = torch.tensor([0.0, math.log(1.1), math.log(2.0)]).repeat(2, 1)
    found = grpo(new, old, torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(found, torch.tensor([[-1.0, -1.1, -1.2], [1.0, 1.1, 2.0]]))


def test_the_example_is_as_short_as_it_says() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")) <= 200
    assert len((FOLDER / "job.yaml").read_text().splitlines()) <= 30
