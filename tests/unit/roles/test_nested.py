"""The elements of lists, tuples and dicts are changed, and the containers keep their types."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

from unirun.roles.nested import mapped


class Pair(NamedTuple):
    first: Any
    second: Any


class Items(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Named(OrderedDict[str, Any]):
    """Has a name beside its items."""

    name = ""


class Fresh(UserDict[int, Any]):
    """Makes its items when they are asked for."""

    def items(self) -> Any:
        return [(key, [value]) for key, value in self.data.items()]


class Frozen(dict[str, Any]):
    """Cannot be changed, so it is its own copy."""

    def __copy__(self) -> Frozen:
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError


class Many(list[Any]):
    """A list of its own."""


def doubled(value: Any) -> Any:
    return value * 2 if isinstance(value, int) else value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 2),
        ([1, (2, {"a": 3})], [2, (4, {"a": 6})]),
        ((), ()),
        (Pair(1, [2]), Pair(2, [4])),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
        (UserDict({"a": 1}), UserDict({"a": 2})),
        (Many([1, 2]), Many([2, 4])),
        (torch.Size([3]), torch.Size([3])),
        ({1, 2}, {1, 2}),
        ("text", "text"),
    ],
    ids=repr,
)
def test_leaves_are_changed_and_types_stay(value: Any, expected: Any) -> None:
    found = mapped(doubled, value)
    assert found == expected
    assert type(found) is type(expected)


def test_containers_are_new_and_those_that_were_given_stay_as_they_are() -> None:
    value = {"a": [1]}
    found = mapped(lambda each: each, value)
    assert found == value
    assert found is not value
    assert found["a"] is not value["a"]
    mapped(doubled, value)
    assert value == {"a": [1]}


def test_a_dict_has_its_attributes_afterwards_too() -> None:
    named = Named(a=1)
    named.name = "mine"
    found = mapped(doubled, named)
    assert (found, found.name) == ({"a": 2}, "mine")
    items = mapped(doubled, Items(a=1))
    assert (items["a"], items.a) == (2, 2)
    counts = mapped(doubled, defaultdict(list, a=1))
    assert (counts["a"], counts["b"]) == (2, [])


def test_what_torch_returns_as_a_named_tuple_stays_one() -> None:
    found = mapped(lambda tensor: tensor + 1, torch.tensor([1, 5]).max(dim=0))
    assert (found.values.item(), found.indices.item()) == (6, 2)


def test_a_dict_that_cannot_be_changed_is_a_leaf() -> None:
    frozen = Frozen(a=1)
    assert mapped(doubled, [frozen])[0] is frozen


def test_what_is_told_to_be_a_leaf_is_one() -> None:
    assert mapped(len, {"a": [1, 1, 1]}, lambda value: isinstance(value, list)) == {"a": 3}


def test_a_list_in_itself_ends_and_one_that_occurs_twice_does_afterwards() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    found = mapped(doubled, [circle, circle])
    assert found[0][0] == 2
    assert found[0] is found[1] is found[0][1] is not circle


def test_containers_that_are_made_meanwhile_are_not_taken_for_others() -> None:
    """They are gone in a moment, and others have their identities."""
    numbers = [[*range(each, each + each % 4)] for each in range(50)]
    found = mapped(lambda leaf: leaf, [Fresh(dict(enumerate(some))) for some in numbers])
    assert [each.data for each in found] == [{at: [n] for at, n in enumerate(some)} for some in numbers]
