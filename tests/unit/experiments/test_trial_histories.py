"""Trials of which workers and masters die, against what a trial without deaths does.

The master, the model workers and their stores are real, in this process: a call runs when it is made. Each call of an
interface gets what follows from the step, the call and the rank alone, whatever has died before; so do the checkpoints,
the saved models and the records, and between any two calls these are whole.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests.effort import examples
from unirun.errors import TrainingFailed, UnirunError, WorkerLost
from unirun.experiments import master, model_worker
from unirun.experiments.config import (
    Allocation,
    AutomaticEvaluator,
    DatasetAbstraction,
    ExperimentSaveEvalControl,
    ExperimentScheduling,
    ModelAbstraction,
    ModelBackendAbstraction,
    Scheduling,
    TasksGroup,
    model_workers,
    register_backend,
    register_dataset,
    register_interface,
    register_model,
)
from unirun.experiments.experiment import Experiment, ExperimentConfig, Trial, register_experiment
from unirun.experiments.graph import (
    MFCDef,
    MicroBatchSpec,
    ModelInterfaceAbstraction,
    ModelName,
    OffloadHook,
    ParamReallocHook,
    topology,
)
from unirun.experiments.master import MasterWorkerProcess
from unirun.experiments.model_worker import ModelWorkerProcess
from unirun.experiments.models.api import (
    FinetuneSpec,
    Model,
    ModelBackend,
    ModelInterface,
    Place,
)
from unirun.experiments.recovery import FILE, KEPT, Recovery
from unirun.experiments.sample import SequenceSample
from unirun.train.data.plan import SampleOrder

from .sample_configs import ACTOR, COPY, GENERATE, INFERENCE, REF, TRAIN, realloc

ETA, SEED = 0.25, 3
AHEAD, SLOW = ModelName("ahead"), ModelName("slow")
WORKERS = 4
"""Two for the actor, which is trained; one for its copy, which generates; one for its moving averages, of which one takes
its parameters and the other one is given them, and for a model whose call runs ahead: it needs the samples alone, so it
runs while the step before trains."""

Figures = dict[str, float]


class Rows:
    """Numbered samples of different lengths."""

    keys = ("prompt",)

    def __init__(self, util: object, *, count: int) -> None:
        self._count, self.fingerprint = count, "rows"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> SequenceSample:
        prompt = torch.full((1 + index % 3,), float(index), dtype=torch.float64)
        return SequenceSample.of({"prompt": [prompt]}, [str(index)])


class Network(torch.nn.Module):
    """One number, which is the engine, too."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.w = torch.tensor(first_of(place.name.role), dtype=torch.float64)
        self.away, self._given = False, place.name == COPY

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": self.w}

    def state(self) -> dict[str, Any]:
        return {"w": self.w.clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.w.copy_(state["w"])

    def offload(self, *, keep: bool) -> None:
        self.away = True
        # Memory is not used for what another model gives before it is needed.
        assert keep != self._given
        if not keep:
            self.w.fill_(-1e9)

    def fetch(self) -> None:
        self.away = False


class Backend(ModelBackend):
    """The network is its own engine. A process has one of each model."""

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        alive = Interface.trial.alive
        assert model.name not in alive
        alive.add(model.name)
        engine: Any = model.module
        model.engine = engine
        return model

    def destroy(self, model: Model) -> None:
        Interface.trial.alive.remove(model.name)
        super().destroy(model)


class Interface(ModelInterface):
    """Checks that it is given what the trial of the test says."""

    trial: ClassVar[History]
    reductions: ClassVar[Mapping[str, str]] = {"samples": "sum"}

    def __init__(self) -> None:
        self._model: Model | None = None

    def _number(self, model: Model) -> float:
        """The parameter. The interface of an attempt has the models of that attempt."""
        assert self._model in (None, model)
        self._model = model
        network: Any = model.running()
        assert not network.away
        return float(network.w)

    def _check(self, sample: SequenceSample, *keys: str) -> Expected:
        wanted = self.trial.expected(self.trial.order.step)
        self.trial.called(self.trial.order)
        assert sample.keys == keys
        for key in keys:
            for each, values in zip(sample.ids, sample[key].split(sample.sizes(key)), strict=True):
                assert values.tolist() == pytest.approx(wanted.data[key][each], rel=1e-12)
        rank = self.trial.rank
        name = f"{SEED} {self.trial.order.step} {self.trial.order.call} {rank}"
        assert torch.initial_seed() == zlib.crc32(name.encode())
        return wanted

    def generate(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample:
        wanted = self._check(sample, "prompt")
        assert sample.ids == wanted.ids
        assert self._number(model) == wanted.actor
        tokens = torch.rand(len(sample), dtype=torch.float64) + self._number(model)
        return SequenceSample.of({"tokens": [*tokens]}, sample.ids)

    def inference(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> SequenceSample:
        if model.name == AHEAD:
            self._check(sample, "prompt")
            if self.trial.order.step == self.trial.fails_in:
                raise ArithmeticError("there is no bonus")
            assert self._number(model) == first_of("ahead")
            return SequenceSample.of({"bonus": [*torch.rand(len(sample), dtype=torch.float64)]}, sample.ids)
        self._check(sample, "prompt", "tokens")
        return SequenceSample.of({"score": [*(sample["tokens"] * self._number(model))]}, sample.ids)

    def train_step(self, model: Model, sample: SequenceSample, spec: MicroBatchSpec) -> Figures:
        wanted = self._check(sample, "prompt", "tokens", "score", "bonus")
        assert self._number(model) == wanted.actor
        network: Any = model.running()
        network.w.copy_(after(self._number(model), model.version))
        scores = sample["score"]
        return {"score": float(scores.mean()) if len(sample) else 0.0, "samples": float(len(sample))}

    def evaluate(self, model: Model, sample: SequenceSample) -> Figures:
        own = {"w": self._number(model) * len(sample), "index": float(sum(map(int, sample.ids)))}
        return {**own, "count": float(len(sample))}


def first_of(role: str) -> float:
    """The parameter of a model that was not trained."""
    return float(len(role))


def after(number: float, version: int) -> float:
    """The parameter after one more step of training."""
    return 0.5 * number + version + 1


ROWS = "tests-rows"
register_dataset(ROWS, Rows)
register_model("tests-number", Network)
register_backend("tests-number", Backend)
register_interface("tests-checked", Interface)


@dataclass
class Histories(Experiment):
    """An actor on two data-parallel ranks, its copy, and its moving average."""

    samples: int = 6
    n_seqs: int = 2
    epochs: int = 2
    save: int | None = None
    ckpt: int | None = 2
    evaluate: int | None = None

    def scheduling_setup(self) -> ExperimentScheduling:
        """A process for each rank."""
        return ExperimentScheduling(TasksGroup(WORKERS, Scheduling()))

    def initial_setup(self) -> ExperimentConfig:
        """Four calls."""
        rows = DatasetAbstraction(ROWS, {"count": self.samples})
        parts = ModelAbstraction("tests-number"), ModelBackendAbstraction("tests-number")
        models = {
            ACTOR: Allocation(*parts, topology(data=2), eval_dataset=rows),
            COPY: Allocation(*parts, topology(), 2),
            REF: Allocation(*parts, topology(), 3),
            AHEAD: Allocation(*parts, topology(), 3),
            SLOW: Allocation(*parts, topology(), 3),
        }
        checked, n, needs = ModelInterfaceAbstraction("tests-checked"), self.n_seqs, ("prompt", "tokens")
        freed: Any = {"pre_hooks": (realloc(ACTOR),), "post_hooks": (OffloadHook(),)}
        kept: Any = {"post_hooks": (ParamReallocHook(target=SLOW, eta=ETA), OffloadHook())}
        average: Any = {"pre_hooks": (realloc(ACTOR, ETA),)}
        calls = [
            MFCDef("gen", n, GENERATE, checked, COPY, ("prompt",), ("tokens",), **freed),
            MFCDef("score", n, INFERENCE, checked, REF, needs, ("score",), **average),
            MFCDef("bonus", n, INFERENCE, checked, AHEAD, ("prompt",), ("bonus",)),
            MFCDef("train", n, TRAIN, checked, ACTOR, (*needs, "score", "bonus"), (), **kept),
        ]
        control = ExperimentSaveEvalControl(
            self.epochs,
            save_freq_steps=self.save,
            ckpt_freq_steps=self.ckpt,
            eval_freq_steps=self.evaluate,
        )
        config = ExperimentConfig(
            control, calls, model_workers(models, seed=SEED, datasets=[rows], shuffle=True)
        )
        config.auto_eval, config.evaluator = self.save is not None, AutomaticEvaluator(rows)
        return config


register_experiment("tests-histories", Histories)


@dataclass
class Expected:
    """A step of a trial in which nothing dies: its samples, their data, and the actor before it."""

    ids: tuple[str, ...]
    data: dict[str, dict[str, list[float]]]
    actor: float


TOLD = ("load", "call", "reallocate", "not_finite", "checkpoint", "save", "evaluate")
"""Methods of a worker that are called in one attempt."""


class MasterDied(BaseException):
    """The process of the master has ended."""


class Ref:
    """A call that is over."""

    def __init__(self, answers: Callable[[], Any]) -> None:
        self._error: Exception | None = None
        self._looked = False
        try:
            self._answer = answers()
        except Exception as error:  # noqa: BLE001 - a call raises what the method has raised
            self._error = error

    def done(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        """The error of a call that ran ahead. It is asked for once."""
        assert not self._looked
        self._looked = True
        return self._error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def wake_with(self, wake: Callable[[Any], None]) -> None:
        wake(self)

    def forget_wake(self, wake: Callable[[Any], None]) -> None: ...


class Worker(ModelWorkerProcess):
    """A model worker whose ranks are in one process, so that there are no process groups."""

    def setup(self) -> None:
        super().setup()
        self.alive = set[ModelName]()
        """The models that were made and not destroyed."""
        self.reads = 0

    def _read_dataset(self) -> Any:
        self.reads += 1
        assert self.reads == 1, "a process reads its samples once"
        return super()._read_dataset()

    def _mesh(self, *args: Any) -> None:
        return None


class Method:
    """A method of some workers."""

    def __init__(self, history: History, name: str, ranks: Sequence[int], *, alone: bool = False) -> None:
        self._history, self._name, self._ranks, self._alone = history, name, ranks, alone

    def options(self, target: Sequence[int] | None = None, **how: Any) -> Method:
        return Method(self._history, self._name, self._ranks if target is None else target)

    def call_async(self, *args: Any) -> Any:
        return Ref(lambda: self._run(args))

    def call(self, *args: Any) -> Any:
        return self.call_async(*args).result()

    def _run(self, args: Sequence[Any]) -> Any:
        refs = []
        for at, rank in enumerate(self._ranks):
            own = [each[at] for each in args] if self._name == "call" and isinstance(args[0], list) else args
            refs.append(Ref(partial(self._history.run, rank, self._name, *own)))
        found = [ref.result() for ref in refs]
        return found[0] if self._alone else found


class Group:
    """The model workers, as their master and they themselves call them."""

    def __init__(self, history: History, rank: int | None = None) -> None:
        self._history, self._rank = history, rank

    def __getitem__(self, rank: int) -> Group:
        return Group(self._history, rank)

    def __getattr__(self, name: str) -> Method:
        ranks = range(WORKERS) if self._rank is None else [self._rank]
        return Method(self._history, name, ranks, alone=self._rank is not None)


class Handle:
    """The job, which outlives its processes."""

    def __init__(self) -> None:
        self.generation = 0
        self._state: bytes | None = None

    def job_info(self) -> dict[str, Any]:
        return {"roles": {"model_worker": {"generation": self.generation}}}

    def report(self, line: object) -> None: ...

    def save_state(self, state: bytes) -> None:
        self._state = state

    def load_state(self) -> bytes | None:
        return self._state


class Evaluator:
    """The role that evaluates saved models. It answers late."""

    def __init__(self) -> None:
        self.evaluate = self

    def call_async(self, path: str) -> Any:
        ref, asked = Ref(lambda: {"w": whole(Path(path))}), itertools.count()
        ref.done = lambda: next(asked) > 0  # type: ignore[method-assign]
        return ref


def whole(path: Path) -> float:
    """The parameter in a saved model."""
    found = path / "model.safetensors"
    return _read(found, found.stat().st_mtime_ns)


@lru_cache
def _read(path: Path, written: int) -> float:
    return float(load_file(path)["w"])


Deaths = Mapping[tuple[str, int], tuple[bool, bool]]
"""By a method, and how often it was called before: whether that worker dies, or else the master; whether that is late."""


class History:
    """One trial, with the processes that die in it."""

    def __init__(self, root: Path, how: Histories, deaths: Deaths) -> None:
        Interface.trial = self
        self.root, self.how, self.deaths = root, how, deaths
        self.calls = Counter[str]()
        self.handle = Handle()
        self.workers = [self.worker(rank) for rank in range(WORKERS)]
        self.alive = set[ModelName]()
        self._attempts: dict[int, int] = {}
        self._late: dict[tuple[int, str], Sequence[Any]] = {}
        self.order: Any = None
        self.rank = -1
        self._expected: list[Expected] = []
        self._seen: set[tuple[str, float]] = set()
        self._average = first_of("ref")
        self.ahead = 0
        """Calls that ran before the step before had ended."""
        self.loaded = set[int]()
        """The steps whose data was read."""
        self.fails_in: int | None = None
        """The step in which the call that runs ahead fails."""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.how.samples // self.how.n_seqs

    # What has to be.

    def expected(self, step: int) -> Expected:
        """The values that a step gets."""
        while len(self._expected) <= step:
            self._expected.append(self._next(len(self._expected)))
        return self._expected[step]

    def _next(self, step: int) -> Expected:
        epoch, at = divmod(step, self.steps)
        order = SampleOrder(self.how.samples, SEED, epoch, shuffle=True).indices(0, self.how.samples).tolist()
        some = order[at * self.how.n_seqs : (at + 1) * self.how.n_seqs]
        actor = after(self._expected[-1].actor, step - 1) if step else first_of("actor")
        self._average += ETA * (actor - self._average)

        def drawn(call: str) -> list[float]:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {step} {call} 0".encode()))
            found: list[float] = torch.rand(len(some), generator=draw, dtype=torch.float64).tolist()
            return found

        tokens = [number + actor for number in drawn("gen")]
        ids = tuple(map(str, some))
        prompts = {str(index): [float(index)] * (1 + index % 3) for index in some}
        scores = {each: [token * self._average] for each, token in zip(ids, tokens, strict=True)}
        data = {
            "prompt": prompts,
            "tokens": {each: [token] for each, token in zip(ids, tokens, strict=True)},
            "score": scores,
            "bonus": {each: [number] for each, number in zip(ids, drawn("bonus"), strict=True)},
        }
        return Expected(ids, data, actor)

    def check_files(self) -> None:
        """Check that all that is there now is whole, and is of its step."""
        for path in (self.root / "checkpoints").glob("*/step*"):
            assert whole(path) == self.expected(int(path.name.removeprefix("step"))).actor
        found = sorted((self.root / "recover").glob(f"*/{FILE}"))
        assert len(found) <= KEPT
        for file in found:
            self._check_checkpoint(json.loads(file.read_bytes()))

    def _check_checkpoint(self, info: Mapping[str, Any]) -> None:
        step = info["step"]
        epoch, at = divmod(step, self.steps)
        assert (info["epoch"], info["epoch_step"]) == (epoch, at)
        used = [each for number in range(step - at, step) for each in self.expected(number).ids]
        assert info["used_ids"] == used
        assert info["versions"]["actor@0"] == step
        for what, every in (("save", self.how.save), ("ckpt", self.how.ckpt), ("eval", self.how.evaluate)):
            last = step - step % every if every else 0
            since = info["frequencies"][what]
            assert (since.get("steps", 0), since.get("epochs", 0)) == (
                step - last,
                epoch - last // self.steps,
            )
        files = {
            str(path.relative_to(self.root / "recover" / f"{step:06}"))
            for path in (self.root / "recover" / f"{step:06}").rglob("*.pt")
        }
        names = (
            "actor@0/00000.pt",
            "actor@0/00001.pt",
            *(f"{name}@0/00000.pt" for name in ("ref", "ahead", "slow")),
        )
        assert files == {*names}

    # What runs.

    def called(self, order: Any) -> None:
        """A call runs: count it if the step before has not ended."""
        if order.step > order.oldest:
            assert (order.call, order.step) == ("bonus", order.oldest + 1)
            self.ahead += 1

    def worker(self, rank: int) -> Worker:
        """A new process."""
        context = SimpleNamespace(role="model_worker", rank=rank, world_size=WORKERS)
        about = OmegaConf.create(msgspec.to_builtins(self.trial()))
        handle: Any = SimpleNamespace(context=context)
        made = Worker(handle, about)
        made.setup()
        return made

    def trial(self) -> Trial:
        words = {name: "null" if value is None else value for name, value in vars(self.how).items()}
        overrides = tuple(f"{name}={value}" for name, value in words.items())
        return Trial("tests-histories", "one", str(self.root), (__name__,), overrides)

    def run(self, rank: int, name: str, *args: Any) -> Any:
        """A call of a worker."""
        dies, is_late = self.deaths.get((name, self.calls[name]), (None, False))
        self.calls[name] += 1
        if dies is not None and not is_late:
            self._die(rank, worker=dies)
        if name in ("restore", "checkpoint", "save", "evaluate"):
            self.check_files()
        if name == "load":
            self.loaded.add(args[1])
        if name == "call":
            self.order = args[0]
            self.rank = rank if args[0].call == "train" else 0
        worker = self.workers[rank]
        if name == "restore":
            self.alive = worker.alive
        found = getattr(worker, name)(*args)
        if name == "restore":
            self._check_late_calls(rank, args[0])
        elif name in TOLD:
            self._late[rank, name] = args
        if dies is not None:
            self._die(rank, worker=dies)
        # In memory of its own, as a call delivers it.
        return copy.deepcopy(found) if name == "give" else found

    def _check_late_calls(self, rank: int, attempt: int) -> None:
        """Calls of the attempts before come too late."""
        assert attempt > self._attempts.get(rank, 0)
        self._attempts[rank] = attempt
        for name in TOLD:
            if args := self._late.pop((rank, name), None):
                with pytest.raises(UnirunError, match="this call is of attempt"):
                    getattr(self.workers[rank], name)(*args)

    def _die(self, rank: int, *, worker: bool) -> None:
        if not worker:
            raise MasterDied
        self.workers[rank] = self.worker(rank)
        self.handle.generation += 1
        raise WorkerLost(f"model_worker:{rank} was lost", worker=f"model_worker:{rank}")

    def fit(self) -> Figures:
        """The trial to its end, by one master after the other."""
        while True:
            trainer: Any = MasterWorkerProcess({}, {}, OmegaConf.create(msgspec.to_builtins(self.trial())))
            trainer.RG_MODEL_WORKER, trainer.RG_EVALUATOR = Group(self), Evaluator()
            trainer._master_handle = self.handle
            try:
                trainer.init()
                figures: Figures = trainer.fit()
                return figures
            except MasterDied:
                continue

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.root / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check_end(self, figures: Figures) -> None:
        """Check all that a trial has left behind."""
        count = self.steps * self.how.epochs
        self.check_files()
        assert self.ahead >= count - 1
        assert self.loaded == {*range(count)}
        steps = self.lines("steps.jsonl")
        assert [line["step"] for line in steps] == [*range(1, count + 1)]
        for number, line in enumerate(steps):
            wanted = self.expected(number)
            scores = [score for (score,) in wanted.data["score"].values()]
            assert line["train/score"] == pytest.approx(sum(scores) / len(scores), rel=1e-12)
            assert line["train/samples"] == len(wanted.ids)
            # Three models get a number of the actor; prompts go to both of the workers besides those of the first call,
            # and so do tokens, scores and bonuses to one.
            tokens = sum(map(len, wanted.data["prompt"].values()))
            assert line["bytes_moved"] == line["bytes_needed"] == 8 * (3 + 2 * tokens + 4 * len(wanted.ids))
        slow = first_of("slow")
        for number in range(1, count + 1):
            slow += ETA * (self.expected(number).actor - slow)
        assert float(self.workers[-1]._shards[SLOW].model.running().tensors()["w"]) == pytest.approx(slow)
        actor = self.expected(count).actor
        assert figures["train/eval_w"] == pytest.approx(actor)
        evaluated = [*range(0, count + 1, self.how.evaluate)] if self.how.evaluate else []
        assert self.lines("evaluations.jsonl") == [
            {
                "step": step,
                "train/eval_w": pytest.approx(self.expected(step).actor),
                "train/eval_index": pytest.approx((self.how.samples - 1) / 2),
            }
            for step in dict.fromkeys([*evaluated, count])
        ]
        saved = [*range(self.how.save, count + 1, self.how.save)] if self.how.save else []
        names = [f"step{step:06}" for step in dict.fromkeys([*saved, count])]
        assert sorted(path.name for path in (self.root / "checkpoints" / "actor").iterdir()) == names
        assert [line["save"] for line in self.lines("saves.jsonl")] == (names if saved else [])
        for line in self.lines("saves.jsonl"):
            assert line["w"] == self.expected(int(line["save"][-6:])).actor
        orders = [
            [each for at in range(self.steps) for each in self.expected(epoch * self.steps + at).ids]
            for epoch in range(self.how.epochs)
        ]
        assert all(len({*order}) == len(order) for order in orders)


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers reach each other, and need no process group."""
    peers = SimpleNamespace(find=lambda role, rank: SimpleNamespace(endpoint="here"))
    found = SimpleNamespace(peers=peers, role_group=lambda role: Group(Interface.trial))
    monkeypatch.setattr(model_worker, "init", lambda: found)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)
    # Calls end one at a time, those of the step ahead first.
    monkeypatch.setattr(master, "wait", lambda refs: (refs[-1:], refs[:-1]))
    # Losses are known at once.
    monkeypatch.setattr(master, "LOSS_REPORT_TIMEOUT", 0.0)
    # Without CUDA torch keeps the stack of each seed.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    # Processes die here, and not the machine.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


experiments = st.builds(
    Histories,
    samples=st.integers(6, 9),
    n_seqs=st.just(2),
    epochs=st.just(2),
    save=st.none() | st.integers(1, 3),
    ckpt=st.integers(1, 2),
    evaluate=st.none() | st.integers(1, 2),
)
METHODS = ("about", "restore", "give", *TOLD)
calls = st.tuples(st.sampled_from(METHODS), st.integers(0, 15) | st.integers(0, 40))


@pytest.fixture(autouse=True, scope="module")
def garbage() -> Iterator[None]:
    """A worker collects all garbage before it goes on after a loss: here that of all tests of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield


@examples(30, shrunk=False)
@given(
    experiments,
    st.dictionaries(calls, st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_whatever_dies_a_trial_is_that_in_which_nothing_dies(how: Histories, deaths: Deaths) -> None:
    root = Path(tempfile.mkdtemp(prefix="trial-"))
    try:
        history = History(root, how, deaths)
        history.check_end(history.fit())
    finally:
        shutil.rmtree(root)


def test_a_call_that_fails_ahead_ends_the_trial_after_the_step_before_and_its_checkpoint(
    tmp_path: Path,
) -> None:
    history = History(tmp_path, Histories(ckpt=1), {})
    history.fails_in = 3
    with pytest.raises(TrainingFailed, match="failed in step 4, bonus.*: there is no bonus"):
        history.fit()
    assert [line["step"] for line in history.lines("steps.jsonl")] == [1, 2, 3]
    assert Recovery(tmp_path).steps()[-1] == 3
    history.check_files()
    assert history.ahead >= 3
