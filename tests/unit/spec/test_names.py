"""An id can be made of every name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.spec.read import clipped, id_stem, is_run_id, printable


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("train", "train"),
        ("my train é", "my-train"),
        ("modèle v2", "mod-le-v2"),
        ("训练", "job"),
        ("my script.v2", "my-script-v2"),
        ("--x--", "x"),
        ("a" * 39 + "-b", "a" * 39),
        ("", "job"),
    ],
)
def test_characters_not_allowed_in_an_id_become_a_dash(name: str, stem: str) -> None:
    assert id_stem(name) == stem


@given(st.text())
def test_every_job_name_gives_a_valid_id(name: str) -> None:
    assert is_run_id(f"{id_stem(name)}-0a1b2c")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two words", "two words"),
        ("größer 中\u3000x", "größer 中\u3000x"),
        ("\x1b[31m\u202ered", "\\x1b[31m\\u202ered"),
        ("a\tb\nc", "a\\tb\\nc"),
        ("\ud800", "\\ud800"),
    ],
)
def test_text_of_others_is_shown_without_what_a_terminal_obeys(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable("a\tb\x1b", keep="\t") == "a\tb\\x1b"


@pytest.mark.parametrize(("most", "text"), [(3, "abc"), (4, "abc"), (2, "a…"), (1, "…")])
def test_a_long_text_ends_with_an_ellipsis_within_its_length(most: int, text: str) -> None:
    assert clipped("abc", most) == text
