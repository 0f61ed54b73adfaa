"""Built-in models, ``causal_lm`` and ``null``, and the backends: ``ddp``, ``fsdp2``, ``inference``, ``null``.

The command that starts a trial checks their arguments. So transformers, FSDP2 and pipelines are imported by the
functions that use them; workers find these imported (`starting.PRELOAD`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from unirun.errors import Fault, SpecError, UsageError
from unirun.experiments.models.api import SCORE, FinetuneSpec, Model, ModelBackend, Place, saved_tensors
from unirun.wire.reporting import report

if TYPE_CHECKING:
    from unirun.experiments.models.stage import Stage

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class TrainBackend(ModelBackend):
    """Trains. Parameters are replicated over data-parallel ranks, and gradients are summed over them.

    `optimizer` is ``adam`` (torch's AdamW, with no weight decay unless `options` has it) or ``sgd``; `options` are its
    further arguments. `lr` rises linearly in the fraction `warmup` of all steps. Then it is ``constant``, or falls to
    `min_lr` times `lr`, ``linear`` or ``cosine`` (`schedule`). `updates` tells the schedule how often the interface
    calls `train_batch` in each step. Gradients are clipped to the norm `clip`; 0: never.

    A step whose loss or gradient norm is not finite in any rank changes nothing in any: it is an error, or, with
    ``error_if_nonfinite=False``, it is skipped, and the figure ``skipped_steps`` counts such steps. A skipped step does
    not advance the schedule.
    """

    sharded = False

    def __init__(
        self,
        lr: float = 1e-4,
        optimizer: str = "adam",
        options: Mapping[str, Any] | None = None,
        schedule: str = "constant",
        warmup: float = 0.0,
        min_lr: float = 0.0,
        clip: float = 1.0,
        updates: int = 1,
        error_if_nonfinite: bool = True,
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer {optimizer!r}", f"it is one of {', '.join(OPTIMIZERS)}")
        if schedule not in ("constant", "linear", "cosine"):
            raise UsageError(f"schedule {schedule!r}", "it is constant, linear or cosine")
        if clip < 0.0 or not 0.0 <= warmup <= 1.0 or updates < 1:
            raise UsageError(
                f"clip={clip}, warmup={warmup}, updates={updates}",
                "clip is 0 or more, warmup 0 to 1, updates 1 or more",
            )
        self._error_if_nonfinite = error_if_nonfinite
        self._lr, self._clip, self._updates, self._make = lr, clip, updates, OPTIMIZERS[optimizer]
        self._options, self._shape, self._warmup, self._least = dict(options or {}), schedule, warmup, min_lr
        if optimizer == "adam":
            self._options.setdefault("weight_decay", 0.0)
        # Its arguments are refused before anything starts, and not when each rank makes its own.
        _checks(self._make)([torch.zeros(1)], lr=lr, foreach=False, **self._options)

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        """Give it an engine with an optimizer."""
        from torch.distributed.fsdp import fully_shard

        from unirun.experiments.models.engine import TorchEngine
        from unirun.experiments.models.stage import Stage

        stage = model.module
        assert isinstance(stage, Stage)
        place = model.place
        stage.to(place.device)
        if self.sharded and place.topo.get_dim("data") > 1:
            assert place.mesh is not None
            mesh = place.mesh["data"]
            for layer in stage.body.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(stage, mesh=mesh)
        total = spec.total_train_steps * self._updates
        model.engine = TorchEngine(
            place,
            stage,
            self._make(stage.parameters(), lr=self._lr, foreach=False, **self._options),
            lambda step: rate(step, total, self._shape, self._warmup, self._least),
            self._clip,
            error_if_nonfinite=self._error_if_nonfinite,
        )
        return model


def _checks(make: Any) -> Callable[..., torch.optim.Optimizer]:
    """The same optimizer, which only checks its arguments. One that gets parameters makes torch import its compiler,
    which takes more than a second."""
    return type("Checks", (make,), {"add_param_group": lambda *_: None})


class ShardedBackend(TrainBackend):
    """Trains: data-parallel ranks have parts of the parameters (FSDP2)."""

    sharded = True


class InferenceBackend(ModelBackend):
    """Runs a model that is not trained."""

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        """Give it an engine without an optimizer."""
        from unirun.experiments.models.engine import TorchEngine
        from unirun.experiments.models.stage import Stage

        stage = model.module
        assert isinstance(stage, Stage)
        stage.to(model.device).requires_grad_(False)
        model.engine = TorchEngine(model.place, stage)
        return model


def causal_lm(
    place: Place,
    *,
    config: Mapping[str, Any] | None = None,
    path: str = "",
    dtype: str = "float32",
    critic: bool = False,
    weights: str = "",
) -> Stage:
    """The part of a causal language model: of a `path` or name that transformers knows, or a new one with this
    `config`, which names its ``model_type``. The last layer of a `critic` gives one value instead of logits; it is that
    of the `path`, if this is a saved critic or a reward model (a sequence classifier with one label).

    The parameters of a new one follow from the seed of the place alone, so they are the same in each layout. `weights`
    is a directory that `ModelInterface.save` has written: its tensors take the place of those with the same names and
    shapes.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from unirun.experiments.checks import faults_of
    from unirun.experiments.models.stage import Stage, configuration

    whole: Any
    where = f"models.{place.name}"
    if faults := faults_of(where, place.topo, {"config": config, "path": path, "critic": critic}):
        raise SpecError(faults)
    settings = configuration(where, config, path)
    # Each rank would draw its own.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(place.seed)
        kind = getattr(torch, dtype)
        kinds = (settings.architectures or ()) if path else ()
        scores = any(name.endswith("ForSequenceClassification") for name in kinds)
        if scores and not critic:
            problem = f"{path} gives a score, and no logits of words"
            raise SpecError([Fault(where, problem, "add critic=True, or give a causal language model")])
        if path:
            whole = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        else:
            whole = AutoModelForCausalLM.from_config(settings, dtype=kind)  # type: ignore[no-untyped-call]
        if critic:
            whole.lm_head = nn.Linear(whole.config.hidden_size, 1, bias=False, dtype=kind)
            nn.init.normal_(whole.lm_head.weight, std=1.0 / (whole.config.hidden_size + 1))
            if scores:
                whole.lm_head.weight.data.copy_(_score(where, path))
            whole.config.tie_word_embeddings = False
        if weights:
            own = whole.state_dict()
            saved = saved_tensors(Path(weights))
            fitting = {n: t for n, t in saved.items() if n in own and own[n].shape == t.shape}
            # A critic has a last layer of its own.
            others = sorted(own.keys() - fitting.keys() - ({"lm_head.weight"} if critic else set()))
            if not fitting:
                raise UsageError(
                    f"no tensor of {weights} has a name and a shape of {place.name}",
                    "give a saved model of this network",
                )
            if others:
                report(f"unirun: {place.name}: {weights} has no tensors that fit {', '.join(others[:5])}")
            whole.load_state_dict(fitting, strict=False)
    return Stage(whole, place)


def _score(where: str, path: str) -> torch.Tensor:
    """The last layer of a sequence classifier with one label, as a critic that was saved, or a reward model."""
    from transformers.utils.hub import cached_file

    folder = Path(cached_file(path, "config.json") or path).parent
    for name in sorted(folder.glob("*.safetensors")):
        with safe_open(name, "pt") as file:
            if SCORE in file.keys() and file.get_slice(SCORE).get_shape()[0] == 1:  # noqa: SIM118 - it is no dict
                found: torch.Tensor = file.get_tensor(SCORE)
                return found
    problem = f"{path} is a classifier, and no file of safetensors there has {SCORE!r} with one row"
    raise SpecError([Fault(where, problem, "give a critic, a reward model or a causal language model")])


def no_model(place: Place) -> nn.Module:
    """A model without a network: for calls that need no more than a program, as a verifier of answers."""
    return nn.Identity()


class NullBackend(ModelBackend):
    """For `no_model`. It runs and saves nothing."""

    def initialize(self, model: Model, spec: FinetuneSpec) -> Model:
        """There is nothing to do."""
        return model

    def save(self, model: Model, path: Path) -> None:
        """There is nothing to save."""

    def load(self, model: Model, path: Path) -> None:
        """There is nothing to load."""


def rate(step: int, total: int, shape: str, warmup: float, least: float) -> float:
    """The factor of the learning rate in `step`, from 0 on, of `total`."""
    rising = int(warmup * total)
    if step < rising:
        return (step + 1) / rising
    if shape == "constant" or total <= rising:
        return 1.0
    done = min((step - rising) / (total - rising), 1.0)
    left = 1.0 - done if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return least + (1.0 - least) * left
