"""The session of a training function, in a worker and in plain python."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from tests.waiting import WAIT_TIMEOUT, eventually
from unirun import train
from unirun.errors import EncodingError, UsageError
from unirun.roles.interruption import Interrupted
from unirun.train import functions
from unirun.train.checkpoints import CheckpointStrategy, Folder, Manifest
from unirun.train.checkpoints.writer import CheckpointWriter
from unirun.train.data import Consumed
from unirun.train.lockstep import Reported
from unirun.train.session import Session


class Losses:
    """A user's object."""

    def __init__(self, losses: torch.Tensor) -> None:
        self.losses = losses


class Scalar:
    """The scalar of a library that says neither its size nor its number of elements."""

    def item(self) -> float:
        return 1.5


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain python, without what other tests have left."""
    monkeypatch.setattr(functions, "_alone", None)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(1, 4, 1, config={"lr": 0.1}, datasets={None: range(8), "other": range(4)})
    functions.enter(made)
    yield made
    functions.enter(None)
    made.close()


@pytest.mark.usefixtures("alone")
class TestInPlainPython:
    def test_it_is_rank_0_of_1(self) -> None:
        assert not train.in_worker()
        assert (train.world_rank(), train.local_rank(), train.world_size()) == (0, 0, 1)

    def test_reports_are_printed(self, capfd: pytest.CaptureFixture[str]) -> None:
        train.report(loss=0.5, epoch=1)
        assert capfd.readouterr().err == "report: loss=0.5, epoch=1\n"

    def test_a_dataset_is_the_one_that_is_given_for_that(self) -> None:
        assert [*train.get_dataset_shard(otherwise=range(3))] == [0, 1, 2]
        with pytest.raises(UsageError, match="this run has no dataset 'train'; it has none"):
            train.get_dataset_shard("train")

    def test_model_loader_and_optimizer_are_as_they_were(self) -> None:
        model, loader = torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.zeros(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert train.prepare_model(model) is model
        assert train.prepare_data_loader(loader) is loader
        assert train.prepare_optimizer(optimizer) is optimizer
        train.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad is not None


def test_the_metrics_of_the_job_have_a_report_of_each_second_and_the_last_one() -> None:
    now, told = [10.0], []
    made = Session(now=lambda: now[0], tell=lambda values: told.append(dict(values)))
    for step, seconds in enumerate((0.0, 0.4, 0.7)):
        now[0] = 10.0 + seconds
        made.report({"loss": torch.tensor(0.5), "name": "x", "step": step, "many": torch.zeros(2)})
        made._reports.clear()
    assert told == [{"training_iteration": 1.0, "loss": 0.5, "step": 0.0}]
    now[0] = 11.0
    made.report({"loss": float("nan")})
    made._reports.clear()
    assert told[1].keys() == {"training_iteration", "loss"}
    now[0] = 11.5
    made.report({"loss": 0.25})
    made.finish()
    assert told[2:] == [{"training_iteration": 5.0, "loss": 0.25}]
    made.close()


class TestInAWorker:
    def test_it_knows_its_place(self, session: Session) -> None:
        assert train.in_worker()
        assert (train.world_rank(), train.local_rank(), train.world_size()) == (1, 1, 4)
        assert train.config() == {"lr": 0.1}

    def test_it_has_its_part_of_each_dataset(self, session: Session) -> None:
        assert [*train.get_dataset_shard()] == [1, 5]
        assert [*train.get_dataset_shard("other")] == [1]
        assert train.get_dataset_shard() is train.get_dataset_shard()
        with pytest.raises(UsageError, match="it has None, 'other'"):
            train.get_dataset_shard("third")

    @pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "seed": 2, "block": 2}])
    def test_it_cannot_have_a_dataset_in_two_orders(self, session: Session, options: dict[str, Any]) -> None:
        shard = train.get_dataset_shard("other", shuffle=True, seed=2)
        with pytest.raises(UsageError) as raised:
            train.get_dataset_shard("other", **options)
        wanted = {"shuffle": False, "seed": 0, "block": 1024, **options}
        assert str(raised.value) == (
            f"dataset 'other' is asked for with {', '.join(f'{name}={value}' for name, value in wanted.items())}, and "
            "was before with shuffle=True, seed=2, block=1024; pass the same each time, or keep what the first call "
            "has returned"
        )
        assert train.get_dataset_shard("other", shuffle=True, seed=2) is shard
        assert train.get_dataset_shard() is not shard

    def test_an_order_that_was_refused_does_not_count(self, session: Session) -> None:
        with pytest.raises(UsageError, match="block: found 0"):
            train.get_dataset_shard(block=0)
        assert [*train.get_dataset_shard()] == [1, 5]

    def test_another_dataset_than_that_of_the_checkpoint_begins_with_the_state_alone(
        self, tmp_path: Path
    ) -> None:
        """As the error of `get_dataset_shard` says."""
        folder, manifest = Folder(str(tmp_path)), Manifest(1, 1, False, {}, {"": Consumed(samples=4)})
        datasets: dict[str | None, Any] = {None: [1, 2, 3]}
        with pytest.raises(
            UsageError, match="of another size than 3; .*in Trainer.run with a dict as the checkpoint"
        ):
            Session(datasets=datasets, resume=(folder, manifest)).shard(None)
        session = Session(datasets=datasets, resume={"epoch": 1})
        assert session.load(None) == {"epoch": 1}
        assert [*session.shard(None)] == [1, 2, 3]

    def test_a_loader_is_split(self, session: Session) -> None:
        loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=2)
        found = train.prepare_data_loader(loader)
        assert [batch.tolist() for (batch,) in found] == [[2, 3], [10, 11]]

    def test_a_loader_that_is_made_in_each_epoch_goes_on(self, session: Session) -> None:
        data = TensorDataset(torch.arange(16))
        epochs = []
        for _ in range(2):
            loader = train.prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True))
            epochs.append(torch.cat([batch for (batch,) in loader]).tolist())
        assert epochs[0] != epochs[1]
        assert loader is not train.prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
        assert loader is not train.prepare_data_loader(DataLoader(data, batch_size=2))


class TestReports:
    def test_they_are_taken_in_order_with_what_is_added(self, session: Session) -> None:
        train.report(loss=torch.tensor(2.5), name="x")
        said = session.take(1)
        assert (said.number, said.metrics["loss"], said.metrics["name"]) == (1, 2.5, "x")
        assert said.metrics["_timestamp"] > 1e9
        assert said.metrics["_time_this_iter_s"] >= 0
        assert "_data_wait" not in said.metrics

    def test_the_share_of_waiting_for_data_is_added_with_datasets(self, session: Session) -> None:
        for _ in train.get_dataset_shard():
            train.report()
            said = session.take(1)
            break
        assert 0 <= said.metrics["_data_wait"] <= 1

    def test_a_tensor_is_copied(self, session: Session) -> None:
        tensor = torch.zeros(3)
        train.report(values=tensor)
        tensor.fill_(1.0)
        said = session.take(1)
        assert said.metrics["values"].tolist() == [0.0] * 3

    def test_what_is_reported_is_that_of_the_moment_however_deep_it_is(self, session: Session) -> None:
        losses, array, tensor, seen = [0], numpy.zeros(2), torch.zeros(2), {1}
        train.report(losses=losses, array=array, deep={"tensors": [tensor]}, seen=seen)
        losses.append(1)
        array.fill(7)
        tensor.fill_(7)
        seen.add(2)
        said = session.take(1)
        found = said.metrics
        assert (found["losses"], found["array"].tolist(), found["seen"]) == ([0], [0.0] * 2, {1})
        assert found["deep"]["tensors"][0].tolist() == [0.0] * 2

    @pytest.mark.parametrize(
        ("value", "number"),
        [
            (torch.tensor([[2.5]]), 2.5),
            (torch.tensor(3, requires_grad=False), 3),
            (torch.tensor(0.5, requires_grad=True), 0.5),
            (numpy.float32(0.5), 0.5),
            (numpy.array([[3]]), 3),
            (numpy.bool_(True), True),
            (Scalar(), 1.5),
        ],
        ids=range(7),
    )
    def test_one_element_is_a_number_however_deep_it_is(
        self, session: Session, value: Any, number: float
    ) -> None:
        train.report(deep={"train": [value]}, plain=value)
        said = session.take(1)
        # A tensor of one element is equal to a number.
        for found in (*said.metrics["deep"]["train"], said.metrics["plain"]):
            assert (type(found), found) == (type(number), number)

    @pytest.mark.parametrize(
        "value",
        [
            torch.zeros(0),
            torch.arange(2),
            torch.ones(1, 2, requires_grad=True),
            numpy.zeros(0),
            numpy.zeros(2),
        ],
        ids=range(5),
    )
    def test_more_elements_and_none_are_copied_as_they_are(self, session: Session, value: Any) -> None:
        train.report(value=value)
        said = session.take(1)
        found = said.metrics["value"]
        assert type(found) is type(value)
        assert found is not value
        assert (found.shape, found.tolist()) == (value.shape, value.tolist())
        assert not getattr(found, "requires_grad", False)

    def test_what_cannot_be_copied_and_a_list_in_itself_are_reported_too(self, session: Session) -> None:
        # Only a tensor that was not computed is copied by deepcopy.
        computed, circle = Losses(torch.ones(1, requires_grad=True) * 2), [1]
        circle.append(circle)  # type: ignore[arg-type]
        train.report(computed=computed, circle=circle)
        said = session.take(1)
        assert said.metrics["computed"] is computed
        assert said.metrics["circle"][0] == 1

    def test_the_function_waits_when_it_is_two_ahead(self, session: Session) -> None:
        done = threading.Event()

        def function() -> None:
            for _ in range(3):
                session.report({})
            done.set()

        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        session.take(1)
        assert not done.is_set()
        session.take(2)
        assert done.wait(WAIT_TIMEOUT)
        thread.join()

    def test_after_the_last_one_comes_the_end(self, session: Session) -> None:
        train.report()
        session.finish()
        assert not session.take(1).ended
        assert session.take(2) == Reported(2, ended=True)

    def test_a_metric_that_cannot_be_sent_is_named(self, session: Session) -> None:
        with pytest.raises(
            EncodingError, match="^the metric 'lock' cannot be sent: TypeError: cannot pickle"
        ):
            train.report(loss=1.0, lock=[threading.Lock()])

    @pytest.mark.parametrize("name", ["_timestamp", "_mine"])
    def test_names_of_unirun_are_refused(self, session: Session, name: str) -> None:
        with pytest.raises(UsageError, match="begins with an underscore"):
            train.report(**{name: 1})

    def test_a_name_that_is_no_text_is_refused(self, session: Session) -> None:
        metrics: Any = {0: 0.5}
        with pytest.raises(UsageError, match="^the name of a metric is 0; give a text$"):
            train.report(metrics)


class TestACheckpointThatIsNotLoaded:
    """The function goes on from one, and begins anew."""

    SAID = r"goes on from a state, which the function has not loaded, so it begins anew; call load_checkpoint first"

    @pytest.fixture
    def going_on(self, tmp_path: Path) -> Iterator[Session]:
        made = Session(resume={"epoch": 1})
        functions.enter(made)
        yield made
        functions.enter(None)
        made.close()

    @pytest.mark.parametrize(
        "act", [lambda: train.report(), lambda: train.save_checkpoint(epoch=1)], ids=["report", "save"]
    )
    def test_it_is_told_once(
        self, going_on: Session, capfd: pytest.CaptureFixture[str], act: Callable[[], None]
    ) -> None:
        act()
        act()
        assert re.findall(self.SAID, capfd.readouterr().err) == [self.SAID]

    def test_its_path_is_told(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        resume = Folder(str(tmp_path)), Manifest(3, 1, False, {})
        Session(resume=resume).report({})
        assert f"goes on from {tmp_path}/000003, which" in capfd.readouterr().err

    def test_nothing_is_told_when_it_was_loaded(
        self, going_on: Session, capfd: pytest.CaptureFixture[str]
    ) -> None:
        train.load_checkpoint()
        train.save_checkpoint(epoch=1)
        train.report()
        assert capfd.readouterr().err == ""

    def test_nothing_is_told_where_there_is_nothing_to_load(
        self, going_on: Session, capfd: pytest.CaptureFixture[str]
    ) -> None:
        train.save_checkpoint()
        train.report()
        Session().report({})
        # Rank 0 may load it for all.
        Session(1, 2, resume={"epoch": 1}).report({})
        assert capfd.readouterr().err == ""


class TestInterrupts:
    def test_they_end_every_wait(self, session: Session) -> None:
        ended: list[str] = []

        def wait(action: Any) -> None:
            try:
                action()
            except Interrupted as error:
                ended.append(str(error))

        def report() -> None:
            for _ in range(9):
                session.report({})

        # Of another one: it would take the reports of this one.
        silent = Session()
        threads = [
            threading.Thread(target=wait, args=(lambda: silent.take(1),)),
            threading.Thread(target=wait, args=(report,)),
        ]
        for thread in threads:
            thread.start()
        for each in (session, silent):
            each.interrupt("another rank was lost")
        for thread in threads:
            thread.join(WAIT_TIMEOUT)
        assert ended == ["another rank was lost"] * 2
        with pytest.raises(Interrupted):
            train.save_checkpoint(epoch=1)

    def test_no_except_exception_catches_them(self) -> None:
        assert not issubclass(Interrupted, Exception)


def two_ahead(session: Session) -> None:
    """Report until that waits for the driver."""
    for _ in range(3):
        session.report({})


def second_of_one(session: Session) -> None:
    """Take two reports, of which one was made."""
    session.report({})
    session.take(1)
    session.take(2)


WAITS: dict[str, Callable[[Session], object]] = {
    "a driver": lambda session: session.take(1),
    "a driver with a report": second_of_one,
    "a function that is ahead": two_ahead,
}
WAKES: dict[str, Callable[[Session], object]] = {
    "a report": lambda session: session.report({}),
    "the end": lambda session: session.finish(),
    "an interrupt": lambda session: session.interrupt("lost"),
    "a driver that has a report": lambda session: session.take(2),
}
WOKEN = [
    *[(who, by) for who in [*WAITS][:2] for by in [*WAKES][:3]],
    *[("a function that is ahead", by) for by in [*WAKES][2:]],
]


@pytest.mark.parametrize(("who", "by"), WOKEN)
def test_who_waits_is_woken_by_whatever_ends_the_wait(who: str, by: str) -> None:
    session, over = Session(), threading.Event()

    def wait() -> None:
        with contextlib.suppress(Interrupted):
            WAITS[who](session)
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    waiters: Any = session._changed
    eventually(lambda: waiters._waiters, "it waits")
    WAKES[by](session)
    assert over.wait(WAIT_TIMEOUT / 4)


class TestRandomNumbers:
    def test_a_run_that_goes_on_has_those_of_a_run_that_was_not_killed(self, tmp_path: Path) -> None:
        def run(first: int, last: int) -> list[float]:
            folder = Folder(str(tmp_path))
            writer = CheckpointWriter(folder, CheckpointStrategy(), 0, 1, first)
            resume = (folder, folder.manifest(first - 1)) if first > 1 else None
            session = Session(writer=writer, resume=resume, saves=first - 1)
            functions.enter(session)
            try:
                train.enable_reproducibility(7)
                torch.rand(5)
                state = train.load_checkpoint()
                found = []
                for epoch in range(state["epoch"] + 1 if state else 1, last + 1):
                    found.append(float(torch.rand(1)))
                    train.save_checkpoint(epoch=epoch)
                    session.commit(epoch).result(WAIT_TIMEOUT)
                return found
            finally:
                functions.enter(None)
                session.close()
                assert not torch.are_deterministic_algorithms_enabled(), "as before the function"

        whole = run(1, 6)
        for number in (5, 6):
            Folder(str(tmp_path)).remove(number)
        assert whole[4:] == run(5, 6)
        assert len({*whole}) == 6


def test_loaders_with_other_batches_of_one_dataset_have_their_own_parts() -> None:
    data: Any = TensorDataset(torch.arange(8))
    samplers = (
        BatchSampler(RandomSampler(data), 4, drop_last=False),
        BatchSampler(SequentialSampler(data), 2, drop_last=False),
    )
    session = Session()
    first, second = (session.adopt(DataLoader(data, batch_sampler=each)) for each in samplers)
    assert [len(batch[0]) for batch in first] == [4, 4]
    assert [batch[0].tolist() for batch in second] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # In the next epoch it is made again.
    again = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, drop_last=False))
    assert session.adopt(again) is second
    session.close()


def test_each_seed_has_an_order_of_its_own() -> None:
    orders = []
    for seed in (0, 1, 1, 2):
        session = Session(datasets={None: range(100)})
        orders.append([*session.shard(None, shuffle=True, seed=seed)])
        session.close()
    assert orders[1] == orders[2]
    assert len({*map(tuple, orders)}) == 3
    assert all(sorted(order) == [*range(100)] for order in orders)


def test_a_run_that_goes_on_has_what_is_left_of_each_dataset_and_loader(folder: Folder) -> None:
    def sources(session: Session) -> list[Any]:
        loaders = [DataLoader(TensorDataset(torch.arange(size)), batch_size=2) for size in (12, 20)]
        return [
            session.shard("a", shuffle=True, seed=3),
            session.shard("b", shuffle=True, block=2),
            *map(session.adopt, loaders),
        ]

    def samples(source: Any, count: int | None = None) -> list[Any]:
        each = source if isinstance(source, Iterator) else iter(source)
        found = [next(each) for _ in range(count)] if count is not None else [*each]
        return [one[0].tolist() if isinstance(one, list) else one for one in found]

    datasets: dict[str | None, Any] = {"a": range(9), "b": range(100, 110)}
    whole = [samples(source) for source in sources(Session(datasets=datasets))]
    writer = CheckpointWriter(folder, CheckpointStrategy(), 0, 1, 1)
    session = Session(datasets=datasets, writer=writer)
    under_way = [iter(source) for source in sources(session)]
    before = [samples(source, 1 + number) for number, source in enumerate(under_way)]
    session.save({})
    session.commit(1).result(WAIT_TIMEOUT)
    session.close()
    resumed = Session(datasets=datasets, resume=(folder, folder.manifest(1)))
    after = [samples(source) for source in sources(resumed)]
    assert [one + other for one, other in zip(before, after, strict=True)] == whole
    resumed.close()


class Gathering:
    """An object whose state dict takes long, as that of a model of which each rank has a part."""

    made = 0

    def state_dict(self) -> dict[str, int]:
        self.made += 1
        return {"made": self.made}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_dict_is_made_once_for_each_checkpoint(tmp_path: Path, rank: int) -> None:
    writer = CheckpointWriter(Folder(str(tmp_path)), CheckpointStrategy(), rank, 2, 1)
    session, model = Session(rank, 2, writer=writer), Gathering()
    for number in (1, 2):
        session.save({"model": model})
        assert model.made == number
    session.report({})
    said = session.take(1)
    assert (said.saves, [*said.outline]) == (2, ["model"])
    session.close()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "run"))


def test_files_of_a_rank_are_saved_with_its_state_and_found_when_the_run_goes_on(
    folder: Folder, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("mine")
    writer = CheckpointWriter(folder, CheckpointStrategy(), 0, 1, 1)
    session = Session(writer=writer)
    session.save({"epoch": 1}, tmp_path / "note.txt")
    session.commit(1).result(WAIT_TIMEOUT)
    assert session.files(0) is None
    session.report({})
    said = session.take(1)
    assert (said.saves, said.together) == (1, True)
    session.close()
    resumed = Session(resume=(folder, folder.manifest(1)))
    place = resumed.files(0)
    assert place is not None
    assert (place / "note.txt").read_text() == "mine"
    assert resumed.files(1) is None
    functions.enter(resumed)
    assert train.checkpoint_files() == train.checkpoint_files(0) == place
    assert train.checkpoint_files(1) is None
    functions.enter(None)
    resumed.close()


def test_a_function_that_asks_stops_when_its_process_is_told_to_end_and_that_ends_once_its_checkpoint_counts(
    folder: Folder,
) -> None:
    ends: list[list[int]] = []

    def end(number: int, frame: Any) -> None:
        ends.append(folder.numbers())

    writer = CheckpointWriter(folder, CheckpointStrategy(), 0, 1, 1)
    session, before = Session(writer=writer), signal.signal(signal.SIGTERM, end)
    try:
        assert [session.should_stop() for _ in range(2)] == [False, False]
        signal.raise_signal(signal.SIGTERM)
        assert session.should_stop()
        session.save({"epoch": 1})
        assert ends == []
        session.leave_as_told()
        assert [info.number for info in folder.infos()] == [1]
        assert ends == [[1]]
    finally:
        signal.signal(signal.SIGTERM, before)
        session.close()


def test_each_question_whether_to_stop_has_its_number_in_the_attempt(session: Session) -> None:
    class Asked:
        """Notes the questions, which ranks match by their numbers."""

        stopped = False

        def __init__(self) -> None:
            self.numbers: list[tuple[int, int]] = []

        def should_stop(self, number: int, attempt: int) -> bool:
            self.numbers.append((number, attempt))
            return False

        def close(self) -> None: ...

    asked = Asked()
    session.attempt, session._stopping = 3, asked  # type: ignore[assignment]
    for _ in range(3):
        assert not train.should_stop()
    assert asked.numbers == [(1, 3), (2, 3), (3, 3)]
