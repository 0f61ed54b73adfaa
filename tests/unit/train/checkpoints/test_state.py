"""The state that a user saves is copied at once, and models and optimizers in it stand for their states."""

from __future__ import annotations

import errno
import io
import os
import threading
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from unirun.errors import UsageError
from unirun.train.checkpoints.state import encode, listed, outline, plain_state, snapshot


class Pair(NamedTuple):
    first: Any
    second: Any


class Losses:
    """A user's object."""

    def __init__(self, *losses: Any) -> None:
        self.losses = [*losses]

    def __repr__(self) -> str:
        return f"Losses{self.losses}"


def fill(array: Any) -> None:
    array.fill(7)


CHANGES: list[tuple[Any, Callable[[Any], Any]]] = [
    (numpy.zeros(2), fill),
    (deque([1]), lambda value: value.append(2)),
    ({1}, lambda value: value.add(2)),
    (bytearray(b"a"), lambda value: value.extend(b"b")),
    (Losses(1), lambda value: value.losses.append(2)),
    (Pair([1], 2), lambda value: value.first.append(2)),
    (OrderedDict(a=[1]), lambda value: value["a"].append(2)),
    ((Losses(1),), lambda value: value[0].losses.append(2)),
    (torch.zeros(2), lambda value: value.fill_(7)),
    (torch.zeros(2).numpy(), fill),
]


@pytest.mark.parametrize(("value", "change"), CHANGES, ids=lambda value: type(value).__name__)
def test_what_changes_later_is_not_in_the_copy(value: Any, change: Callable[[Any], Any]) -> None:
    copied, before = snapshot({"deep": [value]})["deep"][0], repr(value)
    change(value)
    assert repr(copied) == before != repr(value)
    assert type(copied) is type(value)


@pytest.mark.parametrize("value", ["text", 3, None, torch.float32, nn.Linear, len, b"bytes"])
def test_what_cannot_change_is_not_copied(value: Any) -> None:
    assert snapshot([value])[0] is value


def test_a_tensor_is_copied_once_and_without_its_graph() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    copied = snapshot((tensor,))[0]
    assert copied.tolist() == [2.0, 2.0]
    assert not copied.requires_grad


def test_an_object_with_a_tensor_that_was_computed_is_copied_too() -> None:
    losses = Losses(torch.ones(1, requires_grad=True) * 2)
    copied = snapshot(losses)
    losses.losses.clear()
    assert [loss.tolist() for loss in copied.losses] == [[2.0]]


def test_an_object_that_cannot_be_pickled_is_told() -> None:
    parts = [("lock", threading.Lock()), ("nested", {"a": [1, threading.Lock()]})]
    for (name, part), found in zip(parts, ("lock", r"nested\['a'\]\[1\]"), strict=True):
        with pytest.raises(UsageError, match=f"^{found} cannot be saved: TypeError: cannot pickle"):
            snapshot({"epoch": 1, name: part})
        with pytest.raises(UsageError, match=f"^{found} cannot be saved: TypeError: cannot pickle"):
            encode({"epoch": 1, name: part}, io.BytesIO())


@pytest.mark.parametrize("back", [False, True], ids=["the lock first", "the way back first"])
def test_the_search_for_what_cannot_be_pickled_ends_in_a_circle(back: bool) -> None:
    circle: dict[str, Any] = {"around": {}}
    parts = [("lock", threading.Lock()), ("circle", circle)]
    circle["around"] |= parts[::-1] if back else parts
    with pytest.raises(UsageError, match=r"^around\['lock'\] cannot be saved: "):
        encode(circle, io.BytesIO())


def test_a_part_that_only_leads_back_is_not_what_cannot_be_pickled() -> None:
    state: dict[str, Any] = {"model": [], "pair": (), "lock": threading.Lock()}
    state["model"].append(state)
    state["pair"] = ({"again": state["model"]},)
    with pytest.raises(UsageError, match="^lock cannot be saved: "):
        encode(state, io.BytesIO())


