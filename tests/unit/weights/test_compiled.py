"""Names of tensors in models that torch.compile has compiled, as a whole or in part."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from unirun.errors import UsageError
from unirun.weights.tensors import by_original_name, original_name


def test_names_of_compiled_parts_in_a_compiled_model_are_those_of_the_model() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    parts = model()
    parts[1] = cast("nn.Module", torch.compile(parts[1]))
    compiled = cast("nn.Module", torch.compile(parts))
    assert "_orig_mod.1._orig_mod.0.weight" in compiled.state_dict()
    assert list(by_original_name(compiled.state_dict())) == list(model().state_dict())


@pytest.mark.parametrize("name", ["weight", "my_orig_mod.weight", "layers.0._orig_mod_.weight", ""])
def test_other_names_stay_as_they_are(name: str) -> None:
    assert original_name(name) == name


def test_two_tensors_that_would_get_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"two tensors are called a\.weight"):
        by_original_name({"a._orig_mod.weight": 1, "a.weight": 2})
