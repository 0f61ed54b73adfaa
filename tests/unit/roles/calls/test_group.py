"""Role groups: indexing, calling and what they say of themselves."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import pytest

from tests.unit.roles.calls.conftest import Serve
from unirun.errors import EncodingError, InvocationTimeout, UsageError
from unirun.roles import InvocationRef, RoleGroup, WorkerHandle, shard, trainer_invocation


def clipped(value: int) -> int:
    """A `pre_func` as in the guide: it takes the arguments and returns one."""
    return max(value, 0)


def total(results: list[int]) -> int:
    """A `post_func`."""
    return sum(results)


class Workload:
    """The class that is called."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.gate = threading.Event()

    def mine(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """The rank that was called, and its arguments."""
        return self._rank, args, kwargs

    @trainer_invocation(concurrency=2)
    def mine_beside(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """The same in a thread."""
        return self._rank, args, kwargs

    async def mine_meanwhile(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        """The same in an event loop."""
        return self._rank, args, kwargs

    @trainer_invocation(blocking=False)
    def later(self, value: int) -> int:
        """Does not wait."""
        return value

    @trainer_invocation(target="RANK0")
    def first(self) -> int:
        """Only one."""
        return self._rank

    @trainer_invocation(target=1)
    def second(self) -> int:
        """Only another one."""
        return self._rank

    @trainer_invocation(target=[2, 0])
    def some(self) -> int:
        """Two, in this order."""
        return self._rank

    @trainer_invocation(target="ANY")
    def anyone(self, value: int = 0) -> tuple[int, int]:
        """The first worker that is free."""
        return self._rank, value

    @trainer_invocation(pre_func=clipped, post_func=total)
    def clip(self, value: int) -> int:
        """Between two functions."""
        return value + self._rank

    @trainer_invocation(pre_func=lambda a, b=2: ((a,), {"b": b}))
    def rearrange(self, a: int, *, b: int) -> tuple[int, int]:
        """By name."""
        return a, b

    @trainer_invocation(auto_shard=False)
    def whole(self, items: list[int]) -> int:
        """Gets everything."""
        return len(items)

    @trainer_invocation(timeout=0.2)
    def slow(self) -> None:
        """Has a deadline."""
        self.gate.wait(0.5)

    def call(self) -> str:
        """Has the name of a way to call a method."""
        return "called"


@pytest.fixture
def group(serve: Serve) -> RoleGroup:
    """Three of them."""
    return serve(*(Workload(rank) for rank in range(3)))


class TestAGroup:
    def test_a_group_is_a_sequence_of_workers(self, group: RoleGroup) -> None:
        assert len(group) == 3
        assert [handle.rank for handle in group] == [0, 1, 2]
        assert isinstance(group[0], WorkerHandle)
        assert (group[-1].rank, group[0].rank) == (2, 0)
        assert repr(group) == "<role group desk with ranks 0-2>"
        assert repr(group[1]) == "<desk:1>"
        assert group.role == group[1].role == "desk"

    def test_names_role_and_ranks_when_there_is_no_such_worker(self, group: RoleGroup) -> None:
        for index in (3, -4):
            with pytest.raises(IndexError) as caught:
                group[index]
            assert str(caught.value) == (
                f"[{index}] is out of range: <role group desk with ranks 0-2> has 3 workers"
            )
        with pytest.raises(
            IndexError, match=r"\[1\] is out of range: <role group desk with rank 2> has 1 worker$"
        ):
            group[2:][1]

    def test_a_slice_of_a_group_is_a_group(self, group: RoleGroup) -> None:
        assert [who for who, *_ in group[1:].mine()] == [1, 2]
        assert [who for who, *_ in group[::2].mine()] == [0, 2]
        assert [who for who, *_ in group[::-1].mine()] == [2, 1, 0]
        assert group[1:][1:][0].mine()[0] == 2
        with pytest.raises(UsageError, match="is empty; name at least one rank"):
            group[3:]

    def test_a_group_call_gives_all_arguments_to_all_workers(self, group: RoleGroup) -> None:
        for method in ("mine", "mine_beside", "mine_meanwhile"):
            assert getattr(group, method).call(1, x=2) == [(rank, (1,), {"x": 2}) for rank in range(3)]

    def test_a_group_call_splits_marked_arguments(self, group: RoleGroup) -> None:
        assert [args[0] for _, args, _ in group.mine(["a", "b", "c"])] == ["a", "b", "c"]
        assert [args[0] for _, args, _ in group.mine(shard([1, 2, 3, 4]))] == [[1, 2], [3], [4]]
        assert [args[0] for _, args, _ in group[:2].mine(["a", "b"])] == ["a", "b"]
        assert group.whole([1, 2, 3]) == [3, 3, 3]
        assert group[0].mine([1])[1] == ([1],), "one worker gets the list"
        with pytest.raises(UsageError, match="auto_shard=False"):
            group.whole(shard([1, 2]))

    def test_a_ref_says_how_it_was_split(self, group: RoleGroup) -> None:
        ref = group.mine.call_async(shard([1, 2, 3, 4]), 5, x=6)
        assert ref.sharding == {0: "shard 2+1+1", 1: "replicate", "x": "replicate"}
        assert ref.workers == ("desk:0", "desk:1", "desk:2")

    def test_a_group_call_goes_to_the_target_of_the_method(self, group: RoleGroup) -> None:
        assert (group.first(), group.second(), group.some()) == (0, 1, [2, 0])
        refs = [method.call_async() for method in (group.first, group.second, group.some)]
        assert [ref.workers for ref in refs] == [("desk:0",), ("desk:1",), ("desk:2", "desk:0")], (
            "and nowhere else"
        )
        # "ANY" chooses a worker with no open calls first, so all calls above have to be answered before.
        assert all(ref.result() is not None for ref in refs)
        assert Counter(group.anyone()[0] for _ in range(6)) == {0: 2, 1: 2, 2: 2}
        assert Counter(group[1:].anyone()[0] for _ in range(6)) == {1: 3, 2: 3}

    @pytest.mark.parametrize("method", ["second", "some"])
    def test_a_part_without_the_target_is_refused(self, group: RoleGroup, method: str) -> None:
        with pytest.raises(UsageError, match=f"{method} has target .* not in <role group desk with rank 2>"):
            getattr(group[2:], method)

    def test_waits_or_does_not_as_the_method_or_the_caller_says(self, group: RoleGroup) -> None:
        assert isinstance(group.later(1), InvocationRef)
        assert group.later(1).result() == [1, 1, 1]
        assert group.later.call(1) == [1, 1, 1]
        assert isinstance(group.mine.call_async(), InvocationRef)

    def test_a_group_call_applies_pre_func_and_post_func(self, group: RoleGroup) -> None:
        assert group.clip(-5) == 0 + 1 + 2
        assert group.clip(10) == 33
        assert group.rearrange(1) == [(1, 2)] * 3
        assert group.clip.call_async(1).result() == 6

    def test_a_group_call_ends_at_its_deadline(self, group: RoleGroup) -> None:
        with pytest.raises(InvocationTimeout, match="slow was not answered within its deadline of 0.2 s"):
            group.slow()

    def test_methods_may_be_called_like_the_ways_to_call_them(self, group: RoleGroup) -> None:
        assert group.call() == group.call.call() == ["called"] * 3

    def test_a_method_that_would_hide_the_role_is_refused(self, serve: Serve) -> None:
        class Playing:
            def role(self) -> str:
                return "Hamlet"

        with pytest.raises(
            UsageError, match="Playing has a method called role, as every role group has; rename"
        ):
            serve(Playing())

    def test_an_unknown_method_is_told_with_those_there_are(self, group: RoleGroup, serve: Serve) -> None:
        with pytest.raises(
            AttributeError,
            match="role desk has no method 'firts'; did you mean 'first'. its methods are: anyone, call, clip",
        ):
            group.firts  # noqa: B018
        assert not hasattr(group, "_private")
        assert not hasattr(group, "__len_hint__")
        with pytest.raises(AttributeError, match="role desk has no method 'first'; its methods are: none$"):
            serve(object()).first  # noqa: B018

    def test_dir_of_a_group_lists_its_methods(self, group: RoleGroup) -> None:
        assert {"mine", "later", "role"} <= set(dir(group))
        assert {"mine", "rank"} <= set(dir(group[0]))

    def test_can_be_copied_and_not_sent(self, group: RoleGroup) -> None:
        assert copy.copy(group).first() == 0
        with pytest.raises(EncodingError, match="cannot be sent"):
            group.mine(group)


class TestAHandle:
    def test_a_handle_is_the_same_object_each_time(self, group: RoleGroup) -> None:
        assert group[1] is group[-2] is list(group)[1]
        assert group[1].mine is group[1].mine

    def test_returns_bare_results_whatever_the_target_is(self, group: RoleGroup) -> None:
        handle = group[2]
        assert (
            handle.mine(1)[0] == handle.first() == handle.second() == handle.some() == handle.anyone()[0] == 2
        )
        assert handle.later(4).result() == 4
        assert handle.mine.call(1) == (2, (1,), {})
        assert handle.mine.call_async().result() == (2, (), {})

    def test_a_handles_call_applies_pre_func_and_post_func(self, serve: Serve) -> None:
        group = serve(Workload(0))
        with pytest.raises(TypeError, match="not iterable"):
            group[0].clip(1)


class TestAMethod:
    def test_a_method_names_its_workers(self, group: RoleGroup) -> None:
        assert repr(group.mine) == "<method mine of <role group desk with ranks 0-2>>"
        assert repr(group[1].mine) == "<method mine of <desk:1>>"
        assert group.mine.__name__ == "mine"

    def test_rank0_calls_the_first_worker_of_the_group_and_waits(self, group: RoleGroup) -> None:
        assert group.mine.rank0(1, x=2) == (0, (1,), {"x": 2})
        assert group[1:].mine.rank0() == (1, (), {})
        assert group[2].mine.rank0() == (2, (), {})
        assert group.later.rank0(5) == 5, "also when the method does not wait"
        assert group.second.rank0() == 0, "whatever the target is"

    def test_options_hold_for_what_is_called_with_them(self, group: RoleGroup) -> None:
        with pytest.raises(InvocationTimeout, match="slow was not answered within its deadline of 0.1 s"):
            group.slow.options(timeout=0.1)()
        assert group.mine.options(target="ANY").call(7)[1] == (7,)
        assert group.mine.options(target=[2, 0])() == [(2, (), {}), (0, (), {})]
        assert group.mine.options(auto_shard=False)([1, 2, 3])[0][1] == ([1, 2, 3],)
        assert group.mine.options(post_func=len).call() == 3
        assert group.mine.options(timeout=5).options(post_func=len)() == 3

    def test_options_that_are_wrong_are_told(self, group: RoleGroup) -> None:
        with pytest.raises(UsageError, match="desk.mine.options has no option timout; did you mean timeout"):
            group.mine.options(timout=3)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="desk.mine.options: timeout=-1; give seconds above 0"):
            group.mine.options(timeout=-1)
        with pytest.raises(UsageError, match="no option concurrency; there are timeout, target, "):
            group.mine.options(concurrency=3)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="mine has target 0, which is not in <desk:1>"):
            group[1].mine.options(target=0)

    def test_has_no_other_ways_to_be_called(self, group: RoleGroup) -> None:
        with pytest.raises(AttributeError, match="'RemoteMethod' object has no attribute 'cal'"):
            group.mine.cal  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(
            AttributeError, match=r"'remote': write mine\(…\); mine\.call_async\(…\) does not wait"
        ):
            group.mine.remote  # type: ignore[attr-defined]  # noqa: B018


class TestMap:
    def test_one_item_for_each_worker_goes_to_them_in_rank_order(self, group: RoleGroup) -> None:
        group.anyone()
        assert group.mine.map("abc") == [(0, ("a",), {}), (1, ("b",), {}), (2, ("c",), {})]

    def test_map_returns_results_in_the_order_of_the_items(self, group: RoleGroup) -> None:
        assert [value for _, value in group.anyone.map(range(40))] == list(range(40))
        assert group.anyone.map([]) == []

    def test_map_passes_further_arguments_to_every_call(self, group: RoleGroup) -> None:
        assert [(args, kw) for _, args, kw in group.mine.map("ab", 1, x=2)] == [
            (("a", 1), {"x": 2}),
            (("b", 1), {"x": 2}),
        ]

    def test_items_that_are_lists_are_not_split(self, group: RoleGroup) -> None:
        assert [args for _, args, _ in group.mine.map([[1, 2, 3]])] == [([1, 2, 3],)]

    def test_map_takes_items_only_as_it_needs_them(self, serve: Serve) -> None:
        workloads = [Workload(0), Workload(1)]
        group, taken = serve(*workloads), []

        def items() -> Any:
            for number in range(100):
                taken.append(number)
                yield number

        class Stop(Exception):
            pass

        def watched() -> Any:
            for item in items():
                if item == 50:
                    raise Stop
                yield item

        with pytest.raises(Stop):
            group.anyone.map(watched())
        assert len(taken) == 51

    def test_map_raises_the_first_error(self, group: RoleGroup) -> None:
        with pytest.raises(TypeError):
            group.whole.map([[1], 5])

    def test_map_of_a_slice_calls_its_members(self, group: RoleGroup) -> None:
        assert {who for who, _ in group[:2].anyone.map(range(10))} == {0, 1}
