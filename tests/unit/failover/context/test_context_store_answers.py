"""The requests of workers to the store, and the answers."""

from __future__ import annotations

import pytest

from unirun.failover.context import MAX_BYTES, ContextStore
from unirun.rendezvous.election import campaign, job_prefix
from unirun.rendezvous.store.memory import MemoryStore
from unirun.values import WorkerId
from unirun.wire.address import UnixAddress
from unirun.wire.reports import MasterReply, MasterRequest, MasterRequestKind


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def contexts(store: MemoryStore, run_id: str = "run1", deposing: int = 0) -> ContextStore:
    term = campaign(store, job_prefix(run_id), UnixAddress("/x", "h"), 1, ttl=60.0, deposing=deposing)
    assert term is not None
    return ContextStore(store, run_id, term)


WHO = WorkerId("actor", 0, 0)
Asked = tuple[WorkerId, MasterRequest]


def ask(
    kind: MasterRequestKind, name: str = "", data: str = "", *, rank: int = 0, incarnation: int = 0
) -> Asked:
    return WorkerId("actor", rank, incarnation), MasterRequest(7, kind, name, data)


def test_a_state_is_found_by_the_next_incarnation_and_the_next_master(store: MemoryStore) -> None:
    first = contexts(store)
    assert first.answer(*ask("load_state")) == MasterReply(WHO, 7, None)
    for text in ("one", "", "x" * 450_000, "two"):
        assert first.answer(*ask("save_state", data=text)) == MasterReply(WHO, 7)
        assert first.answer(*ask("load_state", incarnation=1)).data == text
    second = contexts(store, deposing=1)
    assert second.answer(*ask("load_state", incarnation=2)) == MasterReply(WorkerId("actor", 0, 2), 7, "two")


def test_each_rank_and_each_job_has_its_own(store: MemoryStore) -> None:
    mine, other = contexts(store, "run1"), contexts(store, "run10")
    mine.answer(*ask("save_state", data="zero"))
    mine.answer(*ask("save_state", data="one", rank=1))
    assert mine.answer(*ask("load_state", rank=1)).data == "one"
    assert mine.answer(*ask("load_state", rank=10)).data is None
    assert other.answer(*ask("load_state")).data is None


def test_nothing_is_left_of_the_states_before(store: MemoryStore) -> None:
    held = contexts(store)
    for _ in range(3):
        held.answer(*ask("save_state", data="y" * 450_000))
    states = [item.key for item in store.get_prefix("jobs/run1/states/").items]
    assert len(states) == 2, states


def test_no_value_is_over_a_megabyte(store: MemoryStore) -> None:
    contexts(store).answer(*ask("save_state", data="z" * (11 << 20)))
    assert max(len(item.value) for item in store.get_prefix("").items) <= MAX_BYTES


def test_a_version_only_grows(store: MemoryStore) -> None:
    held = contexts(store)
    assert held.answer(*ask("version", "actor weights")).data is None
    for given, kept in ((3, "3"), (2, "3"), (3, "3"), (12, "12")):
        assert held.answer(*ask("commit_version", "actor weights", str(given))).data == kept
    assert held.answer(*ask("version", "actor weights")).data == "12"
    assert held.answer(*ask("version", "actor")).data is None
    assert contexts(store, deposing=1).answer(*ask("version", "actor weights")).data == "12"


def test_what_is_no_version_is_told_to_who_asked(store: MemoryStore) -> None:
    assert contexts(store).answer(*ask("commit_version", "w", "-1")).problem == "'-1' is no version"


@pytest.mark.parametrize("kind", ["commit_version", "version"])
@pytest.mark.parametrize("channel", ["", "x" * 201, "\udc80" * 300])
def test_a_channel_that_no_store_takes_is_told_to_who_asked(
    store: MemoryStore, kind: MasterRequestKind, channel: str
) -> None:
    problem = contexts(store).answer(*ask(kind, channel, "1")).problem
    assert "is no channel: 1 to 200 characters" in problem


@pytest.mark.parametrize("channel", ["/", "..", "a/b", "\N{SNOWMAN}" * 200, "\0"])
def test_any_other_channel_is_one_of_its_own(store: MemoryStore, channel: str) -> None:
    held = contexts(store)
    assert held.answer(*ask("commit_version", channel, "4")).data == "4"
    assert held.answer(*ask("version", channel)).data == "4"
    assert held.answer(*ask("version", "other")).data is None


def test_a_version_beyond_64_bits_is_none(store: MemoryStore) -> None:
    assert "is no version" in contexts(store).answer(*ask("commit_version", "w", "9" * 5000)).problem


@pytest.mark.parametrize("wrong", [ask("commit_version", "\udc80", "1"), ask("version", "\udc80")])
def test_what_is_no_text_harms_nobody_else(store: MemoryStore, wrong: Asked) -> None:
    held = contexts(store)
    assert "cannot be done" in held.answer(*wrong).problem
    assert held.answer(*ask("commit_version", "w", "1")).data == "1", "the next write goes on"
