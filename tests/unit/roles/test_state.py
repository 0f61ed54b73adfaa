"""What workers keep beyond their own end."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirun.errors import UsageError
from unirun.roles import state as states
from unirun.roles.peers import Peers, RoleInfo
from unirun.roles.state import MemoryState, StoredState, job_folder, state_of


class Master(Peers):
    """Peers that answer like a master, and note what they were asked."""

    def __init__(self) -> None:
        super().__init__("actor", 3, {"actor": RoleInfo("actor", 8, 0)})
        self.asked: list[tuple[str, str]] = []
        self.kept: str | None = None

    def ask(self, wish: str, name: str = "", data: str = "", *, timeout: float) -> str | None:
        self.asked.append((wish, name))
        if wish == "save_state":
            self.kept = data
            return None
        return self.kept


def test_what_was_saved_last_is_found_by_the_next_one() -> None:
    master = Master()
    assert StoredState(master).load() is None
    for state in (b"first", b"", bytes(range(256)) * 100, b"last"):
        StoredState(master).save(state)
        assert StoredState(master).load() == state


def test_a_state_that_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MAX_STATE", 10)
    master = Master()
    with pytest.raises(
        UsageError, match="save_state got 11 bytes, and 10 is the most; keep large data in files"
    ):
        StoredState(master).save(b"x" * 11)
    assert master.asked == []
    StoredState(master).save(b"x" * 10)
    assert master.asked == [("save_state", "")]


def test_without_a_launcher_it_lives_as_long_as_the_process() -> None:
    state = MemoryState()
    assert state.load() is None
    memory = bytearray(b"abc")
    state.save(memory)
    memory[:] = b"zzz"
    assert state.load() == b"abc"
    lone = Peers("actor", 0, {"actor": RoleInfo("actor", 1, 0)})
    assert isinstance(state_of(lone), MemoryState)


def test_a_worker_knows_the_folder_of_its_job(tmp_path: Path) -> None:
    assert job_folder({"UNIRUN_SOCKET": str(tmp_path / "agent.sock")}) == tmp_path
    assert job_folder({}) is None
