"""An id can be made of every name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.spec.read import id_stem, is_run_id


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
