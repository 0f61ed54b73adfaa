"""What workers keep beyond their own end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from unirun.errors import JobError
from unirun.roles.state import FileState, MemoryState, job_folder, state_of

SOON = 30.0


def test_what_was_saved_last_is_found_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "state" / "actor.0"
    assert FileState(path).load() is None
    for state in (b"first", b"", b"x" * (1 << 20), b"last"):
        FileState(path).save(state)
        assert FileState(path).load() == state
    assert [each.name for each in path.parent.iterdir()] == ["actor.0"], "nothing else is left"


def test_it_is_for_its_owner_only(tmp_path: Path) -> None:
    FileState(tmp_path / "state" / "actor.0").save(b"secret")
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_ranks_that_save_at_once_do_not_mix_their_states(tmp_path: Path) -> None:
    wrong: list[int] = []

    def save_often(rank: int) -> None:
        state = FileState(tmp_path / "state" / f"actor.{rank}")
        for _ in range(30):
            state.save(bytes([rank]) * 10_000)
            if state.load() != bytes([rank]) * 10_000:
                wrong.append(rank)

    threads = [threading.Thread(target=save_often, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert wrong == []


def test_threads_that_save_at_once_leave_one_of_their_states(tmp_path: Path) -> None:
    state = FileState(tmp_path / "actor.0")
    threads = [
        threading.Thread(target=lambda n=n: [state.save(bytes([n]) * 100_000) for _ in range(10)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    found = state.load()
    assert found is not None
    assert len(found) == 100_000
    assert len(set(found)) == 1


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("in the way")
    with pytest.raises(JobError, match="state cannot be saved to .*; free some space"):
        FileState(folder / "actor.0").save(b"x")
    with pytest.raises(JobError, match="state cannot be read from"):
        FileState(folder / "actor.0").load()


def test_without_a_launcher_it_lives_as_long_as_the_process() -> None:
    state = MemoryState()
    assert state.load() is None
    memory = bytearray(b"abc")
    state.save(memory)
    memory[:] = b"zzz"
    assert state.load() == b"abc"


def test_each_worker_has_its_place_in_the_job(tmp_path: Path) -> None:
    environ = {"UNIRUN_SOCKET": str(tmp_path / "agent.sock")}
    assert job_folder(environ) == tmp_path
    assert job_folder({}) is None
    state_of(environ, "actor", 3).save(b"three")
    state_of(environ, "actor", 2).save(b"two")
    assert (tmp_path / "state" / "actor.3").read_bytes() == b"three"
    assert state_of(environ, "actor", 2).load() == b"two"
    assert state_of({}, "actor", 3).load() is None
