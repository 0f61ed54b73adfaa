"""The default group of a worker follows the generations of its role. The worker is this process, its role has
one rank or two, and the stores are real ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

import unirun.roles.formation
import unirun.roles.gloo
from tests.waiting import WAIT_TIMEOUT
from unirun.errors import GroupError
from unirun.rendezvous.endpoints import GENERATION_KEY
from unirun.roles.formation import Formation
from unirun.roles.interruption import MainThread
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.process_groups import ProcessGroups, process_groups
from unirun.wire.reports import GroupFormed, GroupMeets, Message, Stuck

pytestmark = pytest.mark.leaves

distributed: Any = dist
LONG = timedelta(minutes=30)


class Worker(Peers):
    """Rank 0 of a role. `role_has` is the agent's word, `tell` the worker's to its agent."""

    def __init__(self, size: int) -> None:
        super().__init__("actor", 0, {"actor": RoleInfo("actor", size, 0)})
        self.ranks = size
        self.told: list[Message] = []
        self.says = threading.Condition()
        self.stores: list[Any] = []
        self.at_meeting: list[int] = []

    def role_has(self, generation: int) -> None:
        """The role is at `generation`, whose store stands."""
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set(GENERATION_KEY, str(generation))
        self.stores.append(store)
        info = RoleInfo("actor", self.ranks, generation, f"127.0.0.1:{store.port}")
        with self._changed:
            self._roles["actor"] = info
            self._changed.notify_all()

    def tell(self, message: Message) -> None:
        with self.says:
            self.told.append(message)
            if isinstance(message, GroupMeets) and self.stores:
                self.at_meeting.append(self.stores[-1].num_keys())
            self.says.notify_all()

    def has_told(self, kind: type[Message]) -> Message:
        """The first message of a kind, awaited."""
        with self.says:
            assert self.says.wait_for(lambda: any(isinstance(m, kind) for m in self.told), WAIT_TIMEOUT), (
                self.told
            )
            return next(m for m in self.told if isinstance(m, kind))

    def setup(self) -> None:
        """As users write it."""
        address, _, port = self.known("actor").endpoint.rpartition(":")
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=port, RANK="0", WORLD_SIZE=str(self.ranks))
        dist.init_process_group("gloo", timeout=LONG)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroups]:
    """Those of this process, which has no default group before and after the test."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    groups = process_groups()
    begin, forgot, default = groups.begin, groups.forgot, groups.default
    yield groups
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.end_all()
    groups.begin, groups.forgot, groups.default = begin, forgot, default
    # A failed group counts in torch, and a worker has a process of its own.
    distributed.distributed_c10d._world.group_count = 0


@pytest.fixture
def formed() -> list[int]:
    """The generations that the user's `on_generation` was given."""
    return []


@pytest.fixture
def alone(groups: ProcessGroups, formed: list[int]) -> tuple[Worker, Formation]:
    """The only rank of a role."""
    worker = Worker(1)
    return worker, Formation(worker, formed.append)


def peer_meets(worker: Worker, pool: ThreadPoolExecutor) -> Callable[[], Any]:
    """A newcomer, rank 1, comes to the latest store: it has made no group before. Returns what waits for its group."""
    store = distributed.PrefixStore(
        "default_pg", distributed.TCPStore("127.0.0.1", worker.stores[-1].port, is_master=False)
    )
    # As torch names the first group of a process.
    prefix = distributed.PrefixStore("cpu/", distributed.PrefixStore("0/", store))
    future = pool.submit(ProcessGroupGloo, prefix, 1, 2, timeout=timedelta(seconds=WAIT_TIMEOUT))
    return lambda: future.result(WAIT_TIMEOUT)


