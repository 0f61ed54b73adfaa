"""The functions that a training function calls, in real workers: models, loaders, optimizers, precision,
datasets of every kind, and what is told of its mistakes. The tests share the workers, as these stay warm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.integration.harness import Unirun
from unirun import train
from unirun.errors import EncodingError, TrainingFailed, UsageError
from unirun.train import Files, Loader, Trainer, kfold

pytestmark = pytest.mark.usefixtures("warm_functions")

SAMPLES = 60


@pytest.fixture(scope="module")
def trainer(home: Unirun) -> Iterator[Trainer]:
    with Trainer(2, max_failures=1) as made:
        made.start()
        yield made


def gathered(mine: Any) -> list[Any]:
    """The values that each rank has passed, in rank order."""
    found: list[Any] = [None] * train.world_size()
    dist.all_gather_object(found, mine)
    return found


def dies_once(mark: str) -> None:
    """Kill the last rank, the first time."""
    if train.world_rank() == train.world_size() - 1 and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


class TestModels:
    def test_ranks_learn_the_same_from_different_data(self, trainer: Trainer) -> None:
        def function() -> Any:
            torch.manual_seed(train.world_rank())
            model = train.prepare_model(torch.nn.Linear(3, 1))
            optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            losses = []
            for _ in range(5):
                loss = (model(torch.rand(8, 3)) - 1.0).square().mean()
                optimizer.zero_grad()
                train.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            (weight, bias) = train.unwrap(model).parameters()
            return type(model).__name__, weight.tolist(), bias.tolist(), losses

        (kind, *first, losses), (_, *second, others) = trainer.run(function)
        assert kind == "DistributedDataParallel"
        assert first == second
        assert losses != others
        assert losses[-1] < losses[0]

    def test_a_model_computes_in_the_precision_that_was_asked_for_and_the_next_run_does_not(
        self, trainer: Trainer
    ) -> None:
        def function(config: dict[str, Any]) -> Any:
            inside: list[torch.dtype] = []

            class Net(torch.nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.linear = torch.nn.Linear(4, 4)

                def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                    y = self.linear(x)
                    inside.append(y.dtype)
                    return {"y": y}

            train.accelerate(config["amp"])
            model = train.prepare_model(Net())
            optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            y = model(torch.ones(2, 4))["y"]
            train.backward(y.sum())
            optimizer.step()
            weight = next(model.parameters())
            assert weight.grad is not None
            return [str(each) for each in (inside[0], y.dtype, weight.dtype, weight.grad.dtype)]

        half, whole = ["torch.bfloat16", *["torch.float32"] * 3], ["torch.float32"] * 4
        for amp, expected in (("bf16", half), (None, whole), (True, half), (False, whole)):
            assert trainer.run(function, config={"amp": amp}) == [expected] * 2

    def test_a_model_and_its_optimizer_go_on_from_a_checkpoint_after_a_kill(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        def function(config: dict[str, Any]) -> Any:
            torch.manual_seed(1)
            model = train.prepare_model(torch.nn.Linear(2, 1))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = train.load_checkpoint(into={**parts, "step": -1})
            for step in range(state["step"] + 1 if state else 0, 6):
                train.backward(model(torch.ones(1, 2)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if step == 3 and config["mark"]:
                    dies_once(config["mark"])
                train.save_checkpoint(**parts, step=step)
                train.report(step=step)
            return [p.tolist() for p in model.parameters()], scheduler.get_last_lr()

        killed = trainer.run(function, config={"mark": str(tmp_path / "killed")})
        assert (tmp_path / "killed").exists()
        assert killed == trainer.run(function, config={"mark": ""})

    @pytest.mark.chaos
    @pytest.mark.timeout(300)
    def test_what_four_ranks_have_saved_in_parts_loads_on_two_and_on_eight(self, home: Unirun) -> None:
        def function() -> Any:
            torch.manual_seed(3)
            model = train.prepare_model(torch.nn.Linear(10, 6), parallel="fsdp")
            optimizer = torch.optim.Adam(model.parameters())
            state = train.load_checkpoint(into={"model": model, "optimizer": optimizer})
            if state is None:
                model(torch.ones(1, 10)).sum().backward()
                optimizer.step()
                train.save_checkpoint(model=model, optimizer=optimizer)
                train.report()
            parts = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]
            return [part.full_tensor().tolist() for part in parts]

        with Trainer(4) as four:
            saved, *_ = four.run(function)
            path = four.latest_checkpoint
        for ranks in (2, 8):
            with Trainer(ranks) as other:
                assert other.run(function, checkpoint=path) == [saved] * ranks


class Rows:
    """A dataset as Hugging Face's are: rows are dicts, several of them are read at once, columns have names."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int | str) -> Any:
        return [*range(SAMPLES)] if isinstance(key, str) else {"id": key, "text": f"row {key}"}

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [{**self[key], "at once": len(keys)} for key in keys]


