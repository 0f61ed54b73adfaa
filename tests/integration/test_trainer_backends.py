"""Backends of packages: when their hooks are called, and what becomes of hooks that fail. Real workers, which the tests
share."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import variants
from tests.integration.harness import Unirun, gone, home_of
from tests.integration.warm import Warm, WarmUnirun
from tests.waiting import eventually
from unirun import train
from unirun.errors import RemoteTraceback, TrainingFailed
from unirun.train import Trainer

pytestmark = pytest.mark.usefixtures("warm_functions")

BACKEND = """
import os
from unirun.train import NoBackend

class Hooked(NoBackend):
    def on_start(self, rank, world_size):
        self.rank = rank
        note("on_start", rank, world_size)

    def on_failure(self, rank, world_size):
        note("on_failure", rank, world_size)

    def on_shutdown(self):
        note("on_shutdown", self.rank)

    def encode_data(self, data):
        if data == "cannot be encoded":
            raise LookupError("a bug in encode_data")
        return {"encoded by": os.getpid(), "data": data}

    def decode_data(self, data):
        if data["data"] == "cannot be decoded":
            raise LookupError("a bug in decode_data")
        return {**data, "decoded by": os.getpid()}

def note(hook, *more):
    with open(os.environ["HOOKS"], "a") as file:
        print(hook, *more, os.getpid(), file=file)
    if os.environ.get("FAIL") == hook:
        raise LookupError(f"a bug in {hook}")
"""


class Hooks:
    """The notes of hooks, line by line: the hook, the rank, what else it got, its process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new(self) -> list[tuple[str, ...]]:
        """The notes since the last time."""
        lines = [tuple(line.split()) for line in self.path.read_text().splitlines()]
        begin, self._read = self._read, len(lines)
        return sorted(lines[begin:])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Unirun]:
    """With an installed package that has a backend called ``hooked``."""
    made = WarmUnirun(tmp_path_factory.mktemp("backends"), warm)
    with home_of(made) as command, pytest.MonkeyPatch.context() as patch:
        packages = command.root / "packages"
        about = packages / "hookedbackend-1.0.dist-info"
        about.mkdir(parents=True)
        (packages / "hookedbackend.py").write_text(BACKEND)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hookedbackend\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[unirun.train.backends]\nhooked = hookedbackend:Hooked\n")
        patch.syspath_prepend(packages)
        patch.setenv("HOOKS", str(command.root / "hooks"))
        yield command
        sys.modules.pop("hookedbackend", None)


@pytest.fixture(scope="module")
def trainer(home: Unirun) -> Iterator[Trainer]:
    """Its hooks fail at the end only."""
    with Trainer(2, backend="hooked", env={"FAIL": "on_shutdown"}) as made:
        made.start()
        yield made


@pytest.fixture
def hooks(home: Unirun, trainer: Trainer) -> Hooks:
    """Those of one test."""
    found = Hooks(home.root / "hooks")
    found.new()
    return found


def dies(config: dict[str, str]) -> int:
    """Rank 1 is killed once."""
    mark = Path(config["mark"])
    if train.world_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def pids(trainer: Trainer) -> list[int]:
    return trainer.execute(os.getpid)


def test_each_worker_has_started_its_own_before_it_is_called(home: Unirun, trainer: Trainer) -> None:
    processes = pids(trainer)
    noted = Hooks(home.root / "hooks").new()
    begun = [("on_start", str(rank), "2") for rank in range(2)]
    assert [line[:3] for line in noted if line[0] == "on_start"][:2] == begun
    assert {*map(str, processes)} <= {line[3] for line in noted if line[0] == "on_start"}


def test_results_are_encoded_in_the_worker_and_decoded_here(trainer: Trainer) -> None:
    expected = [
        {"encoded by": pid, "data": rank, "decoded by": os.getpid()} for rank, pid in enumerate(pids(trainer))
    ]
    assert trainer.run(train.world_rank) == expected


def test_after_an_exception_of_the_function_each_rank_is_told_once_before_the_next_run(
    trainer: Trainer, hooks: Hooks
) -> None:
    def fails() -> None:
        raise LookupError("no data")

    with pytest.raises(LookupError, match="no data"):
        trainer.run(fails)
    assert hooks.new() == []
    trainer.run(train.world_rank)
    assert [line[:3] for line in hooks.new()] == [("on_failure", str(rank), "2") for rank in range(2)]
    trainer.run(train.world_rank)
    assert hooks.new() == []


def test_after_a_kill_the_new_one_is_started_and_all_are_told(
    trainer: Trainer, hooks: Hooks, tmp_path: Path
) -> None:
    before = pids(trainer)
    after = [each["data"] for each in trainer.run(dies, config={"mark": str(tmp_path / "killed")})]
    assert after[0] == before[0]
    assert after[1] != before[1]
    noted = hooks.new()
    assert [line for line in noted if line[0] == "on_start"] == [("on_start", "1", "2", str(after[1]))]
    told = {line[1:] for line in noted if line[0] == "on_failure"}
    assert told == {(str(rank), "2", str(pid)) for rank, pid in enumerate(after)}


@pytest.mark.parametrize("data", ["cannot be encoded", "cannot be decoded"])
def test_data_that_a_backend_cannot_change_ends_the_run_with_the_traceback_of_the_hook(
    trainer: Trainer, data: str
) -> None:
    hook = "encode_data" if data == "cannot be encoded" else "decode_data"

    def function() -> str:
        return data

    with pytest.raises(LookupError, match=f"a bug in {hook}") as raised:
        trainer.run(function)
    cause = raised.value.__cause__
    if hook == "encode_data":
        assert isinstance(cause, RemoteTraceback)
        assert 'raise LookupError("a bug in encode_data")' in str(cause)
    else:
        assert raised.traceback[-1].name == "decode_data"
    assert [each["data"] for each in trainer.run(train.world_rank)] == [0, 1]


def test_each_worker_ends_its_own_though_that_fails_and_the_traceback_is_shown(
    trainer: Trainer, hooks: Hooks, capfd: pytest.CaptureFixture[str]
) -> None:
    processes = pids(trainer)
    hooks.new()
    trainer.shutdown()
    assert hooks.new() == [("on_shutdown", str(rank), str(pid)) for rank, pid in enumerate(processes)]
    assert all(gone(pid, 5) for pid in processes)
    shown = eventually(lambda: capfd.readouterr().err, "something is shown")
    for rank in range(2):
        assert f"[worker:{rank}] LookupError: a bug in on_shutdown" in shown


@pytest.mark.parametrize("hook", variants("on_start", "on_failure"))
def test_a_worker_that_does_not_come_up_as_a_hook_fails_is_told_with_the_traceback_of_the_hook(
    home: Unirun, tmp_path: Path, capfd: pytest.CaptureFixture[str], hook: str
) -> None:
    message = rf"worker:[01] ended with exit code 1 \(LookupError: a bug in {hook}\)"
    with (
        Trainer(2, backend="hookedbackend:Hooked", env={"FAIL": hook}) as own,
        pytest.raises(TrainingFailed, match=message),
    ):
        own.run(dies, config={"mark": str(tmp_path / "killed")})
    shown = eventually(lambda: capfd.readouterr().err, "the traceback is shown")
    assert f"in {hook}\n" in shown
    assert re.search(rf"^\[worker:[01]\] LookupError: a bug in {hook}$", shown, re.MULTILINE)
