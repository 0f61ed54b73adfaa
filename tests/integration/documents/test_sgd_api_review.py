"""The programs of the "SGD API Review" of RaySGD run here, on two ranks and small data.

Not run: "Alternative APIs" and "Other considered options", which the review has not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from unirun import train as sgd
from unirun.errors import UsageError
from unirun.train import ProgressCallback, TorchConfig, Trainer

from .programs import Differs, run

pytestmark = pytest.mark.usefixtures("warm_functions", "home")

ONE_REPEATED = "a result for each rank, in rank order"

CLUSTER = {"placement": "fake:nodes=1,devices=16"}
"""Two ranks on devices that are not there, so torch computes on the CPU."""

PLACES = Differs("num_workers=8", "num_workers=2", "two ranks are enough here")


def fit(model: Any, optimizer: Any, loader: Any) -> dict[str, float]:
    """The loop that the review calls ``train``."""
    for (x,) in loader:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return {"loss": loss.item()}


DATA = [[float(number), 1.0] for number in range(50)]


class Data:
    """Stands for ``ray.dataset``: a pipeline is a list of samples."""

    def filter(self) -> Data:
        return self

    def pipeline(self, length: int = 50, **_: Any) -> Any:
        return [torch.tensor(row) for row in DATA[:length]]

    def to_cv(self, splits: int) -> Any:
        return sgd.to_cv(self.pipeline(), splits=splits)


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The names that the review takes for granted. It does not end all of its trainers, so they end here."""
    made: list[Trainer] = []

    def trainer(*args: Any, **kwargs: Any) -> Trainer:
        made.append(Trainer(*args, **{**CLUSTER, **kwargs}))
        return made[-1]

    yield {
        "ray": SimpleNamespace(sgd=sgd, dataset=Data()),
        "torch": torch,
        "Net": net,
        "train": fit,
        "train_loader": DataLoader(TensorDataset(torch.rand(16, 2)), batch_size=4),
        "Trainer": trainer,
        "TorchConfig": TorchConfig,
        "DistributedDataParallel": DistributedDataParallel,
        "ProgressCallback": ProgressCallback,
        "inf": math.inf,
    }
    for each in made:
        each.shutdown()


GENERAL = """
def train_func(config):  # user always needs "config"
    model = Net()
    optimizer = torch.optimizer.SGD()
    model.cuda()
    DistributedDataParallel(...)

    # ray.sgd._local_rank() # not sure if we should expose
    torch.local_rank()  # if backend is pytorch
    hvd.cross_rank()  # if backend is horovod

    # Potentially add DistributedSampler here
    train_loader.sampler = DistributedSampler(...)
    for _ in config["epoch"]:
        train(model, optimizer, train_loader)
    return model, results


trainer = Trainer(num_workers=8, cpus_per_worker=2, gpus_per_worker=2, backend_args=TorchConfig())
print(trainer)
# prints a table of resource usage

model, result = trainer.run(train_func, config={...})
trainer.shutdown()
"""


