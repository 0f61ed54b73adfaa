"""The draw of the next tokens, and its probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.experiments.models.api import GenerationConfig
from unirun.experiments.models.generation import draw

LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
"""Four tokens, from the likeliest on."""

rows = st.lists(st.lists(st.floats(-6, 6, width=32), min_size=5, max_size=5), min_size=1, max_size=3).map(
    torch.tensor
)
hows = st.builds(
    GenerationConfig,
    greedy=st.booleans(),
    temperature=st.floats(0.1, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 7),
)


def chances(count: int, seed: int = 0) -> list[float]:
    drawn: list[float] = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def drawn(
    logits: torch.Tensor, how: GenerationConfig, seed: int = 0, blocked: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same settings in all rows."""
    count = len(logits)
    pairs = [(row, token) for row in range(count) for token in blocked]
    return draw(logits, [how] * count, chances(count, seed), pairs)


def probabilities(logits: torch.Tensor, blocked: Sequence[int] = (), **how: Any) -> dict[int, float]:
    """The probability that `draw` reports, for each token that it has drawn in 2000 draws."""
    tokens, logprobs = drawn(logits.expand(2000, -1), GenerationConfig(**how), 0, blocked)
    return {int(t): float(p.exp()) for t, p in zip(tokens, logprobs, strict=True)}


class TestGreedy:
    @given(rows, st.floats(0.1, 3.0), st.integers(1, 3))
    def test_the_likeliest_token_is_taken_whatever_else_is_said(
        self, logits: torch.Tensor, temperature: float, top_k: int
    ) -> None:
        how = GenerationConfig(greedy=True, temperature=temperature, top_k=top_k, top_p=0.5)
        tokens, logprobs = drawn(logits, how)
        assert torch.equal(tokens, logits.argmax(-1))
        assert torch.equal(logprobs, logits.log_softmax(-1).max(-1).values)


class TestChance:
    @given(rows, hows, st.integers(0, 99))
    def test_equal_seeds_draw_equal_tokens(
        self, logits: torch.Tensor, how: GenerationConfig, seed: int
    ) -> None:
        one, other = (drawn(logits, how, seed) for _ in range(2))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])

    def test_different_seeds_draw_different_tokens(self) -> None:
        many = LOGITS.expand(50, -1)
        one, other = (drawn(many, GenerationConfig(), seed)[0] for seed in (1, 2))
        assert not torch.equal(one, other)

    def test_tokens_are_drawn_as_often_as_they_are_likely(self) -> None:
        tokens, _ = drawn(LOGITS.expand(20_000, -1), GenerationConfig())
        shares = torch.bincount(tokens, minlength=4) / len(tokens)
        torch.testing.assert_close(shares, LOGITS.exp()[0], atol=0.015, rtol=0.0)

    def test_the_probabilities_are_those_of_the_tokens(self) -> None:
        assert probabilities(LOGITS) == pytest.approx({0: 0.5, 1: 0.25, 2: 0.15, 3: 0.1})

    def test_a_lower_temperature_makes_likely_tokens_likelier(self) -> None:
        weights = [math.sqrt(p) for p in (0.5, 0.25, 0.15, 0.1)]
        expected = {token: weight / sum(weights) for token, weight in enumerate(weights)}
        assert probabilities(LOGITS, temperature=2.0) == pytest.approx(expected)

    def test_without_any_temperature_it_is_the_likeliest(self) -> None:
        assert probabilities(LOGITS, temperature=0.0) == pytest.approx({0: 1.0})