class TestEntering:
    def test_entering_meets_forms_the_group_and_tells_the_agent(
        self, alone: tuple[Worker, Formation], formed: list[int]
    ) -> None:
        worker, formation = alone
        worker.role_has(3)
        formation.enter(worker.setup)
        assert worker.told == [GroupMeets(3), GroupFormed(3)]
        assert formation.generation == 3
        assert formed == [3]

    def test_tells_that_it_meets_before_anything_is_in_the_store(
        self, alone: tuple[Worker, Formation]
    ) -> None:
        worker, formation = alone
        worker.role_has(0)
        formation.enter(worker.setup)
        # Torch itself counts the workers that join a store.
        assert worker.at_meeting == [2]

    def test_goes_on_to_the_generation_that_came_meanwhile(
        self, alone: tuple[Worker, Formation], formed: list[int]
    ) -> None:
        worker, formation = alone
        worker.role_has(0)

        def slow() -> None:
            worker.setup()
            worker.role_has(1)

        formation.enter(slow)
        assert worker.told[-1] == GroupFormed(1)
        assert formed == [0, 1]

    def test_without_a_group_has_nothing_to_form(
        self, alone: tuple[Worker, Formation], formed: list[int]
    ) -> None:
        worker, formation = alone
        worker.role_has(2)
        formation.enter(lambda: None)
        assert not dist.is_initialized()
        assert formed[-1] == 2

    def test_fails_at_once_with_an_error_of_the_users_own(self, alone: tuple[Worker, Formation]) -> None:
        worker, formation = alone
        worker.role_has(0)
        with pytest.raises(ZeroDivisionError):
            formation.enter(lambda: 1 // 0)  # type: ignore[arg-type]

    def test_fails_with_an_error_of_torch_that_no_loss_explains(
        self, alone: tuple[Worker, Formation], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unirun.roles.formation, "LOSS_VIEW_TIMEOUT", 0.01)
        worker, formation = alone
        worker.role_has(0)
        with pytest.raises(AssertionError, match="Unknown backend"):
            formation.enter(
                lambda: dist.init_process_group(
                    "nothing", store=distributed.HashStore(), rank=0, world_size=1
                )
            )
        assert GroupFormed(0) not in worker.told

    def test_an_error_of_torch_waits_for_the_news_of_the_loss_that_has_caused_it(
        self, alone: tuple[Worker, Formation]
    ) -> None:
        """A worker that ends before its agent knows of the loss would fail by itself."""
        worker, formation = alone
        worker.role_has(0)
        agent = threading.Timer(0.05, worker.role_has, [1])

        def setup() -> None:
            agent.start()
            dist.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=-1)

        with pytest.raises(AssertionError, match="world_size must be positive"):
            formation.enter(setup)
        assert formation.outdated
        agent.join()


