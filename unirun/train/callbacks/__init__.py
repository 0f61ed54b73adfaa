"""Callbacks: what follows a training run in the process of the user, and writes, logs or shows what it reports."""

from unirun.train.callbacks.base import Callbacks, TrainingCallback
from unirun.train.callbacks.loggers import (
    CsvLoggerCallback,
    JsonLoggerCallback,
    MLflowCallback,
    ProgressCallback,
    TensorBoardCallback,
    WandbCallback,
)

__all__ = [
    "Callbacks",
    "CsvLoggerCallback",
    "JsonLoggerCallback",
    "MLflowCallback",
    "ProgressCallback",
    "TensorBoardCallback",
    "TrainingCallback",
    "WandbCallback",
]
