"""Answers of vLLM and SGLang, and their words about faults."""

from __future__ import annotations

from typing import Any

import pytest

from unirun.rollout.choosing import MAX_SHOWN, Span, answered, fault, is_aborted
from unirun.values import WorkerId

ENGINE = WorkerId("engine", 1, 3)


def test_vllm_tells_the_version_of_each_token() -> None:
    spans = [{"version": "4", "start": 0, "end": 7}, {"version": "5", "start": 7, "end": 9, "more": True}]
    answer = answered({"choices": [{"token_ids": [1], "weight_versions": spans}]}, ENGINE)
    assert (answer.engine, answer.version) == (ENGINE, "4")
    assert answer.spans == (Span("4", 0, 7), Span("5", 7, 9))


@pytest.mark.parametrize(
    "body", [{"choices": [{}], "metadata": {"weight_version": 12}}, {"metadata": {"weight_version": "12"}}]
)
def test_sglang_tells_one_version(body: dict[str, Any]) -> None:
    answer = answered(body, ENGINE)
    assert (answer.engine, answer.version, answer.spans) == (ENGINE, "12", ())


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"weight_versions": None}]}, {"metadata": None}]
)
def test_an_answer_without_a_version_has_none(body: dict[str, Any]) -> None:
    assert answered(body, ENGINE).version is None


def test_an_answer_is_aborted_if_one_of_its_outputs_is() -> None:
    assert is_aborted({"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]})
    assert not is_aborted({"choices": [{"finish_reason": "stop"}, {}]})
    assert not is_aborted({"data": []})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "too long"),
        ('{"detail": "Not Found"}', "Not Found"),
        ('{"message": "no"}', "no"),
        ('{"detail": [{"loc": 1}]}', '{"detail": [{"loc": 1}]}'),
        ('{"other": 1}', '{"other": 1}'),
        ("Internal Server Error", "Internal Server Error"),
        ("x" * 3 * MAX_SHOWN, "x" * MAX_SHOWN),
    ],
)
def test_an_error_has_the_words_of_the_server(words: str, expected: str) -> None:
    assert fault(words) == expected