def test_general_model_training(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = run(
        GENERAL,
        names,
        PLACES,
        Differs("torch.optimizer.SGD()", "torch.optim.SGD(model.parameters(), 0.01)", "torch has it there"),
        Differs("model.cuda()", "model.to(ray.sgd.device())", "there is no GPU here"),
        Differs("DistributedDataParallel(...)", "model = DistributedDataParallel(model)", "a placeholder"),
        Differs("torch.local_rank()", "ray.sgd.local_rank()", "torch has no such function"),
        Differs("    hvd.cross_rank()  # if backend is horovod\n", "", "there is no horovod"),
        Differs(
            "train_loader.sampler = DistributedSampler(...)",
            "loader = ray.sgd.prepare_data_loader(train_loader)",
            "torch forbids to change the sampler of a loader",
        ),
        Differs(
            "        train(model, optimizer, train_loader)",
            "        results = train(model, optimizer, loader)",
            "the review does not say what results are",
        ),
        Differs("{...}", "{'epoch': range(2)}", "a placeholder"),
        Differs("model, result = trainer", "(model, result), *_ = trainer", ONE_REPEATED),
    )
    assert "Trainer of 2 workers with 2 GPUs and 2 CPUs each, backend torch" in capsys.readouterr().out
    # Without its wrapper.
    assert isinstance(found["model"], torch.nn.Linear)
    assert found["result"]["loss"] > 0


LARGE = """
# Preferred API
def train_func(config):
    batch_size = config["batch_size"]
    if ray.sgd.in_worker():
        dataloader = ray.sgd.get_dataset().get_split().to_torch(batch_size=batch_size)
    else:
        dataloader = get_dataset()
    ...
    return model

trainer = Trainer(num_workers=8, backend="torch")
dataset = ray.dataset.filter().pipeline(length=50) # do not call split!
trainer.run(train_func, config={}, dataset=dataset)

cv_splits = ray.dataset.to_cv(splits=5)

for train_set, val_set in cv_splits:
    result = trainer.run(train_func, dataset=train_set)
    result = trainer.run(train_func, dataset=val_set)
"""

SHARD = Differs("get_dataset().get_split()", "get_dataset_shard()", "one call: the part of this rank")


def test_a_large_dataset_and_cross_validation(names: dict[str, Any]) -> None:
    found = run(
        LARGE,
        names,
        PLACES,
        SHARD,
        Differs('config["batch_size"]', 'config.get("batch_size", 4)', "the review passes none"),
        Differs("    return model", "    return sum(len(batch) for batch in dataloader)", "a placeholder"),
        Differs("config={}, dataset", "config={'batch_size': 5}, dataset", "the review passes none"),
    )
    assert sum(found["result"]) == 10
    assert len(found["cv_splits"]) == 5


REPORTING = """
def train_func(config):
    ...
    for _ in config["epochs"]:
        metrics = train()
        metrics = validate(...)
        ray.sgd.report(**metrics)
    return model

# Higher level API
results = trainer.run(train_func, config=config, callbacks=[...])

# Lower-level generator API
generator = trainer.run_generator(train_func, config=config)

for result in generator:
    do_stuff(result)

assert generator.is_finished()
model = generator.get_returns()
"""


def test_intermediate_reporting(names: dict[str, Any]) -> None:
    done: list[Any] = []
    names |= {
        "trainer": names["Trainer"](2),
        "config": {"epochs": range(3)},
        "model": 7,
        "do_stuff": done.append,
        "train": lambda: {"loss": 1.0},
        "validate": lambda _: {"loss": 0.5},
    }
    found = run(
        REPORTING, names, Differs("callbacks=[...]", "callbacks=[ProgressCallback()]", "a placeholder")
    )
    assert found["results"] == found["model"] == [7, 7]
    assert [[each["loss"] for each in result] for result in done] == [[0.5, 0.5]] * 3


TUNING = """
def training_func(config):
    if ray.sgd.in_worker():
        dataloader = ray.sgd.get_dataset()\\
            .get_shard(torch.rank())\\
            .to_torch(batch_size=config["batch_size"])
    else:
        ...

    for i in epochs:
        ray.sgd.report(...)  # use same intermediate reporting API
    return model  # this is ignored in Tune?

# Declare the specification for training.
trainer = Trainer(gpus_per_worker=2, workers=12)
dataset = ray.dataset.pipeline()


# Convert this to a trainable.

# trainer.run(train_func, config={}, dataset=dataset)

trainable = trainer.to_trainable(training_func, dataset=dataset)
analysis = tune.run(trainable, config={
    "lr": tune.uniform(), "batch_size": tune.randint(1, 2, 3)}, num_samples=12)
"""


@pytest.mark.chaos
def test_hyperparameter_tuning(names: dict[str, Any]) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = run(
        TUNING,
        {**names, "epochs": range(2), "model": 7, "optuna": optuna},
        Differs(
            "get_dataset()\\\n            .get_shard(torch.rank())\\\n            .to_torch",
            "get_dataset_shard().to_torch",
            "one call: the part of this rank",
        ),
        Differs("report(...)", "report(loss=config['lr'] * i)", "a placeholder"),
        Differs("workers=12", "num_workers=2", "RaySGD has both names, and two ranks are enough here"),
        Differs(
            "trainer.to_trainable(training_func, dataset=dataset)",
            "trainer.to_trainable(training_func, {'lr': lambda trial: trial.suggest_float('lr', 0, 1), "
            "'batch_size': lambda trial: trial.suggest_int('batch_size', 1, 3)}, dataset=dataset)",
            "the space is that of Optuna",
        ),
        Differs(
            """tune.run(trainable, config={
    "lr": tune.uniform(), "batch_size": tune.randint(1, 2, 3)}, num_samples=12)""",
            "optuna.create_study(); analysis.optimize(trainable, n_trials=3)",
            "searches are those of Optuna; with Ray Tune the trainable is passed to ray.tune.Tuner",
        ),
    )
    assert len(found["analysis"].trials) == 3
    assert 0 <= found["analysis"].best_value <= 1


FOLDS = """
split1, split2, split3 = dataset.pipeline.to_cv()

def training_func(config):
    for index, (train_set, val_set) in enumerate(ray.sgd.get_datasets()):
        dataloader = train_set.get_split().to_torch()
        for x in dataloader:
            ...
            sgd.report(cv=index, mean_loss=loss)
    return model

trainer.run(training_func, dataset=(split1, split2, split3))
"""


def test_cross_validation_in_the_function(names: dict[str, Any]) -> None:
    names |= {"trainer": names["Trainer"](2), "sgd": sgd, "loss": 0.5, "model": 7}
    with pytest.raises(UsageError, match="dataset is a tuple of 3; give several datasets as a dict by name"):
        names["trainer"].run(lambda: None, dataset=([1], [2], [3]))
    found = run(
        FOLDS,
        names,
        Differs("dataset.pipeline.to_cv()", "ray.dataset.to_cv(splits=3)", "a stand-in for Ray's datasets"),
        Differs(
            "for index, (train_set, val_set) in enumerate(ray.sgd.get_datasets()):",
            "for index in range(3):",
            "a dataset has a name, by which a checkpoint knows its position",
        ),
        Differs(
            "train_set.get_split().to_torch()",
            "sgd.get_dataset_shard(f'train{index}').to_torch(batch_size=8)",
            "the size of batches is given",
        ),
        Differs(
            "trainer.run(training_func, dataset=(split1, split2, split3))",
            "models = trainer.run(training_func, dataset={"
            "f'train{index}': train_set for index, (train_set, _) in enumerate([split1, split2, split3])})",
            "several datasets are a dict by name",
        ),
    )
    assert found["models"] == [7, 7]


ELASTICITY = """
def train_func(*args)
    state = ray.sgd.load_checkpoint()
    # eventually, optional:
    for _ in config["num_epochs"]:
        train(...)
        # optional, eventually: ray.sgd.report(...)
        ray.sgd.save_checkpoint((model, optimizer, etc), files=False|True)
        validate(...)
    return model

trainer = Trainer(gpus_per_worker, cpus_per_worker, num_workers=(4, inf))
trainer.run(train_func)
state = trainer.get_last_checkpoint()
"""


def test_elasticity_and_checkpoints(names: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    model = torch.nn.Linear(1, 1)
    names |= {
        "config": {"num_epochs": range(2)},
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "etc": 5,
        "train": print,
        "validate": print,
        "directory": str(tmp_path),
    }
    found = run(
        ELASTICITY,
        names,
        Differs("(*args)", "():", "a colon is missing, and a function takes nothing, or config"),
        Differs("files=False|True", "files=directory", "what is added are files"),
        Differs(
            "gpus_per_worker, cpus_per_worker, num_workers=(4, inf)",
            "gpus_per_worker=1, cpus_per_worker=1, num_workers=(2, inf), placement='fake:nodes=2,devices=1'",
            "without values they are placeholders, and two ranks are enough here",
        ),
    )
    saved_model, saved_optimizer, etc = found["state"]
    assert (saved_model.keys(), etc) == ({"weight", "bias"}, 5)
    assert saved_optimizer["param_groups"][0]["lr"] == 0.1
    trainer = found["trainer"]
    assert trainer.result.checkpoint == trainer.latest_checkpoint
    assert Path(trainer.latest_checkpoint, "files.00001", "tokenizer.json").read_text() == "{}"


STRATEGIES = """
def train_func(config)
    model = Net()
    optimizer = torch.sgd()
    ...

    model = ray.sgd.accelerate(model, loss, mixed_precision=True, etc)
    for _ in config["epoch"]:
        train(model, optimizer, train_loader)
    return model
"""


def test_different_allocation_strategies(names: dict[str, Any]) -> None:
    found = run(
        STRATEGIES,
        names,
        Differs("(config)\n", "(config):\n", "a colon is missing"),
        Differs("    optimizer = torch.sgd()\n", "", "torch has no such function"),
        Differs(
            "model = ray.sgd.accelerate(model, loss, mixed_precision=True, etc)",
            "ray.sgd.accelerate(amp='bf16'); model = ray.sgd.prepare_model(model); "
            "optimizer = torch.optim.SGD(model.parameters(), 0.01)",
            "two calls: the precision, and the model in it",
        ),
    )
    model = found["train_func"]({"epoch": range(2)})
    assert model.weight.dtype == torch.float32


CLASS = """
trainer = Trainer(gpus_per_worker=4, num_workers=12, backend="horovod|pytorch")

trainer.start(ExecutionClass, args, kwargs)
trainer.execute(lambda w: w.train())
trainer.execute_single(lambda w: w.train())
trainer.shutdown()
"""


class Execution:
    def __init__(self, first: int, *, step: int) -> None:
        self.count, self.step = first, step

    def train(self) -> int:
        self.count += self.step
        return self.count


def test_the_class_api(names: dict[str, Any]) -> None:
    found = run(
        CLASS,
        {**names, "ExecutionClass": Execution, "args": (5,), "kwargs": {"step": 2}},
        Differs("num_workers=12", "num_workers=2", "two ranks are enough here"),
        Differs("horovod|pytorch", "pytorch", "either of them; horovod needs a class of one's own"),
        Differs(
            "ExecutionClass, args, kwargs", "ExecutionClass, *args, **kwargs", "as in any call of Python"
        ),
        Differs("trainer.execute(", "all_ranks = trainer.execute(", "for the test"),
        Differs("trainer.execute_single(", "one = trainer.execute_single(", "for the test"),
    )
    assert (found["all_ranks"], found["one"]) == ([7, 7], 9)