class TestFollowing:
    def test_forms_the_group_again_as_it_was(
        self, alone: tuple[Worker, Formation], formed: list[int]
    ) -> None:
        worker, formation = alone
        worker.role_has(0)
        formation.enter(worker.setup)
        worker.role_has(1)
        assert formation.outdated
        formation.follow()
        group: Any = dist.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._timeout == LONG
        assert not formation.outdated
        assert formed == [0, 1]

    def test_the_variables_of_torchrun_are_those_of_the_present_generation(
        self, alone: tuple[Worker, Formation], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The node of rank 0 may be another one, and the role may have grown."""
        worker, formation = alone
        worker.role_has(0)
        formation.enter(worker.setup)
        worker.role_has(1)
        variables = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "ROLE_WORLD_SIZE")
        for name in variables:
            monkeypatch.setenv(name, "another")
        formation.follow()
        port = str(worker.stores[-1].port)
        assert [os.environ[name] for name in variables] == ["127.0.0.1", port, "1", "1"]

    def test_the_group_has_the_name_that_it_has_in_a_new_rank(self, alone: tuple[Worker, Formation]) -> None:
        """A new rank has formed no group before. This one has, perhaps in vain."""
        worker, formation = alone
        worker.role_has(0)
        formation.enter(worker.setup)
        names = [distributed.distributed_c10d._get_process_group_name(dist.group.WORLD)]
        for generation in (1, 2):
            distributed.distributed_c10d._world.group_count += 1
            worker.role_has(generation)
            formation.follow()
            names.append(distributed.distributed_c10d._get_process_group_name(dist.group.WORLD))
        assert names == ["0", "0", "0"]

    def test_a_call_of_a_later_generation_is_followed(self, alone: tuple[Worker, Formation]) -> None:
        worker, formation = alone
        worker.role_has(0)
        formation.enter(worker.setup)
        agent = threading.Timer(0.05, worker.role_has, [1])
        agent.start()
        formation.catch_up(1)
        agent.join()
        assert formation.generation == 1

    def test_an_error_of_on_generation_is_raised(
        self, groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unirun.roles.formation, "LOSS_VIEW_TIMEOUT", 0.01)
        worker = Worker(1)

        def on_generation(generation: int) -> None:
            if generation:
                raise LookupError("user")

        formation = Formation(worker, on_generation)
        worker.role_has(0)
        formation.enter(worker.setup)
        worker.role_has(1)
        with pytest.raises(LookupError):
            formation.follow()
        assert GroupFormed(1) not in worker.told


class TestExplaining:
    """An error of a call, and news that come after it."""

    @pytest.fixture
    def entered(self, alone: tuple[Worker, Formation]) -> tuple[Worker, Formation]:
        worker, formation = alone
        worker.role_has(0)
        formation.enter(worker.setup)
        return alone

    def test_an_error_while_all_connections_stand_is_the_users_own_at_once(
        self, entered: tuple[Worker, Formation]
    ) -> None:
        began = time.monotonic()
        assert not entered[1].explain(ValueError("mine"))
        assert time.monotonic() < began + unirun.roles.formation.LOSS_VIEW_TIMEOUT

    @pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("wrapped")])
    def test_where_a_connection_has_ended_the_news_are_waited_for(
        self, entered: tuple[Worker, Formation], groups: ProcessGroups, error: Exception
    ) -> None:
        worker, formation = entered
        for group in groups._groups:
            group.end()
        agent = threading.Timer(0.05, worker.role_has, [1])
        agent.start()
        assert formation.explain(error)
        agent.join()

    def test_an_error_of_a_store_is_explained_by_its_end(self, entered: tuple[Worker, Formation]) -> None:
        worker, formation = entered
        agent = threading.Timer(0.05, worker.role_has, [1])
        agent.start()
        assert formation.explain(distributed.DistNetworkError("recvValue failed"))
        agent.join()

    def test_a_timeout_of_gloo_that_no_news_follow_is_told_as_it_is(
        self, entered: tuple[Worker, Formation], groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unirun.roles.formation, "LOSS_VIEW_TIMEOUT", 0.05)
        for group in groups._groups:
            group.end()
        assert not entered[1].explain(RuntimeError("Timed out waiting 1800000ms for recv operation"))


def test_an_answer_of_the_store_has_the_time_of_the_group_and_not_that_of_a_connection(
    alone: tuple[Worker, Formation],
) -> None:
    worker, formation = alone
    worker.role_has(0)
    store = formation.store("mine", timedelta(seconds=77))
    assert store.underlying_store.timeout == timedelta(seconds=77)


def test_a_process_has_its_rank_of_a_group_across_roles_beside_the_one_of_its_role(
    alone: tuple[Worker, Formation],
) -> None:
    """torch looks up the rank in the role's group among the global ranks of the other group."""
    worker, formation = alone
    worker.role_has(0)
    formation.enter(worker.setup)
    group: Any = object()
    ranks = distributed.distributed_c10d._world.pg_group_ranks
    ranks[group] = unirun.roles.formation._OwnRanks(2, 4)
    try:
        assert dist.get_rank(group) == 2
        assert [distributed.get_group_rank(group, rank) for rank in range(4)] == [0, 1, 2, 3]
        assert [distributed.get_global_rank(group, rank) for rank in range(4)] == [0, 1, 2, 3]
        assert dist.get_rank() == 0
    finally:
        del ranks[group]


class TestBeingKeptAway:
    """A call that was given up keeps the main thread, while the others form a generation."""

    @pytest.fixture
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
        """The answers of the waits until the thread idles, of which each has looked whether that counts."""
        said: list[str | None] = []

        def wait(relevant: Callable[[], bool], counts: Callable[[], bool]) -> str | None:
            assert relevant()
            return said.pop(0) if counts() else None

        monkeypatch.setattr(unirun.roles.formation, "wait_until_idle", wait)
        return said

    def test_a_thread_that_idles_then_is_reported_with_its_stack(
        self, alone: tuple[Worker, Formation], waits: list[str | None]
    ) -> None:
        worker, formation = alone
        worker.role_has(4)
        waits.append("the stack")
        assert formation.outdated
        formation.kept_away(lambda: True)
        why = "generation 4 could not be formed without it, and it waited for 30 s in a call that its caller has given up"
        assert worker.has_told(Stuck) == Stuck(why, "the stack")

    def test_it_is_watched_again_as_long_as_the_call_goes_on(
        self, alone: tuple[Worker, Formation], waits: list[str | None]
    ) -> None:
        worker, formation = alone
        worker.role_has(4)
        waits.extend((None, None, "the stack"))
        formation.kept_away(lambda: True)
        worker.has_told(Stuck)
        assert waits == []


class TestForming:
    """Two ranks; rank 1 is a thread of this process, without a default group of its own."""

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(2) as pool:
            yield pool
            process_groups().end_all()

    @pytest.fixture
    def worker(self) -> Worker:
        return Worker(2)

    @pytest.fixture
    def formation(self, worker: Worker, groups: ProcessGroups, formed: list[int]) -> Formation:
        return Formation(worker, formed.append)

    def overtaken(self, worker: Worker, formation: Formation, generation: int) -> threading.Thread:
        """The next generation comes while rank 0 waits for rank 1 in `generation`."""

        def agent() -> None:
            worker.has_told(GroupMeets)
            store = worker.stores[-1]
            store.wait(["default_pg/0//cpu//0/0"], timedelta(seconds=WAIT_TIMEOUT))
            worker.role_has(generation + 1)
            formation.news()

        thread = threading.Thread(target=agent)
        thread.start()
        return thread

    def test_forming_that_is_overtaken_ends_and_meets_the_new_rank_in_the_next_generation(
        self, worker: Worker, formation: Formation, pool: ThreadPoolExecutor, formed: list[int]
    ) -> None:
        worker.role_has(0)
        agent = self.overtaken(worker, formation, 0)
        with pytest.raises(GroupError, match="was ended"):
            worker.setup()
        agent.join()
        newcomer = peer_meets(worker, pool)
        formation.follow()
        assert newcomer() is not None
        assert formed == [1]
        assert worker.told == [GroupMeets(0), GroupMeets(1), GroupFormed(1)]

    def test_forming_that_is_overtaken_again_goes_on_to_the_last_generation(
        self, worker: Worker, formation: Formation, pool: ThreadPoolExecutor, formed: list[int]
    ) -> None:
        worker.role_has(0)
        first = self.overtaken(worker, formation, 0)
        with pytest.raises(GroupError, match="was ended"):
            worker.setup()
        first.join()

        def again() -> Any:
            with worker.says:
                assert worker.says.wait_for(lambda: GroupMeets(1) in worker.told, WAIT_TIMEOUT)
            worker.role_has(2)
            formation.news()
            return peer_meets(worker, pool)()

        newcomer = pool.submit(again)
        formation.follow()
        assert newcomer.result(WAIT_TIMEOUT) is not None
        assert (formation.generation, formed) == (2, [2])
        assert worker.told == [*map(GroupMeets, (0, 1, 2)), GroupFormed(2)]

    def test_forming_that_cannot_be_ended_is_reported_as_stuck(
        self, worker: Worker, formation: Formation, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
    ) -> None:
        monkeypatch.setattr(unirun.roles.gloo, "STUCK_TIMEOUT", 0.05)
        monkeypatch.setattr(unirun.roles.gloo, "STACK_SAMPLE_INTERVAL", 0.01)
        end_outdated = process_groups().end_outdated
        monkeypatch.setattr(process_groups(), "end_outdated", lambda: None)
        worker.role_has(0)
        agent = self.overtaken(worker, formation, 0)
        freed = pool.submit(lambda: (worker.has_told(Stuck), end_outdated()))
        with pytest.raises(GroupError, match="was ended"):
            worker.setup()
        agent.join()
        freed.result(WAIT_TIMEOUT)
        stuck = worker.has_told(Stuck)
        assert isinstance(stuck, Stuck)
        assert "generation 0" in stuck.why
        assert "init_process_group" in stuck.stack


class OverNccl:
    """A group over NCCL, in which the main thread waits until it is aborted."""

    def __init__(self, noted: list[str]) -> None:
        self.noted, self.aborted = noted, threading.Event()

    def abort(self) -> None:
        self.noted.append("aborted")
        self.aborted.set()


def test_a_call_in_a_collective_over_nccl_is_interrupted_before_that_is_aborted(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted, it goes on with wrong numbers: no code of the user's may run after it."""
    noted: list[str] = []
    group = OverNccl(noted)
    monkeypatch.setattr(unirun.roles.formation, "_over_nccl", lambda: [group])
    main = MainThread()
    wake = main.wake

    def noted_wake(check: Callable[[], None]) -> None:
        noted.append("interrupted")
        wake(check)

    monkeypatch.setattr(main, "wake", noted_wake)
    worker = Worker(1)
    worker.role_has(0)
    formation = Formation(worker, lambda generation: None, main)

    def call() -> None:
        worker.role_has(1)
        threading.Timer(0.05, formation.news).start()
        assert group.aborted.wait(WAIT_TIMEOUT)
        noted.append("wrong numbers")

    with pytest.raises(GroupError, match="the call was interrupted") as found:
        formation.guard(call)
    assert formation.explain(found.value)
    assert noted[0] == "interrupted"
    assert "wrong numbers" not in noted


def test_a_call_is_not_interrupted_where_no_group_uses_nccl(groups: ProcessGroups) -> None:
    """Those of gloo raise by themselves, and calls that use none lose nothing."""
    worker = Worker(1)
    worker.role_has(0)
    formation = Formation(worker, lambda generation: None, MainThread())

    def call() -> int:
        worker.role_has(1)
        formation.news()
        return 3

    assert formation.guard(call) == 3
