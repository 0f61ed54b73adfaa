"""Characters to tokens and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizer import ALPHABET, END, PAD, VOCABULARY, answer_mask, decode, encode, pad_left, pad_right

texts = st.text(ALPHABET, max_size=12)


@given(text=texts)
def test_a_text_that_is_encoded_and_closed_is_decoded_to_itself(text: str) -> None:
    assert decode([*encode(text), END]) == text


@given(text=texts, rest=st.lists(st.integers(0, VOCABULARY - 1)))
def test_what_comes_after_the_end_is_not_read(text: str, rest: list[int]) -> None:
    assert decode([*encode(text), END, *rest]) == text


@given(text=texts)
def test_an_answer_that_was_cut_off_is_none(text: str) -> None:
    assert decode(encode(text)) is None


def test_an_answer_with_a_hole_is_none() -> None:
    assert decode([*encode("1"), PAD, *encode("2"), END]) is None


def test_a_character_outside_the_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="substring"):
        encode("2*3=")


@given(prompts=st.lists(texts, max_size=5))
def test_prompts_end_in_the_same_column(prompts: list[str]) -> None:
    ids = pad_left(prompts)
    assert ids.shape == (len(prompts), max(map(len, prompts), default=0))
    for row, prompt in zip(ids.tolist(), prompts, strict=True):
        assert row == [PAD] * (len(row) - len(prompt)) + encode(prompt)


@given(answers=st.lists(texts, max_size=5))
def test_answers_start_in_the_same_column_and_their_mask_ends_with_them(answers: list[str]) -> None:
    ids = pad_right(answers, width=13)
    assert ids.shape == (len(answers), 13)
    assert [decode(row) for row in ids.tolist()] == answers
    assert answer_mask(ids).sum(-1).tolist() == [len(answer) + 1 for answer in answers]


def test_an_answer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes 4 tokens .* room for 3"):
        pad_right(["123"], width=3)


def test_the_mask_of_an_answer_that_was_cut_off_is_all_ones() -> None:
    assert answer_mask(torch.tensor([encode("123")])).tolist() == [[1.0, 1.0, 1.0]]
