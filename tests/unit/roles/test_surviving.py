"""`ResilientState`, and `resilient` without a launcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import unirun
from unirun.errors import UsageError
from unirun.roles.interruption import Interrupted
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.process_groups import process_groups
from unirun.roles.surviving import GROWTH_TIMEOUT, ResilientState, Survivor
from unirun.wire.messages import RoleView, View
from unirun.wire.reports import Boundary, Message


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters(), 0.1)


class FakeClock:
    """A stand-in for the module `time`, whose clock moves with `sleep` alone. One event is called at its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._when = inf
        self._event: Callable[[], object] = lambda: None

    def at(self, when: float, event: Callable[[], object]) -> None:
        self._when, self._event = when, event

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._when:
            self._when = inf
            self._event()


class TestState:
    def test_nothing_is_loaded_before_something_is_saved(self) -> None:
        assert ResilientState().load(model=made()[0]) == {}

    def test_models_and_optimizers_go_on_from_what_was_saved_however_often_it_is_loaded(self) -> None:
        state, (model, optimizer) = ResilientState(), made()
        trained(model, optimizer)
        state.save(model=model, optimizer=optimizer, step=1)
        trained(model, optimizer)
        expected = {name: each.clone() for name, each in model.state_dict().items()}
        for _ in range(2):
            model, optimizer = made()
            assert state.load(model=model, optimizer=optimizer) == {"step": 1}
            trained(model, optimizer)
            assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())

    @pytest.mark.parametrize("newer", [(3, {"step": 3}), None])
    def test_a_rank_takes_what_another_one_has_saved_later_and_keeps_it(
        self, monkeypatch: pytest.MonkeyPatch, newer: tuple[int, dict[str, Any]] | None
    ) -> None:
        """None: its own is the newest."""
        asked: list[tuple[int, dict[str, Any]]] = []

        def ask(number: int, values: Callable[[], dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
            asked.append((number, values()))
            return newer

        monkeypatch.setattr("unirun.roles.replicas.newer", ask)
        survivor: Any = SimpleNamespace(world_size=2, at_boundary=lambda: None)
        state = ResilientState(survivor)
        for step in (1, 2):
            state.save(step=step)
        last = newer or (2, {"step": 2})
        for _ in range(2):
            assert state.load() == last[1]
        assert asked == [(2, {"step": 2}), last]
        survivor.world_size = 1
        assert state.load() == last[1]
        assert len(asked) == 2, "there is no other one"

    def test_plain_data_and_tensors_are_copies(self) -> None:
        state, rows, weights = ResilientState(), [1, [2]], torch.zeros(2)
        state.save(rows=rows, weights=weights)
        rows.append(3)
        weights += 1
        first = state.load()
        assert first["rows"] == [1, [2]]
        first["weights"] += 1
        assert torch.equal(state.load()["weights"], torch.zeros(2))

    def test_each_save_counts_by_which_ranks_know_whose_values_are_newer(self) -> None:
        state = ResilientState()
        for number in (1, 2, 3):
            state.save(step=number)
            assert state._kept == (number, {"step": number})

    def test_a_save_that_fails_leaves_the_one_before(self) -> None:
        class Sharded(torch.Tensor):
            placements = ()

        state = ResilientState()
        state.save(step=1)
        with pytest.raises(UsageError, match="sharded tensor"):
            state.save(step=2, weights=torch.zeros(2).as_subclass(Sharded))
        assert state.load() == {"step": 1}


class TestGrowth:
    @pytest.mark.parametrize("grows", [True, False])
    def test_growth_is_asked_for_after_a_save_while_the_role_is_to_grow(
        self, monkeypatch: pytest.MonkeyPatch, *, grows: bool
    ) -> None:
        told: list[Message] = []
        peers = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)}, send=told.append)
        peers.update(View((RoleView("actor", 1, 0, "", "running", (), grows=grows),)))
        monkeypatch.setattr("unirun.roles.surviving.init", lambda: SimpleNamespace(peers=peers))
        state = ResilientState(Survivor())
        assert told == []
        state.save(step=1)
        assert told == [Boundary()] * grows
        assert state.load() == {"step": 1}


class TestTheReturn:
    """A rank that has returned from the function waits for the others, in time that passes when it sleeps."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
        clock = FakeClock()
        monkeypatch.setattr("unirun.roles.surviving.time", clock)
        return clock

    def survivor(self, monkeypatch: pytest.MonkeyPatch, store: HashStore, *, grows: bool = False) -> Survivor:
        peers = Peers("actor", 0, {"actor": RoleInfo("actor", 3, 0)}, send=lambda _: None)
        peers.update(View((RoleView("actor", 3, 0, "", "running", (), grows=grows),)))
        monkeypatch.setattr("unirun.roles.surviving.init", lambda: SimpleNamespace(peers=peers))
        made: Any = Survivor()
        made._formation = SimpleNamespace(store=lambda prefix, timeout: store, outdated=False)
        found: Survivor = made
        return found

    @pytest.mark.parametrize("seconds", [0.0, 60.0])
    def test_each_rank_counts_once_however_long_it_waits(
        self, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, seconds: float
    ) -> None:
        store = HashStore()
        survivor = self.survivor(monkeypatch, store)
        store.add("returned", 1)
        clock.at(seconds, lambda: store.add("returned", 1))
        survivor._wait_for_all()
        assert seconds <= clock.now <= seconds + 1.0
        assert store.add("returned", 0) == 3

    @pytest.mark.parametrize("saved", [True, False])
    def test_ranks_that_are_to_come_have_some_seconds_after_the_last_save(
        self, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, saved: bool
    ) -> None:
        store = HashStore()
        survivor = self.survivor(monkeypatch, store, grows=True)
        store.add("returned", 2)
        if saved:
            survivor.at_boundary()
        survivor._wait_for_all()
        assert GROWTH_TIMEOUT * saved <= clock.now <= GROWTH_TIMEOUT * saved + 1.0

    def test_a_loss_ends_the_wait(self, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
        survivor = self.survivor(monkeypatch, HashStore())
        formation: Any = survivor._formation
        clock.at(60.0, lambda: setattr(formation, "outdated", True))
        with pytest.raises(Interrupted):
            survivor._wait_for_all()
        assert clock.now <= 61.0

    def test_groups_of_generations_that_are_over_are_let_go(
        self, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
    ) -> None:
        store = HashStore()
        survivor = self.survivor(monkeypatch, store)
        formation: Any = survivor._formation
        formation.leave_to_user = formation.follow = lambda: None
        store.add("returned", 2)
        group = FakeClock()
        left = weakref.ref(group)
        process_groups().keep(group, "over")
        del group
        assert survivor.run(left) is not None, "it is kept while the function runs"
        assert left() is None


class TestResilientWithoutALauncher:
    def test_the_function_is_called_with_a_state_before_its_arguments(self) -> None:
        @unirun.resilient
        def train(state: unirun.ResilientState, first: int, *, second: int) -> tuple[int, int, int]:
            """Train."""
            return state.generation, first, second

        assert train(1, second=2) == train(1, second=2) == (0, 1, 2)
        assert train.__doc__ == "Train."
