"""`trainer_invocation`: what can be said of a method, and what is refused when the class is defined."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from unirun.errors import UsageError
from unirun.roles import BaseWorkload, trainer_invocation
from unirun.roles.calls.policy import (
    ASYNC_TIMEOUT,
    DEFAULT,
    IDEMPOTENT_RETRIES,
    Invocation,
    invocations,
    with_options,
)


def options_of(**options: Any) -> Invocation:
    """The options of a method that is decorated with these."""

    class Desk:
        @trainer_invocation(**options)
        def work(self) -> None:
            """Works."""

    return invocations(Desk())["work"]


def test_a_method_without_a_decorator_is_called_by_default() -> None:
    class Desk:
        def plain(self) -> None:
            """Plain."""

        @trainer_invocation
        def bare(self) -> None:
            """With the bare decorator."""

        @trainer_invocation()
        def empty(self) -> None:
            """With an empty one."""

    assert invocations(Desk()) == {"plain": DEFAULT, "bare": DEFAULT, "empty": DEFAULT}
    assert Invocation(blocking=True, target="ALL", auto_shard=True, timeout=None, retries=0) == DEFAULT


def test_the_method_itself_is_left_as_it_is() -> None:
    def work(self: object, value: int) -> int:
        """Works."""
        return value + 1

    decorated = trainer_invocation(target="ANY")(work)
    assert decorated is work
    assert decorated(None, 1) == 2


def test_every_option_is_kept() -> None:
    def before(x: int) -> int:
        return x

    options = options_of(
        blocking=False,
        timeout=3,
        target=[2, 0],
        auto_shard=False,
        pre_func=before,
        post_func=before,
        concurrency=4,
    )
    assert options == Invocation(
        blocking=False,
        timeout=3,
        target=[2, 0],
        auto_shard=False,
        pre_func=before,
        post_func=before,
        concurrency=4,
    )


def test_waiting_as_the_guide_says_has_the_guide_s_deadline() -> None:
    assert options_of(is_async=True).timeout == ASYNC_TIMEOUT == 10
    assert options_of(is_async=True, timeout=30).timeout == 30


def test_idempotent_methods_are_called_again_three_times_unless_told() -> None:
    assert options_of(idempotent=True).retries == 3
    assert options_of(idempotent=True, retries=0).retries == 0
    assert options_of(idempotent=True, retries=7).retries == 7


@pytest.mark.parametrize(
    ("target", "one"),
    [("ALL", False), ("RANK0", True), ("ANY", True), (2, True), ([2], False), ((0, 1), False)],
)
def test_who_is_called_alone_returns_a_bare_result(target: Any, one: bool) -> None:
    assert options_of(target=target).one is one


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocking", 1),
        ("blocking", None),
        ("is_async", "yes"),
        ("auto_shard", 0),
        ("idempotent", "no"),
        ("timeout", 0),
        ("timeout", -1.5),
        ("timeout", "10"),
        ("timeout", True),
        ("timeout", math.inf),
        ("timeout", math.nan),
        ("target", "ALLE"),
        ("target", "all"),
        ("target", -1),
        ("target", True),
        ("target", None),
        ("target", []),
        ("target", [0, 0]),
        ("target", [0, -1]),
        ("target", [0, "1"]),
        ("target", {0, 1}),
        ("pre_func", "f"),
        ("post_func", 3),
        ("concurrency", 0),
        ("concurrency", 1.5),
        ("concurrency", True),
        ("retries", -1),
        ("retries", "3"),
    ],
)
def test_a_wrong_value_is_told_with_its_option(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"@trainer_invocation: {name}=.*; give ") as caught:
        options_of(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [1, 2, 64])
def test_every_number_of_calls_at_a_time_is_taken(value: int) -> None:
    assert options_of(concurrency=value).concurrency == value


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("pre_function", "pre_func"),
        ("post_function", "post_func"),
        ("timeouts", "timeout"),
        ("async_", "is_async"),
    ],
)
def test_an_option_that_there_is_not_is_told_with_the_one_that_was_meant(wrong: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"has no option {wrong}; did you mean {near}"):
        options_of(**{wrong: None})


def test_an_option_that_is_like_none_is_told_with_all_there_are() -> None:
    with pytest.raises(UsageError, match="has no option xyz; there are blocking, is_async, timeout, "):
        options_of(xyz=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_async": True, "blocking": False}, "is_async waits for results, blocking=False does not"),
        ({"retries": 2}, "retries would run the method again; add idempotent=True"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options_of(**options)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: trainer_invocation(3),  # type: ignore[call-overload]
        lambda: trainer_invocation(print, target="ALL"),  # type: ignore[call-overload]
    ],
)
def test_only_methods_are_decorated(wrong: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        wrong()


class TestWhatCanBeCalled:
    def test_public_methods_and_nothing_else(self) -> None:
        class Desk(BaseWorkload):
            limit = 3
            factory = dict

            class Settings:
                """Is no method."""

            @property
            def state(self) -> int:
                """Is none either."""
                return 1

            def setup(self) -> None:
                """Belongs to every workload."""

            def work(self) -> None:
                """Can be called."""

            def _help(self) -> None:
                """Is private."""

            async def later(self) -> None:
                """Can be called."""

        assert set(invocations(Desk.__new__(Desk))) == {"work", "later", "sync_weights"}

    def test_methods_that_are_inherited(self) -> None:
        class Base:
            @trainer_invocation(target="RANK0")
            def work(self) -> None:
                """Works."""

        class Desk(Base):
            pass

        assert invocations(Desk())["work"].target == "RANK0"

    def test_static_and_class_methods_whichever_decorator_comes_first(self) -> None:
        class Desk:
            @trainer_invocation(target=0)  # type: ignore[arg-type]
            @staticmethod
            def outside() -> None:
                """Decorated outside."""

            @staticmethod
            @trainer_invocation(target=1)  # type: ignore[arg-type]
            def inside() -> None:
                """Decorated inside."""

            @trainer_invocation(target=2)
            @classmethod
            def of_class(cls) -> None:
                """A class method."""

        assert {name: options.target for name, options in invocations(Desk()).items()} == {
            "outside": 0,
            "inside": 1,
            "of_class": 2,
        }

    def test_nothing_is_run_to_find_out(self) -> None:
        class Desk:
            @property
            def trap(self) -> int:
                """Must not be looked at."""
                raise AssertionError("it was looked at")

            def __getattr__(self, name: str) -> int:
                raise AssertionError(name)

            def work(self) -> None:
                """Works."""

        assert set(invocations(Desk())) == {"work"}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("blocking", "True or False"),
        ("timeout", "seconds above 0"),
        ("target", "'ALL', 'RANK0', 'ANY', a rank or a list of different ranks"),
        ("pre_func", "a function"),
        ("post_func", "a function"),
        ("concurrency", "a whole number from 1"),
        ("retries", "a whole number"),
    ],
)
def test_a_wrong_value_is_told_with_what_to_give(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"@trainer_invocation: {name}='f'; give {what}$"):
        options_of(**{name: "f"})


class TestOptionsOfOneCall:
    def test_replace_those_of_the_method(self) -> None:
        policy = options_of(timeout=3.0, target="RANK0", concurrency=2)
        changed = with_options(policy, "actor.work", {"timeout": 5.0})
        assert (changed.timeout, changed.target, changed.concurrency) == (5.0, "RANK0", 2)

    def test_retries_follow_from_idempotent_as_in_the_decorator(self) -> None:
        again = with_options(DEFAULT, "actor.work", {"idempotent": True})
        assert again.retries == IDEMPOTENT_RETRIES
        assert with_options(again, "actor.work", {"retries": 1}).retries == 1
        assert with_options(again, "actor.work", {"idempotent": False}).retries == 0
        assert with_options(options_of(idempotent=True, retries=7), "a.b", {"timeout": 1.0}).retries == 7

    def test_contradictions_are_refused_by_the_name_of_the_method(self) -> None:
        with pytest.raises(UsageError, match="actor.work.options: retries would run the method again; add"):
            with_options(DEFAULT, "actor.work", {"retries": 2})

    @pytest.mark.parametrize("name", ["blocking", "is_async", "concurrency"])
    def test_what_a_single_call_cannot_change_is_no_option(self, name: str) -> None:
        with pytest.raises(UsageError, match=f"actor.work.options has no option {name}; there are timeout, "):
            with_options(DEFAULT, "actor.work", {name: True})
