"""Any value becomes strict JSON, or a number, or a text, and nothing raises."""

from __future__ import annotations

import decimal
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from omegaconf import OmegaConf

from tests.unit.train.callbacks.strategies import RESULTS, VALUES, Hostile
from unirun.train.callbacks.base import flat, json_of, number, numbers, plain, readable


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def strict(line: str) -> Any:
    """The value of `line`, as a reader has it that knows only the standard: UTF-8, no NaN, no number over a double."""
    value = json.loads(line.encode("ascii"), parse_constant=refuse, parse_int=float)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return value


@given(VALUES)
def test_any_value_becomes_strict_json_of_one_line(value: object) -> None:
    line = json_of(value)
    strict(line)
    assert "\n" not in line


@given(VALUES)
def test_what_is_plain_stays_as_it_is(value: object) -> None:
    once = plain(value)
    assert plain(once) == once
    assert json.loads(json_of(value)) == once


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.empty(1, device="meta"), "tensor(..., device='meta', size=(1,))"),
        (np.float32(0.5), 0.5),
        (np.longdouble("0.5"), 0.5),
        (np.bool_(True), True),
        (np.array([math.nan, math.inf, 1.0]), [None, None, 1.0]),
        (-math.inf, None),
        (Path("/data"), "/data"),
        (decimal.Decimal("0.25"), 0.25),
        (decimal.Decimal("Infinity"), None),
        (2**1023 - 1, 2**1023 - 1),
        (2**1023, f"0x8{'0' * 255}"),
        ({1: (2, 3), None: {"b", "a"}}, {"1": [2, 3], "None": ["a", "b"]}),
        (b"raw", "b'raw'"),
        ("\ud800", "\\ud800"),
        (Hostile(), "<Hostile>"),
    ],
)
def test_values_of_libraries_become_those_of_json(value: object, expected: object) -> None:
    got = plain(value)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "nan"),
        (torch.tensor(-math.inf), "-inf"),
        (decimal.Decimal("NaN"), "nan"),
        (np.array([math.inf, 1.0]), [None, 1.0]),
        (None, None),
        ("nan", "nan"),
        (0.5, 0.5),
    ],
)
def test_outside_of_json_a_figure_that_is_not_finite_is_a_text(value: object, expected: object) -> None:
    assert readable(value) == expected


def test_an_int_with_too_many_digits_for_python_is_a_text() -> None:
    assert json_of([1 << 20_000]) == f'["0x1{"0" * 5000}"]'


def test_circles_and_depths_end_as_texts() -> None:
    circle: dict[str, Any] = {"loss": 1.0}
    circle["itself"], circle["list"] = circle, [circle]
    assert strict(json_of(circle))["loss"] == 1.0
    assert flat(circle)["loss"] == 1.0
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    strict(json_of({"deep": deep}))
    same = [1]
    assert plain([same, same]) == [[1], [1]]


def test_metrics_in_dicts_have_names_with_slashes() -> None:
    result = {"loss": 1, "val": {"acc": 2, "top": {5: 3}}, "list": [{"a": 1}], "nothing": {}}
    assert flat(result) == {"loss": 1, "val/acc": 2, "val/top/5": 3, "list": [{"a": 1}]}


def test_a_config_of_omegaconf_is_flat_and_plain_even_with_a_value_missing() -> None:
    config = OmegaConf.create({"model": {"lr": 1, "layers": [1, 2]}, "broken": {"x": "${nowhere}"}})
    assert flat(config)["model/lr"] == 1
    got = plain(config)
    assert isinstance(got, dict)
    assert got["model"] == {"lr": 1, "layers": [1, 2]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (True, 1),
        (0.5, 0.5),
        (torch.tensor(3), 3),
        (torch.tensor([[0.5]]), 0.5),
        (np.array([2.0]), 2.0),
        (np.longdouble(0.5), 0.5),
        (decimal.Decimal("0.5"), 0.5),
        (math.inf, math.inf),
        (10**400, None),
        (torch.ones(2), None),
        (torch.tensor(1j), None),
        (1j, None),
        ("1", None),
        (None, None),
        ([1], None),
        ({}, None),
        (Hostile(), None),
    ],
)
def test_a_number_is_one_of_any_library_and_nothing_else(value: object, expected: float | None) -> None:
    got = number(value)
    assert got == expected
    assert type(got) is type(expected)


@given(RESULTS)
def test_the_numbers_of_any_result_are_numbers(result: dict[Any, Any]) -> None:
    for name, value in numbers(result).items():
        assert type(name) is str
        assert type(value) in (int, float)
        float(value)