class Shards:
    """A stream as Hugging Face's are: it can skip, and has another order in each epoch."""

    def __init__(self, begin: int = 0) -> None:
        self.begin, self.epoch = begin, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, count: int) -> Shards:
        return Shards(self.begin + count)

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.begin, SAMPLES):
            yield {"id": (number + 7 * self.epoch) % SAMPLES}


class TestDatasets:
    def test_each_sample_of_a_dataloader_is_used_once_though_a_rank_is_killed(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        def function(config: dict[str, str]) -> list[int]:
            dataset = TensorDataset(torch.arange(SAMPLES))
            loader = train.prepare_data_loader(DataLoader(dataset, batch_size=4, shuffle=True))
            state = train.load_checkpoint()
            used: list[int] = [*state["used"]] if state else []
            assert isinstance(loader, Loader)
            # What is left of an epoch may be nothing: it was not ended by the loop.
            for _ in range(loader.shard.progress.epoch, 2):
                for (batch,) in loader:
                    used += [sample for each in gathered(batch.tolist()) for sample in each]
                    if len(used) > SAMPLES + 10:
                        dies_once(config["mark"])
                    train.save_checkpoint(used=used)
                    train.report(used=len(used))
            return used

        used = trainer.run(function, config={"mark": str(tmp_path / "killed")})[0]
        assert (tmp_path / "killed").exists()
        assert sorted(used[:SAMPLES]) == sorted(used[SAMPLES:]) == [*range(SAMPLES)]
        assert used[:SAMPLES] != used[SAMPLES:]

    @pytest.mark.parametrize("processes", [0, 1])
    def test_lines_of_files_are_read_as_a_stream_and_each_is_used_once_though_a_rank_is_killed(
        self, trainer: Trainer, tmp_path: Path, processes: int
    ) -> None:
        """Also by a process of the loader. The last file has more lines than all others together."""
        for number, count in enumerate([3, 0, 5, 1, 4, 40]):
            path = tmp_path / f"part{number}.txt"
            path.write_text("".join(f"{number}.{line}\n" for line in range(count)))

        def function(config: dict[str, Any]) -> list[str]:
            state = train.load_checkpoint()
            used: list[str] = [*state["used"]] if state else []
            batches = iter(train.get_dataset_shard().to_torch(3, num_workers=config["processes"]))
            # Ranks may have different numbers of batches.
            while any(found := gathered(next(batches, None))):
                used += [line for each in found for line in each or ()]
                if len(used) > 20:
                    dies_once(config["mark"])
                train.save_checkpoint(used=used)
                train.report(used=len(used))
            return used

        config = {"mark": str(tmp_path / "killed"), "processes": processes}
        used = trainer.run(function, config=config, dataset=Files(f"{tmp_path}/part*.txt"))[0]
        assert (tmp_path / "killed").exists()
        lines = [line for path in tmp_path.glob("part*") for line in path.read_text().split()]
        assert sorted(used) == sorted(lines)

    def test_two_datasets_go_on_each_where_it_was(self, trainer: Trainer) -> None:
        def function(config: dict[str, int]) -> Any:
            large, small = (train.get_dataset_shard(name) for name in ("large", "small"))
            found: tuple[list[int], list[int]] = [], []
            for shard, mine, count in (
                (large, found[0], config["large"]),
                (small, found[1], config["small"]),
            ):
                for sample in shard:
                    mine.append(sample)
                    if len(mine) == count:
                        break
            train.save_checkpoint()
            return found

        datasets = {"large": range(10), "small": [*"abcdef"]}
        first = trainer.run(function, config={"large": 3, "small": 1}, dataset=datasets)
        assert first == [([0, 2, 4], ["a"]), ([1, 3, 5], ["b"])]
        rest = trainer.run(
            function,
            config={"large": 0, "small": 0},
            dataset=datasets,
            checkpoint=trainer.latest_checkpoint,
        )
        assert rest == [([6, 8], ["c", "e"]), ([7, 9], ["d", "f"])]

    def test_rows_of_hugging_face_are_collated_and_read_several_at_once(self, trainer: Trainer) -> None:
        def function() -> Any:
            batches = [*train.get_dataset_shard(shuffle=True).to_torch(5)]
            assert all(
                batch["at once"].tolist() == [len(batch["id"])] * len(batch["id"]) for batch in batches
            )
            assert all(
                batch["text"] == [f"row {number}" for number in batch["id"].tolist()] for batch in batches
            )
            return [number for batch in batches for number in batch["id"].tolist()]

        first, second = trainer.run(function, dataset=Rows())
        assert sorted(first + second) == [*range(SAMPLES)]
        assert len(first) == len(second)
        assert first != sorted(first)

    def test_streams_of_hugging_face_skip_what_is_used_and_have_epochs(self, trainer: Trainer) -> None:
        def function(config: dict[str, int]) -> Any:
            shard = train.get_dataset_shard()
            first = []
            for row in shard:
                first.append(row["id"])
                if len(first) == config["until"]:
                    break
            train.save_checkpoint()
            if config["until"]:
                return first
            return first, [row["id"] for row in shard]

        begun = trainer.run(function, config={"until": 20}, dataset=Shards())
        assert begun == [[*range(0, 40, 2)], [*range(1, 40, 2)]]
        latest = trainer.latest_checkpoint
        left = trainer.run(function, config={"until": 0}, dataset=Shards(), checkpoint=latest)
        assert [each[0] for each in left] == [[*range(40, SAMPLES, 2)], [*range(41, SAMPLES, 2)]]
        assert sorted(left[0][1] + left[1][1]) == [*range(SAMPLES)]
        assert left[0][1][:3] == [7, 9, 11], "in the order of the second epoch"

    def test_each_sample_is_for_validation_in_one_fold_of_one_rank(self, trainer: Trainer) -> None:
        def function() -> Any:
            return [[*train.get_dataset_shard(name)] for name in ("train", "valid")]

        validated: list[int] = []
        for fold in kfold(range(SAMPLES), 5, seed=2):
            found = trainer.run(function, dataset=dict(zip(("train", "valid"), fold, strict=True)))
            trained, valid = ([sample for each in found for sample in each[part]] for part in (0, 1))
            assert sorted(trained + valid) == [*range(SAMPLES)]
            validated += valid
        assert sorted(validated) == [*range(SAMPLES)]

    def test_a_slow_reader_is_seen_in_the_reports_and_a_slow_step_is_none(self, trainer: Trainer) -> None:
        class Slow:
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> int:
                time.sleep(0.05)
                return index

        def function() -> None:
            for _ in train.get_dataset_shard("slow"):
                train.report()
            for _ in train.get_dataset_shard("fast"):
                time.sleep(0.05)
                train.report()

        datasets = {"slow": Slow(), "fast": range(8)}
        waits = [
            [each["_data_wait"] for each in results]
            for results in trainer.run_iterator(function, dataset=datasets)
        ]
        assert len(waits) == 8
        assert min(share for round_ in waits[:4] for share in round_) > 0.5
        assert max(share for round_ in waits[4:] for share in round_) < 0.5


class TestMistakes:
    def test_a_metric_with_a_name_of_unirun_ends_the_run(self, trainer: Trainer) -> None:
        def function() -> None:
            train.report(_loss=1)

        with pytest.raises(UsageError, match="the metric '_loss' begins with an underscore"):
            trainer.run(function)
        assert trainer.run(train.world_rank) == [0, 1]

    def test_a_metric_that_cannot_be_sent_ends_the_run(self, trainer: Trainer) -> None:
        def function() -> None:
            train.report(lock=threading.Lock())

        with pytest.raises(EncodingError, match="the metric 'lock' cannot be sent: TypeError: cannot pickle"):
            trainer.run(function)
        assert trainer.run(train.world_rank) == [0, 1]

    def test_a_dataset_that_the_run_does_not_have_is_told_with_those_that_it_has(
        self, trainer: Trainer
    ) -> None:
        def function() -> None:
            train.get_dataset_shard("test")

        with pytest.raises(UsageError, match="this run has no dataset 'test'; it has 'train', 'valid'"):
            trainer.run(function, dataset={"train": [1], "valid": [2]})

    def test_a_state_that_cannot_be_saved_ends_the_run(self, trainer: Trainer) -> None:
        def function() -> None:
            train.save_checkpoint(lock=threading.Lock())
            train.report(step=1)

        with pytest.raises(UsageError, match="^lock cannot be saved: TypeError: cannot pickle"):
            trainer.run(function)
        assert trainer.latest_checkpoint is None

    def test_a_loader_that_cannot_be_split_ends_the_run(self, trainer: Trainer) -> None:
        def function() -> None:
            train.prepare_data_loader(DataLoader(range(4), drop_last=True))  # type: ignore[arg-type]

        with pytest.raises(UsageError, match=r"dataset 'loader 0': the DataLoader has drop_last=True"):
            trainer.run(function)

    def test_a_worker_that_the_system_ends_again_and_again_is_a_failure_that_names_it(
        self, trainer: Trainer
    ) -> None:
        def function() -> None:
            if train.world_rank() == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            dist.barrier()

        with pytest.raises(TrainingFailed, match="worker:1.*; that is failure 2, and max_failures is 1"):
            trainer.run(function)
        assert trainer.run(train.world_rank) == [0, 1]