class TestTheLikeliest:
    @pytest.mark.parametrize(("top_k", "drawn"), [(1, 1), (2, 2), (3, 3), (4, 4), (99, 4), (0, 4)])
    def test_of_so_many_one_is_drawn(self, top_k: int, drawn: int) -> None:
        mass = [0.5, 0.25, 0.15, 0.1][:drawn]
        expected = {token: each / sum(mass) for token, each in enumerate(mass)}
        assert probabilities(LOGITS, top_k=top_k) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("top_p", "drawn"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.95, 4), (1.0, 4)]
    )
    def test_of_so_much_of_the_mass_one_is_drawn(self, top_p: float, drawn: int) -> None:
        mass = [0.5, 0.25, 0.15, 0.1][:drawn]
        expected = {token: each / sum(mass) for token, each in enumerate(mass)}
        assert probabilities(LOGITS, top_p=top_p) == pytest.approx(expected)

    def test_the_order_of_tokens_does_not_matter(self) -> None:
        order = torch.tensor([2, 0, 3, 1])
        found = probabilities(LOGITS[:, order], top_p=0.76)
        assert found == pytest.approx({0: 0.15 / 0.9, 1: 0.5 / 0.9, 3: 0.25 / 0.9})

    @given(rows, hows, st.integers(0, 99))
    def test_what_is_told_is_the_probability_among_those_that_could_be_drawn(
        self, logits: torch.Tensor, how: GenerationConfig, seed: int
    ) -> None:
        tokens, logprobs = drawn(logits, how, seed)
        assert (logprobs <= 1e-6).all()
        whole = (logits if how.greedy else logits / how.temperature).log_softmax(-1)
        # What cannot be drawn leaves its mass to the others.
        assert (logprobs >= whole.gather(1, tokens[:, None])[:, 0] - 1e-5).all()


@pytest.mark.parametrize(
    "how", [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"temperature": -1.0}, {"n": 0}]
)
def test_settings_from_which_nothing_can_be_drawn_are_refused(how: dict[str, Any]) -> None:
    """Those of other programs may mean something else: a `top_k` of -1 is 0 here."""
    with pytest.raises(UsageError, match=r"top_p above 0 and at most 1, top_k 0 \(from all\) or more"):
        GenerationConfig(**how)


class TestBlocking:
    @given(rows, hows, st.lists(st.integers(0, 4), max_size=4), st.integers(0, 99))
    def test_tokens_that_are_blocked_are_not_drawn(
        self, logits: torch.Tensor, how: GenerationConfig, blocked: list[int], seed: int
    ) -> None:
        tokens, logprobs = drawn(logits, how, seed, blocked)
        assert not {*tokens.tolist()} & {*blocked}
        assert logprobs.isfinite().all()

    def test_the_others_share_its_mass(self) -> None:
        assert probabilities(LOGITS, blocked=[0]) == pytest.approx({1: 0.5, 2: 0.3, 3: 0.2})

    def test_the_logits_that_are_given_stay(self) -> None:
        before = LOGITS.clone()
        drawn(LOGITS, GenerationConfig(top_k=1, top_p=0.5, temperature=0.5), 0, [0])
        assert torch.equal(LOGITS, before)


class TestRowsOfDifferentSettings:
    @given(st.lists(hows, min_size=1, max_size=4), rows, st.integers(0, 99))
    def test_each_row_is_drawn_as_if_it_were_alone(
        self, settings: list[GenerationConfig], logits: torch.Tensor, seed: int
    ) -> None:
        many = logits[:1].expand(len(settings), -1)
        numbers = chances(len(settings), seed)
        tokens, logprobs = draw(many, settings, numbers)
        for row, (how, number) in enumerate(zip(settings, numbers, strict=True)):
            token, logprob = draw(logits[:1], [how], [number])
            assert int(token) == int(tokens[row])
            torch.testing.assert_close(logprob[0], logprobs[row])

    @pytest.mark.parametrize("chance", [0.0, 1.0 - 2**-53, 0.5])
    def test_the_ends_of_the_numbers_draw_what_can_be_drawn(self, chance: float) -> None:
        logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
        token, logprob = draw(logits, [GenerationConfig()], [chance])
        assert int(token) in (1, 3)
        assert float(logprob) == pytest.approx(math.log(0.5))
