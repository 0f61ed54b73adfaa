"""Sampling with a cache and padding against scoring without either."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tokenizer import END, PAD, VOCABULARY, answer_mask, encode, pad_left, pad_right
from torch import Tensor

if TYPE_CHECKING:
    from llama import answer_log_probs, make_model, sample
    from transformers import LlamaForCausalLM

PROMPTS = ["1+2=", "9-8+7-6=", "3+4-5="]


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Imported when a test needs it: transformers takes seconds, which every process that collects tests would spend."""
    global answer_log_probs, make_model, sample
    from llama import answer_log_probs, make_model, sample


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def plain_log_probs(model: LlamaForCausalLM, prompt: str, tokens: list[int]) -> Tensor:
    """Log-probabilities ``[len(tokens)]`` by the book: one text, no padding, no cache, no mask."""
    text = torch.tensor([encode(prompt) + tokens])
    log_probs: Tensor = model(input_ids=text, use_cache=False).logits[0].log_softmax(-1)
    before = log_probs[len(prompt) - 1 : -1]
    return before.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)


def own_tokens(row: Tensor) -> list[int]:
    """The tokens of one answer ``[T]`` without what fills it up."""
    return row[answer_mask(row).bool()].tolist()


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "likeliest"])
def test_log_probs_of_a_sample_are_those_of_each_text_alone_without_cache_and_padding(
    model: LlamaForCausalLM, drawn: bool
) -> None:
    tokens, log_probs = sample(model, pad_left(PROMPTS), 5, generator() if drawn else None)
    for prompt, row, found in zip(PROMPTS, tokens, log_probs, strict=True):
        mine = own_tokens(row)
        torch.testing.assert_close(found[: len(mine)], plain_log_probs(model, prompt, mine))
        assert not found[len(mine) :].any()
        assert (row[len(mine) :] == PAD).all()


@pytest.mark.parametrize("seed", range(5))
def test_scoring_what_was_sampled_gives_the_same_log_probs(model: LlamaForCausalLM, seed: int) -> None:
    prompts = pad_left(PROMPTS * 8)
    tokens, log_probs = sample(model, prompts, 4, generator(seed))
    mask = answer_mask(tokens)
    with torch.no_grad():
        scored = answer_log_probs(model, prompts, tokens) * mask
    torch.testing.assert_close(scored, log_probs, atol=1e-4, rtol=1e-4)
    assert (tokens == END).any(), "the test needs answers of different lengths"


def test_more_padding_changes_nothing(model: LlamaForCausalLM) -> None:
    prompts, tokens = pad_left(PROMPTS), pad_right(["3", "-2", "12"], 4)
    wider = torch.cat([torch.full((3, 5), PAD), prompts], -1)
    with torch.no_grad():
        torch.testing.assert_close(
            answer_log_probs(model, wider, tokens), answer_log_probs(model, prompts, tokens)
        )
    assert torch.equal(sample(model, wider, 4, None)[0], sample(model, prompts, 4, None)[0])


def test_tokens_are_drawn_as_often_as_the_model_says(model: LlamaForCausalLM) -> None:
    prompts = pad_left(["1+2="] * 4000)
    tokens, _ = sample(model, prompts, 1, generator())
    candidates = torch.arange(VOCABULARY).unsqueeze(-1)
    with torch.no_grad():
        expected = answer_log_probs(model, prompts[:VOCABULARY], candidates).exp().flatten()
    found = tokens.flatten().bincount(minlength=VOCABULARY) / 4000
    assert expected.sum().item() == pytest.approx(1.0, abs=1e-4)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.0)


def test_no_prompts_give_no_answers(model: LlamaForCausalLM) -> None:
    tokens, log_probs = sample(model, pad_left([]), 4, None)
    assert tokens.shape == log_probs.shape == (0, 4)
    assert answer_log_probs(model, pad_left([]), tokens).shape == (0, 4)


def test_a_seed_makes_the_same_model_and_leaves_torch_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (make_model(seed, width=16).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_model_is_as_small_as_it_says() -> None:
    assert sum(p.numel() for p in make_model(0).parameters()) == pytest.approx(0.43e6, rel=0.01)
