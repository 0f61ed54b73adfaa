"""Models, optimizers and precision, as a training function prepares them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

from unirun import train
from unirun.errors import UsageError
from unirun.train import functions
from unirun.train.session import Session


@pytest.fixture
def session() -> Iterator[Session]:
    """Rank 1 of 4, which have no process group."""
    made = Session(1, 4, 1)
    functions.enter(made)
    yield made
    functions.enter(None)
    made.close()


@pytest.fixture
def alone() -> Iterator[Session]:
    """The only rank."""
    made = Session()
    functions.enter(made)
    yield made
    functions.enter(None)
    made.close()


class Net(torch.nn.Module):
    """Returns what it computes in the form that is asked for."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.linear, self.form = torch.nn.Linear(2, 2), form
        self.dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        self.dtype = y.dtype
        return self.form(y)


def itself(y: torch.Tensor) -> torch.Tensor:
    return y


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


class TestAModel:
    def test_the_only_rank_has_it_as_it_is(self, alone: Session) -> None:
        model = torch.nn.Linear(1, 1)
        assert train.prepare_model(model) is model
        assert train.prepare_model(model, parallel="fsdp") is model
        assert train.unwrap(model) is model

    def test_of_several_ranks_each_may_have_its_own(self, session: Session) -> None:
        model = torch.nn.Linear(1, 1)
        assert train.prepare_model(model, parallel=None) is model

    @pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
    def test_ranks_without_a_process_group_are_told(self, session: Session, parallel: Any) -> None:
        with pytest.raises(UsageError) as raised:
            train.prepare_model(torch.nn.Linear(1, 1), parallel)
        assert str(raised.value) == "the ranks have no process group; use backend='torch', or parallel=None"

    def test_a_way_that_there_is_not_is_told(self, alone: Session) -> None:
        with pytest.raises(UsageError, match=r"parallel='tp'; it is 'ddp', 'fsdp' or None"):
            train.prepare_model(torch.nn.Linear(1, 1), "tp")  # type: ignore[arg-type]


class TestPrecision:
    @pytest.mark.parametrize(
        ("form", "parts"),
        [
            (lambda y: y, lambda found: [found]),
            (lambda y: (y, 3), lambda found: [found[0]]),
            (lambda y: [y, y], lambda found: found),
            (lambda y: {"y": [y], "mask": y > 0}, lambda found: found["y"]),
            (lambda y: OrderedDict(y=y), lambda found: [found["y"]]),
            (lambda y: Pair(y, [y]), lambda found: [found.first, *found.second]),
            (lambda y: y.max(dim=-1), lambda found: [found.values]),
            (
                lambda y: CausalLMOutput(loss=y.sum(), logits=y, hidden_states=(y, y)),
                lambda found: [found.loss, found.logits, found["logits"], found[1], *found.hidden_states],
            ),
        ],
        ids=["tensor", "tuple", "list", "dict", "dict in order", "named tuple", "torch's", "Hugging Face's"],
    )
    @pytest.mark.parametrize("amp", ["bf16", "fp16"])
    def test_what_comes_out_has_the_precision_of_the_parameters(
        self, alone: Session, amp: Any, form: Any, parts: Any
    ) -> None:
        train.accelerate(amp)
        model = train.prepare_model(Net(form))
        found = model(torch.ones(1, 2))
        assert model.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        assert [part.dtype for part in parts(found)] == [torch.float32] * len(parts(found))
        assert type(found) is type(form(torch.ones(1, 2)))
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
        assert [part.dtype for part in parts(compiled)] == [torch.float32] * len(parts(found))

    def test_what_is_no_floating_point_number_stays(self, alone: Session) -> None:
        train.accelerate("bf16")
        model = train.prepare_model(Net(lambda y: (y.argmax(), "text", None)))
        index, *others = model(torch.ones(1, 2))
        assert (index.dtype, others) == (torch.int64, ["text", None])

    @pytest.mark.parametrize(
        "copied",
        [
            copy.deepcopy,
            lambda model: torch.optim.swa_utils.AveragedModel(model).module,
            lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301
            lambda model: pickle.loads(cloudpickle.dumps(model)),  # noqa: S301
            lambda model: copy.deepcopy(train.prepare_model(model)),
        ],
        ids=["deepcopy", "AveragedModel", "pickle", "cloudpickle", "prepared twice"],
    )
    def test_a_copy_of_a_model_computes_with_its_own_parameters(
        self, alone: Session, copied: Callable[[Net], Net]
    ) -> None:
        train.accelerate("bf16")
        model = train.prepare_model(Net(itself))
        other = copied(model)
        with torch.no_grad():
            for each, value in ((model, 1.0), (other, 5.0)):
                each.linear.weight.fill_(value)
                each.linear.bias.zero_()
        assert [each(torch.ones(1, 2)).tolist() for each in (model, other)] == [[[2.0] * 2], [[10.0] * 2]]
        assert model.dtype is other.dtype is torch.bfloat16

    def test_models_that_were_prepared_before_are_not_changed(self, alone: Session) -> None:
        train.accelerate("bf16")
        before = train.prepare_model(Net(lambda y: y))
        train.accelerate(None)
        after = train.prepare_model(Net(lambda y: y))
        for each in (before, after):
            each(torch.ones(1, 2))
        assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)

    @pytest.mark.parametrize("prepared", ["model", "optimizer"])
    def test_it_is_refused_where_it_comes_too_late_to_have_an_effect(
        self, alone: Session, prepared: str
    ) -> None:
        model = Net(itself)
        if prepared == "model":
            train.prepare_model(model)
        else:
            train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        train.accelerate(None)
        with pytest.raises(UsageError, match=r"accelerate was called after prepare_model .*; call it first"):
            train.accelerate("bf16")

    def test_on_a_cpu_gradients_are_not_scaled(self, alone: Session) -> None:
        train.accelerate("fp16")
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = train.prepare_optimizer(torch.optim.SGD([weight], lr=1.0))
        train.backward(weight.sum() * 0.25)
        optimizer.step()
        assert weight.tolist() == [0.75]

    @pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
    def test_an_optimizer_that_undoes_the_scaling_has_a_scheduler(self, alone: Session, order: str) -> None:
        # A GPU scales so.
        alone.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if order == "optimizer first":
            train.prepare_optimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if order == "scheduler first":
            train.prepare_optimizer(optimizer)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                optimizer.zero_grad()
                train.backward(weight.sum() * 0.25)
                optimizer.step()
                scheduler.step()
                found.append((weight.item(), scheduler.get_last_lr()))
        assert found == [(0.75, [0.5]), (0.625, [0.25])]

    def test_all_optimizers_undo_the_scale_of_their_own_gradients(self, alone: Session) -> None:
        # It grows after each step.
        alone.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        optimizers = [train.prepare_optimizer(torch.optim.SGD([each], lr=1.0)) for each in weights]
        with pytest.raises(AssertionError, match="scale"):
            # It has no gradients yet.
            optimizers[0].step()
        for rounds in (1, 2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            train.backward((weights[0] + weights[1]).sum() * 0.25)
            for optimizer in optimizers:
                optimizer.step()
            assert [each.item() for each in weights] == [1.0 - 0.25 * rounds] * 2
            assert scaler.get_scale() == 8.0 * rounds


def test_a_loader_with_a_sampler_of_its_own_is_told(session: Session) -> None:
    dataset: Any = range(4)
    with pytest.raises(UsageError, match="the sampler WeightedRandomSampler"):
        train.prepare_data_loader(
            DataLoader(dataset, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 4, 4))
        )
