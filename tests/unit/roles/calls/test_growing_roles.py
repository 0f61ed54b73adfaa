"""The calls of a caller to a role that gets more ranks: between two calls, and each to all ranks that it has then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.effort import examples
from tests.unit.roles.calls.test_caller import RESULT, FakeTransport, Pair
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import WorkerLost
from unirun.roles import InvocationRef
from unirun.roles.calls.caller import Caller
from unirun.roles.calls.group import RoleGroup, role_group
from unirun.roles.calls.policy import Invocation
from unirun.values import WorkerId
from unirun.wire.messages import RoleBrief, RoleView


class Elastic(Pair):
    """A directory of a role that is to grow from two to three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.now = RoleView("actor", 2, 0, "", "running", (), grows=True)
        self.others: tuple[RoleView, ...] = ()
        self.changed: Callable[[], None] = lambda: None

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Keep the listener of the caller."""
        self.changed = listener

    def view(self, role: str) -> RoleView:
        """As it is now."""
        return self.now

    def views(self) -> tuple[RoleView, ...]:
        """Of all roles."""
        return self.now, *self.others

    def brief(self, role: str) -> RoleBrief:
        """That of workloads."""
        return RoleBrief(role, "workload", "actors:Actor", 2, None, most=64)

    def size(self, role: str) -> int:
        """As it is now."""
        return self.now.world_size

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Nothing changes meanwhile."""
        return condition()

    def becomes(self, size: int, generation: int, phase: str, *, grows: bool = False) -> None:
        """There is another view."""
        self.generation = generation
        self.now = RoleView("actor", size, generation, "", phase, (), grows=grows)
        self.changed()


class TestARoleThatGrows:
    def made(self, told: list[str] | None) -> tuple[Elastic, FakeTransport, Caller, RoleGroup]:
        directory, transport = Elastic(), FakeTransport()
        transport.open[2] = []
        me = WorkerId("trainer", 0, 0)
        boundary = None if told is None else told.append
        caller = Caller(me, directory, transport, call_timeout=60.0, boundary=boundary)
        return (
            directory,
            transport,
            caller,
            role_group(caller, "actor", 2, {"step": Invocation(blocking=False)}),
        )

    def test_a_trainer_says_when_it_is_between_two_calls_and_the_next_call_goes_to_all(self) -> None:
        told: list[str] = []
        directory, transport, caller, group = self.made(told)
        step = group.step
        first = step()
        directory.changed()
        step()
        assert (told, len(group)) == ([], 2), "a call is open"
        for rank in (0, 1, 0, 1):
            transport.open[rank].pop()(RESULT)
        assert first.result(WAIT_TIMEOUT) == [42, 42]
        # In the test the master answers before it is waited for.
        boundary = caller._boundary

        def at_boundary(role: str) -> None:
            assert boundary is not None
            boundary(role)
            directory.becomes(3, 1, "reforming")

        caller._boundary = at_boundary
        third = step()
        assert (told, len(group), [each.rank for each in group]) == (["actor"], 3, [0, 1, 2])
        assert [len(transport.open[rank]) for rank in range(3)] == [1, 1, 1]
        assert "0 of 3 answered" in repr(third)
        caller.close()

    def test_other_callers_learn_the_number_when_the_role_runs_again(self) -> None:
        directory, _, caller, group = self.made(None)
        directory.becomes(3, 0, "reforming")
        group.step()
        assert len(group) == 2
        directory.becomes(3, 1, "reforming")
        group.step()
        assert len(group) == 3, "two would wait for the third in the generation that is formed now"
        directory.becomes(3, 1, "running")
        group.step()
        assert len(group) == 3
        directory.becomes(1, 2, "running")
        group.step()
        assert [each.rank for each in group] == [0]
        caller.close()

    def test_a_role_does_not_grow_and_nobody_waits_for_that_while_another_one_recovers(self) -> None:
        told: list[str] = []
        directory, _, caller, group = self.made(told)
        directory.others = (RoleView("reward", 1, 1, "", "restarting", ()),)
        directory.changed()
        group.step.call_async()
        caller.close()
        assert told == []

    def test_a_call_that_was_pickled_while_the_role_grew_goes_to_all(self) -> None:
        directory, transport, caller, group = self.made([])

        def another_thread() -> None:
            directory.becomes(3, 1, "running")
            group.step()

        ref = group.step(Meanwhile(another_thread))
        assert [len(transport.open[rank]) for rank in range(3)] == [2, 2, 2]
        assert "0 of 3 answered" in repr(ref)
        caller.close()

    def test_a_call_to_fewer_ranks_than_its_role_has_when_it_is_sent_is_for_the_generation_before(
        self,
    ) -> None:
        directory, transport, caller, group = self.made(None)
        ref = group.step(Meanwhile(lambda: directory.becomes(3, 1, "running")))
        with pytest.raises(WorkerLost, match="has formed generation 1, and the call was made for 0"):
            ref.result(WAIT_TIMEOUT)
        assert not any(transport.open.values())
        group.step()
        assert [len(transport.open[rank]) for rank in range(3)] == [1, 1, 1]
        caller.close()


