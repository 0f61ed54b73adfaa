"""The names that are registered from the beginning: datasets, models and backends. Interfaces come with the
algorithms.

The command that starts a trial needs only their names, so slow imports are registered as strings.
"""

from __future__ import annotations

from unirun.experiments.registry import BACKENDS, MODELS

BACKENDS.register("ddp", "unirun.experiments.models.backends:TrainBackend")
BACKENDS.register("fsdp2", "unirun.experiments.models.backends:ShardedBackend")
BACKENDS.register("inference", "unirun.experiments.models.backends:InferenceBackend")
BACKENDS.register("null", "unirun.experiments.models.backends:NullBackend")
MODELS.register("causal_lm", "unirun.experiments.models.backends:causal_lm")
MODELS.register("null", "unirun.experiments.models.backends:no_model")
