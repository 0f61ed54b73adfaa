"""A rank of a trainer: what its function finds of the order, what it leaves, and its process groups."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard

from tests.waiting import WAIT_TIMEOUT
from unirun import train
from unirun.errors import UsageError, WorkerLost
from unirun.roles import MasterHandle
from unirun.roles.context import Context
from unirun.roles.peers import Peers, RoleInfo
from unirun.train import functions
from unirun.train import worker as module
from unirun.train.checkpoints import CheckpointStrategy, Folder, Info
from unirun.train.checkpoints.state import load
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.setup import Backend
from unirun.train.task import Attempt, RunTask
from unirun.train.worker import TrainWorker
from unirun.wire.messages import RoleView, View, Welcome

pytestmark = pytest.mark.leaves

Make = Callable[..., TrainWorker]


class Hooks(Backend):
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_start(self, rank: int, world_size: int) -> None:
        self.told.append(("start", rank, world_size))

    def on_failure(self, rank: int, world_size: int) -> None:
        self.told.append(("failure", rank, world_size))

    def on_shutdown(self) -> None:
        self.told.append(("shutdown",))

    def encode_data(self, data: Any) -> Any:
        return "encoded", data


@pytest.fixture
def told() -> list[Any]:
    """The messages of the rank to its agent."""
    return []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> Iterator[Make]:
    made: list[TrainWorker] = []

    def rank_of(rank: int, world: int) -> TrainWorker:
        view = RoleView("worker", world, 0, "h:1", "running", ())
        welcome = Welcome(View((view,)), "{}", "job", (), (), 60.0, "socket")
        peers = Peers("worker", rank, {"worker": RoleInfo("worker", world, 0)}, welcome=welcome)
        monkeypatch.setattr(peers, "tell", told.append)
        context = Context({"LOCAL_RANK": str(rank + 10)}, peers)
        monkeypatch.setattr(module, "init", lambda: context)
        monkeypatch.setattr(module, "find_backend", lambda name, timeout: Hooks)
        config: Any = SimpleNamespace(backend="hooks", group_timeout=1.0, logging=None)
        made.append(TrainWorker(MasterHandle(context), config))
        made[-1].setup()
        return made[-1]

    yield rank_of
    for each in made:
        each.teardown()


def order(function: Callable[..., Any], url: Path, **more: Any) -> RunTask:
    return replace(RunTask(function, [], False, {}, {}, str(url), CheckpointStrategy()), **more)


def checkpoint(folder: Path, number: int, state: dict[str, Any]) -> Info:
    writer = CheckpointWriter(Folder(str(folder)), CheckpointStrategy(), 0, 1, number)
    writer.save(state, {})
    (info,) = writer.commit(number).result(WAIT_TIMEOUT)
    writer.close()
    return info


def test_a_function_finds_its_place_and_all_that_is_ordered(
    make: Make, tmp_path: Path, told: list[Any]
) -> None:
    def function(config: Any) -> Any:
        train.report(loss=0.5, name="x")
        found = train.world_rank(), train.world_size(), train.local_rank()
        return found, config, train.config(), [*train.get_dataset_shard("it")]

    worker = make(1, 2)
    asked = order(function, tmp_path, takes_config=True, config={"lr": 0.1}, datasets={"it": range(4)})
    found = ((1, 2, 11), {"lr": 0.1}, {"lr": 0.1}, [1, 3])
    assert worker.run(Attempt(1, 0, 0), asked) == ("encoded", found)
    (metrics,) = told
    assert metrics.values == {"training_iteration": 1.0, "loss": 0.5}
    assert metrics.time > 1e9
    assert worker.run(Attempt(2, 0, 0), order(lambda *given: given, tmp_path)) == ("encoded", ())


def test_a_function_goes_on_from_what_is_ordered(make: Make, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    checkpoint(own, 2, {"from": "own"})
    checkpoint(other, 5, {"from": "other"})
    worker = make(1, 2)

    def found(attempt: int, resume: Any) -> Any:
        return worker.run(Attempt(attempt, 0, 0), order(train.load_checkpoint, own, resume=resume))[1]

    resumes = (None, 2, (str(other), 5), {"from": "memory"})
    assert [found(attempt, resume) for attempt, resume in enumerate(resumes, 1)] == [
        None,
        {"from": "own"},
        {"from": "other"},
        {"from": "memory"},
    ]


def test_its_checkpoints_follow_those_that_are_kept(make: Make, tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, 3, {"step": 3})

    def function() -> None:
        # Random numbers are drawn as after the checkpoints before it.
        assert functions.session()._saves == 3
        train.save_checkpoint(step=4, score=0.5)

    worker, strategy = make(0, 2), CheckpointStrategy(1, "score")
    worker.run(Attempt(1, 0, 0), order(function, tmp_path, number=4, kept=[kept], strategy=strategy))
    said = worker.take(1, 1)
    assert not isinstance(said, str)
    assert (said.ended, said.pending, said.saves) == (True, 4, 1)
    folder = Folder(str(tmp_path))
    assert worker.commit(1, 4) == [Info(4, folder.path(4), 0.5)]
    assert folder.manifest(4).world_size == 2
    assert load(folder, folder.manifest(4), None) == {"step": 4, "score": 0.5}
    assert worker.commit(0, 4) is None


def test_what_was_not_finished_is_deleted_and_the_attempt_that_wrote_it_is_over(
    make: Make, tmp_path: Path
) -> None:
    checkpoint(tmp_path, 1, {"step": 1})
    worker = make(0, 1)
    worker.run(Attempt(1, 0, 0), order(lambda: train.save_checkpoint(step=2), tmp_path, number=2))
    assert worker.checkpoints(str(tmp_path), None)[1] == 3
    worker.clear(str(tmp_path))
    assert worker.take(1, 1) == "another attempt has begun"
    (info,), number = worker.checkpoints(str(tmp_path), None)
    assert (info.number, number) == (1, 2)
    assert worker.checkpoints(str(tmp_path), 1) == ([], 2)


def test_a_traceback_of_its_function_shows_the_lines_of_a_cell(make: Make, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile("def function(): ...", "<cell of a rank>", "exec"), names)  # noqa: S102 - as a notebook does
    cell = ["def function(): ...\n"]
    make(0, 1).run(Attempt(1, 0, 0), order(names["function"], tmp_path, cell=cell))
    assert linecache.getlines("<cell of a rank>") == cell


def test_a_process_of_a_data_loader_that_ends_is_a_loss_of_the_rank_that_runs(
    make: Make, tmp_path: Path
) -> None:
    error = RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. ")

    def function() -> None:
        raise error

    worker = make(1, 2)
    with pytest.raises(
        WorkerLost, match="^worker:1 lost a process of a DataLoader, which was killed"
    ) as lost:
        worker.run(Attempt(1, 0, 0), order(function, tmp_path))
    assert (lost.value.worker, lost.value.__cause__) == ("worker:1", error)
    with pytest.raises(RuntimeError, match="is killed by signal") as raised:
        worker.execute(Attempt(2, 0, 1), function, (), {})
    assert raised.value is error


def test_its_backend_is_told_of_its_life_and_the_group_is_formed_once_after_each_failure(make: Make) -> None:
    worker = make(1, 2)
    hooks: Any = worker._backend
    formed: list[str] = []
    worker._anew = formed.append
    assert hooks.told == [("start", 1, 2)]
    worker.on_generation(0)
    assert hooks.told == [("start", 1, 2)]
    # The first attempt of a group may have failed in a rank that was called alone.
    for attempt, failed in enumerate((1, 1, 2), 2):
        worker.execute(Attempt(attempt, 0, failed), lambda: None, (), {})
    assert formed == ["again/1", "again/2"]
    worker.on_generation(1)
    worker.execute(Attempt(5, 1, 0), lambda: None, (), {})
    worker.execute(Attempt(6, 1, 2), lambda: None, (), {})
    assert formed == ["again/1", "again/2", "again/2"]
    worker.teardown()
    assert hooks.told == [("start", 1, 2), *[("failure", 1, 2)] * 4, ("shutdown",)]


def test_hooks_are_called_in_ranks_that_are_fresh_and_each_rank_has_the_object(make: Make) -> None:
    worker = make(1, 2)
    called: list[str] = []

    def prepare(attempt: int, fresh: list[int], kind: Any) -> Any:
        called.clear()
        worker.prepare(Attempt(attempt, 0, 0), lambda: called.append("hook"), kind, fresh, alone=False)
        return worker.execute(
            Attempt(attempt + 1, 0, 0), lambda *given, **more: [*given, more], (2,), {"a": 3}
        )

    assert (prepare(1, [1], lambda: "object"), called) == (["object", 2, {"a": 3}], ["hook"])
    assert (prepare(3, [0], None), called) == ([2, {"a": 3}], [])


class TestProcessGroups:
    @pytest.fixture
    def group(self) -> Iterator[None]:
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        yield
        if distributed.is_initialized():
            distributed.destroy_process_group()

    @pytest.mark.usefixtures("group")
    def test_a_sharded_checkpoint_has_one_that_ends_with_its_attempt(
        self, make: Make, tmp_path: Path
    ) -> None:
        model = torch.nn.Linear(2, 2)
        fully_shard(model)
        worker = make(0, 1)
        worker.run(Attempt(1, 0, 0), order(lambda: train.save_checkpoint(model=model), tmp_path))
        assert worker.commit(1, 1) == [Info(1, f"{tmp_path}/000001")]
        session: Any = worker._session
        made = session._writer._group
        assert distributed.get_backend(made) == "gloo"
        worker.clear(str(tmp_path))
        with pytest.raises(ValueError, match="Invalid process group"):
            distributed.destroy_process_group(made)
        # It may have ended with the others.
        module._end_group(made)
        distributed.destroy_process_group()
        module._end_group(made)

    def test_without_one_a_sharded_checkpoint_is_refused(self) -> None:
        with pytest.raises(
            UsageError, match="a sharded checkpoint needs a process group; use backend='torch'"
        ):
            module._gloo_group()

    @pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo", None])
    def test_all_waits_in_them_end_and_what_waits_for_a_gpu_is_aborted(
        self, monkeypatch: pytest.MonkeyPatch, backend: str | None
    ) -> None:
        ended: list[str] = []
        ours = SimpleNamespace(end_all=lambda: ended.append("all"))
        default = SimpleNamespace(abort=lambda: ended.append("aborted"))
        monkeypatch.setattr(module, "process_groups", lambda: ours)
        monkeypatch.setattr(distributed, "is_initialized", lambda: backend is not None)
        monkeypatch.setattr(distributed, "get_backend", lambda: backend)
        monkeypatch.setattr(distributed.distributed_c10d, "_get_default_group", lambda: default)
        module._end_groups()
        assert ended == ["all", "aborted"][: 1 + ("nccl" in (backend or ""))]
