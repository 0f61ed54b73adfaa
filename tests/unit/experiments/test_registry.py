"""Registries: each name is used once, and the error about an unknown name shows the known ones."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator

import pytest
from torch.utils.data import IterableDataset

from unirun.errors import UsageError
from unirun.experiments.config import BACKENDS, DATASETS, MODELS, Registry, register_dataset
from unirun.experiments.datasets import PromptDataset
from unirun.experiments.experiment import make_experiment


class Cat:
    """A thing."""


class Dog:
    """Another thing."""


@pytest.fixture
def animals() -> Registry[type]:
    found: Registry[type] = Registry("animal")
    found.register("dog", Dog)
    found.register("cat", Cat)
    return found


class TestNames:
    def test_a_thing_is_found_by_its_name(self, animals: Registry[type]) -> None:
        assert (animals.find("cat"), animals.find("dog")) == (Cat, Dog)

    def test_names_are_sorted(self, animals: Registry[type]) -> None:
        assert animals.names() == ["cat", "dog"]
        assert "cat" in animals
        assert "cow" not in animals

    def test_one_that_is_not_there_is_told_with_those_that_are(self, animals: Registry[type]) -> None:
        with pytest.raises(UsageError, match="no animal is registered as 'zebra'; there are: cat, dog"):
            animals.find("zebra")

    def test_one_that_is_nearly_right_is_told(self, animals: Registry[type]) -> None:
        with pytest.raises(UsageError, match="did you mean 'cat'?"):
            animals.find("cats")

    def test_without_any_there_are_none(self) -> None:
        with pytest.raises(
            UsageError, match="there are none: a file of experiments/, or of --module, calls register_"
        ):
            Registry("animal").find("cat")


class TestNamesThatAreUsedTwice:
    def test_another_thing_is_refused_and_the_first_one_stays(self, animals: Registry[type]) -> None:
        with pytest.raises(UsageError, match=rf"animal 'cat' is registered already, as {__name__}.Cat"):
            animals.register("cat", Dog)
        assert animals.find("cat") is Cat

    def test_the_same_thing_may_be_registered_again(self, animals: Registry[type]) -> None:
        animals.register("cat", Cat)
        animals.register("cat", f"{__name__}:Cat")
        assert animals.find("cat") is Cat
        with pytest.raises(UsageError, match="is registered already"):
            animals.register("cat", f"{__name__}:Dog")

    def test_a_module_that_is_imported_under_two_names_registers_its_things_twice(
        self, animals: Registry[type], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        main = types.ModuleType("another_main")
        main.__file__ = __file__
        monkeypatch.setitem(sys.modules, "another_main", main)
        twin = type("Cat", (), {"__module__": "another_main"})
        animals.register("cat", twin)
        with pytest.raises(UsageError, match="registered already"):
            animals.register("dog", twin)


class TestThingsThatAreImportedLater:
    def test_they_are_imported_when_they_are_needed(self, animals: Registry[type]) -> None:
        animals.register("fraction", "fractions:Fraction")
        from fractions import Fraction

        assert "fraction" in animals
        assert animals.find("fraction") is animals.find("fraction") is Fraction

    def test_a_module_that_is_not_there_is_told_when_it_is_needed(self, animals: Registry[type]) -> None:
        animals.register("cow", "no_such_module:Cow")
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            animals.find("cow")

    def test_models_and_backends_are_there_from_the_beginning(self) -> None:
        assert {"ddp", "fsdp2", "inference", "null"} <= {*BACKENDS.names()}
        assert {"causal_lm", "null"} <= {*MODELS.names()}
        assert DATASETS.find("prompt") is PromptDataset
        assert {"prompt", "prompt_answer", "rw_pair"} <= {*DATASETS.names()}


class TestDatasets:
    @pytest.mark.parametrize("keys", [None, "prompt", ["prompt"]])
    def test_one_that_does_not_say_which_keys_it_has_is_refused(self, keys: object) -> None:
        with pytest.raises(UsageError, match="dataset 'tests-keyless' does not say which keys it has"):
            register_dataset("tests-keyless", type("Keyless", (), {"keys": keys}))
        assert "tests-keyless" not in DATASETS

    def test_one_that_can_only_be_iterated_over_is_refused(self) -> None:
        class Stream(IterableDataset[int]):
            keys = ("prompt",)

            def __iter__(self) -> Iterator[int]:
                return iter((1, 2))

        with pytest.raises(UsageError, match="dataset 'tests-stream' can only be iterated over"):
            register_dataset("tests-stream", Stream)
        assert "tests-stream" not in DATASETS


def test_an_experiment_that_is_not_registered_is_told() -> None:
    with pytest.raises(UsageError, match="no experiment is registered as 'tests-nothing'"):
        make_experiment("tests-nothing")


def test_what_is_not_imported_yet_is_not_at_hand() -> None:
    registry: Registry[object] = Registry("thing")
    registry.register("number", 3)
    registry.register("slow", "math:pi")
    assert (registry.at_hand("number"), registry.at_hand("slow"), registry.at_hand("other")) == (
        3,
        None,
        None,
    )
    registry.find("slow")
    assert registry.at_hand("slow") == math.pi
