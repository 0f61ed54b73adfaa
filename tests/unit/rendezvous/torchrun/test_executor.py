"""The execution of torch's operations: participants counted, times of the next look, deadlines."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

from unirun.rendezvous.store.memory import MemoryStore
from unirun.rendezvous.torchrun.handler import Config, StoreHandler, _Executor


def executor(config: Config | None = None) -> _Executor:
    params = RendezvousParameters("etcd-v3", "", "run1", 2, 2, local_addr="127.0.0.1")
    return StoreHandler(params, config or Config(), MemoryStore())._executor


def test_a_node_that_gives_up_is_counted_as_participant() -> None:
    one = executor()
    actions = [_Action.ADD_TO_PARTICIPANTS, _Action.REMOVE_FROM_PARTICIPANTS, _Action.FINISH]
    one.run(lambda context, deadline: actions.pop(0), 1.0)
    assert one.most == 1
    one.run(lambda context, deadline: _Action.FINISH, 1.0)
    assert one.most == 0, "those of an earlier round do not count"


def test_the_executor_passes_on_torchs_updated_deadline() -> None:
    actions = [_Action.ADD_TO_REDUNDANCY_LIST, _Action.REMOVE_FROM_REDUNDANCY_LIST, _Action.FINISH]
    deadlines: list[float] = []

    def decide(context: object, deadline: float) -> _Action:
        deadlines.append(deadline)
        return actions.pop(0)

    executor().run(decide, 1.0, lambda timeout: 2.0)
    assert deadlines == [1.0, 1.0, 2.0]


def test_a_waiting_node_looks_at_the_last_call_and_once_a_second() -> None:
    look_in = executor()._look_in
    assert look_in(None) == 1.0
    assert look_in(datetime.now(UTC) + timedelta(seconds=0.9)) <= 0.9
    assert look_in(datetime.now(UTC) - timedelta(seconds=1)) == 0.01
    assert executor(Config(keep_alive_interval=0.25))._look_in(None) == 0.25