class Growing(Elastic):
    """A directory of a role that grows again and again. It goes on when it is told to, also while it is looked at."""

    def __init__(self, first: int = 2) -> None:
        """It has `first` ranks in generation 0."""
        super().__init__()
        self.first = first
        self.now = RoleView("actor", first, 0, "", "running", ())
        self.at_boundary = False
        self.patience = 4
        self.soon = 0
        """The number of times that it goes on after its size was read."""

    def go_on(self) -> None:
        """The next view: it wants to grow, begins that at a boundary, forms a generation of one more rank, and runs."""
        now = self.now
        if now.phase == "reforming" and now.generation < now.world_size - self.first:
            self.becomes(now.world_size, now.generation + 1, "reforming")
        elif now.phase == "reforming":
            self.becomes(now.world_size, now.generation, "running")
        elif not now.grows:
            self.becomes(now.world_size, now.generation, "running", grows=True)
        elif self.at_boundary:
            self.at_boundary = False
            self.becomes(now.world_size + 1, now.generation, "reforming")

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """It goes on meanwhile, but not always far enough."""
        for _ in range(self.patience):
            if not condition():
                self.go_on()
        return condition()

    def size(self, role: str) -> int:
        """As it is now; it may be another a moment later."""
        found = super().size(role)
        while self.soon:
            self.soon -= 1
            self.go_on()
        return found


class CallsOfGrowingRoles(RuleBasedStateMachine):
    """A trainer calls a role that grows. A generation has as many ranks more than the first one as its number says,
    which is the reference."""

    @initialize(first=st.sampled_from((1, 2)))
    def begin(self, first: int) -> None:
        self.directory, self.transport = Growing(first), FakeTransport()
        self.transport.open = {rank: [] for rank in range(64)}
        self.refs: list[InvocationRef[Any]] = []
        me = WorkerId("trainer", 0, 0)
        self.caller = Caller(me, self.directory, self.transport, call_timeout=60.0, boundary=self.boundary)
        self.group = role_group(self.caller, "actor", first, {"step": Invocation(blocking=False)})

    def teardown(self) -> None:
        """The role can grow when nothing is open, and is called with all of its ranks then."""
        self.answer()
        while self.directory.now.phase == "reforming":
            self.directory.go_on()
        self.step(0, False, 0, 4)
        self.answer()
        assert len(self.group) == self.directory.now.generation + self.directory.first
        assert not self.caller._calls("actor")
        self.caller.close()

    def boundary(self, role: str) -> None:
        assert not any(self.transport.open.values()), "a call is open"
        self.directory.at_boundary = True
        self.directory.go_on()

    @rule(times=st.sampled_from((1, 2, 3)))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            self.directory.go_on()

    @rule(
        meanwhile=st.sampled_from((0, 0, 1, 3)),
        calls=st.booleans(),
        soon=st.sampled_from((0, 0, 1, 2)),
        patience=st.sampled_from((0, 0, 1, 4)),
    )
    def step(self, meanwhile: int, calls: bool, soon: int, patience: int) -> None:
        """A call, while whose arguments are pickled, or while ranks are counted, the role goes on. As another thread
        calls it, too, this one may learn of it before it is sent."""

        def happens() -> None:
            for _ in range(meanwhile):
                self.directory.go_on()
            if calls:
                self.caller._follow_sizes()

        self.directory.soon, self.directory.patience = soon, patience
        idle = not any(self.transport.open.values())
        wanted = idle and self.directory.now.grows
        before = {rank: len(each) for rank, each in self.transport.open.items()}
        ref = self.group.step(Meanwhile(happens))
        self.directory.soon = 0
        sent = [rank for rank, each in self.transport.open.items() if len(each) > before[rank]]
        if ref.done():
            with pytest.raises(WorkerLost, match="has formed generation"):
                ref.result(0)
            assert not sent
        else:
            assert sent == [*range(ref.generation + self.directory.first)]
            self.refs.append(ref)
        if wanted and not meanwhile and not soon:
            assert self.directory.now.phase == "reforming"

    @precondition(lambda self: self.refs)
    @rule()
    def answer(self) -> None:
        """All answer."""
        for rank, done in [(rank, done) for rank, each in self.transport.open.items() for done in each]:
            self.transport.open[rank].remove(done)
            done(RESULT)
        for ref in self.refs:
            assert ref.result(WAIT_TIMEOUT) == [42] * len(ref.ranks)
        self.refs.clear()


TestCallsOfGrowingRoles = CallsOfGrowingRoles.TestCase
TestCallsOfGrowingRoles.settings = settings(examples(100, shrunk=False), stateful_step_count=25)


def test_a_call_of_another_thread_is_not_sent_while_its_role_begins_to_grow() -> None:
    directory, transport = Growing(), FakeTransport()
    transport.open[2] = []
    directory.go_on()
    looks, sent = threading.Event(), list[bool]()

    def boundary(role: str) -> None:
        looks.set()
        threading.Event().wait(0.1)
        sent.append(any(transport.open.values()))
        directory.at_boundary = True

    caller = Caller(WorkerId("trainer", 0, 0), directory, transport, call_timeout=60.0, boundary=boundary)
    group = role_group(caller, "actor", 2, {"step": Invocation(blocking=False)})
    other = threading.Thread(target=group.step)

    def another_thread() -> None:
        directory.changed()
        other.start()
        assert looks.wait(WAIT_TIMEOUT)

    group.step(Meanwhile(another_thread))
    other.join(WAIT_TIMEOUT)
    assert sent == [False]
    assert [len(transport.open[rank]) for rank in range(3)] == [2, 2, 2]
    caller.close()


class Meanwhile:
    """An argument during whose pickling, the first time, something happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.happens: Callable[[], None] | None = happens

    def __reduce__(self) -> tuple[Any, ...]:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return int, ()