def test_models_and_optimizers_are_their_states_wherever_they_are() -> None:
    models = [nn.Linear(1, 1), nn.Linear(2, 1)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.5)
    found = plain_state(
        {
            "models": models,
            "pair": Pair(models[0], 1),
            "deep": {"a": (optimizer,), "b": OrderedDict(c=models[1])},
            "kinds": [nn.Linear, torch.optim.SGD],
            "view": MappingProxyType({"net": models[0]}),
        }
    )
    assert [{*each} for each in found["models"]] == [{"weight", "bias"}] * 2
    assert found["models"][1]["weight"].shape == (1, 2)
    assert (
        {*found["pair"].first} == {*found["deep"]["b"]["c"]} == {*found["view"]["net"]} == {"weight", "bias"}
    )
    assert found["pair"].second == 1
    assert found["deep"]["a"][0]["param_groups"][0]["lr"] == 0.5
    assert found["kinds"] == [nn.Linear, torch.optim.SGD]


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    copied = snapshot(plain_state({"model": nn.BatchNorm1d(1)}))["model"]
    assert type(copied) is OrderedDict
    assert vars(copied) == {"_metadata": {"": {"version": 2}}}


def test_tuples_with_tensors_or_states_are_lists_for_distributed_checkpoints() -> None:
    tensor = torch.zeros(1)
    state = {"models": ({"w": 1},), "betas": (0.9, [1]), "list": [(tensor, (1, 2))]}
    assert listed(state) == {"models": [{"w": 1}], "betas": (0.9, [1]), "list": [[tensor, (1, 2)]]}


class TestOutlines:
    """Two ranks compare what they save."""

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"a": 1, "b": 2.5}, {"b": 2.5, "a": 1}),
            (nn.Linear(9, 9).state_dict(), nn.Linear(9, 9).state_dict()),
            ([1, "x", None, float("nan")], [1, "x", None, float("nan")]),
            (torch.zeros(100_000), torch.ones(100_000)),
            (torch.arange(3), torch.arange(3)),
            (threading.Event(), threading.Event()),
            (numpy.array([{"a": 1}, "b"]), numpy.array([{"a": 1}, "b"])),
        ],
        ids=["order", "weights", "values", "large tensors", "small tensors", "objects", "array of objects"],
    )
    def test_they_are_alike(self, one: Any, other: Any) -> None:
        assert outline({"it": one}) == outline({"it": other})

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (1, 2),
            ("\ud800", "\udfff"),
            ({"a": 1}, {"a": 1, "b": 1}),
            (nn.Linear(9, 9).state_dict(), nn.Linear(9, 8).state_dict()),
            (torch.get_rng_state(), torch.get_rng_state() + 1),
            (torch.tensor(1.0), torch.tensor(2.0)),
            (torch.zeros(4, 2).t(), torch.ones(4, 2).t()),
            (numpy.arange(3), numpy.arange(3) + 1),
            ([1, [2]], [1, [3]]),
        ],
        ids=range(9),
    )
    def test_they_differ(self, one: Any, other: Any) -> None:
        assert outline({"it": one, "same": 1})["it"] != outline({"it": other, "same": 1})["it"]


def test_the_conjugate_and_the_negative_of_a_tensor_are_compared_and_saved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    views = {"conjugate": value.conj(), "negative": value.conj().imag}
    assert views["conjugate"].is_conj()
    assert views["negative"].is_neg()
    plain = {name: each.resolve_conj().resolve_neg() for name, each in views.items()}
    assert outline(views) == outline(plain)
    assert outline(views)["conjugate"] != outline({"conjugate": value})["conjugate"]
    file = io.BytesIO()
    encode(snapshot(views), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert all(torch.equal(saved[name], each) for name, each in plain.items())


class TestEncode:
    def test_a_state_is_not_in_memory_as_bytes_too(self) -> None:
        state = {"model": {"weight": torch.zeros(5 << 20)}}
        encode({"epoch": 1}, os.devnull)
        tracemalloc.start()
        try:
            with open(os.devnull, "wb") as file:
                encode(state, file)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20

    @pytest.mark.parametrize("fine", [0, 1, 3])
    def test_a_write_that_fails_is_what_is_told(self, fine: int) -> None:
        class Full(io.BytesIO):
            """A disk that is full after some writes, and has no buffer that fails again at the end."""

            left = fine

            def write(self, data: Any) -> int:
                self.left -= 1
                if self.left == -1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(data)

        with pytest.raises(OSError, match="No space left on device"):
            encode({"model": {"weight": torch.zeros(1000)}}, Full())
