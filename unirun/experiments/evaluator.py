"""`EvaluatorProcess`: evaluates saved models beside the trial, one after the other, in a role of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from unirun.experiments.datasets import DatasetUtility, load_tokenizer
from unirun.experiments.experiment import ExperimentConfig, import_modules, resolve, trial_of
from unirun.experiments.graph import MFCDef, topology
from unirun.experiments.models.api import FinetuneSpec, Model, Place, load_whole
from unirun.experiments.orders import means, reductions_of
from unirun.experiments.registry import BACKENDS, DATASETS, INTERFACES, MODELS
from unirun.experiments.sample import SequenceSample
from unirun.roles import BaseWorkload, trainer_invocation
from unirun.train.losses import LIMIT


class EvaluatorProcess(BaseWorkload):
    """Makes the model once, whole, and gives it the parameters of each save."""

    _sample: SequenceSample | None = None

    def _prepare(self) -> SequenceSample:
        """Make the model and read the dataset, once. This is done in the first call, so that the master hears of
        errors: a restart would not mend them."""
        if self._sample is not None:
            return self._sample
        trial = trial_of(self.config)
        import_modules(trial.modules, trial.folder)
        config = resolve(trial.experiment, trial.overrides)
        assert config.resolved is not None
        self._call = call = evaluated(config)
        worker = config.model_worker[config.resolved.workers_of(call.model_name)[0]]
        shard = config.models()[call.model_name]
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        place = Place(call.model_name, topology(), 0, device)
        tokenizer = load_tokenizer(worker.tokenizer_name_or_path)
        module = MODELS.find(shard.model.type_)(place, **shard.model.args)
        self._model: Model = BACKENDS.find("inference")().initialize(
            Model(place, module, tokenizer), FinetuneSpec(1, 1, 1)
        )
        self._interface = INTERFACES.find(call.interface_impl.type_)(**call.interface_impl.args)
        chosen = config.evaluator.dataset
        assert chosen is not None
        dataset = DATASETS.find(chosen.type_)(DatasetUtility(tokenizer, worker.base_seed), **chosen.args)
        self._sample = SequenceSample.gather([dataset[index] for index in range(len(dataset))])
        return self._sample

    @trainer_invocation(target="RANK0", idempotent=True, retries=LIMIT - 1)
    def evaluate(self, path: str) -> dict[str, float]:
        """The figures of the model that was saved in this directory."""
        sample = self._prepare()
        load_whole(self._model, Path(path))
        found = self._interface.evaluate(self._model, sample)
        return means([found], reductions_of(self._call))


def evaluated(config: ExperimentConfig) -> MFCDef:
    """The call whose model the evaluator evaluates: the one that trains its role, or the only one that trains."""
    role = config.evaluator.role
    return next(call for call in config.model_rpcs if call.trains and role in ("", call.role))
