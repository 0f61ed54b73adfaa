"""The interface of a callback, and the callbacks of one run."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import UsageError

_METHODS = "start_training", "handle_result", "finish_training"


class TrainingCallback:
    """Follows a training run. Derive from it and override what is needed; the methods do nothing by default.

    All methods are called in the process of the user and in the thread that runs the training (the one that called
    `Trainer.run`), one at a time. While one runs, no report is handled, so it should be short. An exception of
    `start_training` or `handle_result` ends the run, which raises it with its own traceback.
    """

    def start_training(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Called once, before the first report.

        `logdir` is the local directory of the run, which exists. `config` is what the training function gets.
        """

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Called for each report, when all ranks have made it.

        `results` has one dict per rank, in rank order: its metrics, with ``_timestamp`` (seconds since the epoch),
        ``_time_this_iter_s`` (seconds since the report before) and ``_training_iteration`` (1 for the first report).
        The list and its dicts are copies; the values in them are shared with other callbacks.
        """

    def finish_training(self, error: BaseException | None) -> None:
        """Called once, at the end of a run for which `start_training` has returned.

        `error` is what ended the run: an exception of the training function, the loss of workers, an exception of a
        callback, KeyboardInterrupt. It is None when the run succeeded.
        """


class Callbacks:
    """The callbacks of one run, called in the order of the list. Raises what `check` raises."""

    def __init__(self, callbacks: Sequence[TrainingCallback] = ()) -> None:
        self.check(callbacks)
        self._callbacks = tuple(callbacks)
        self._started: list[TrainingCallback] = []

    @staticmethod
    def check(callbacks: object) -> None:
        """Raise `UsageError` unless `callbacks` is a list of objects with the three methods of a callback."""
        if not isinstance(callbacks, Sequence):
            raise UsageError(f"callbacks is a {type(callbacks).__name__}, no list", "write callbacks=[…]")
        for number, callback in enumerate(callbacks):
            if isinstance(callback, type):
                name = callback.__name__
                raise UsageError(f"callbacks[{number}] is the class {name}", f"pass an object: {name}(…)")
            missing = [name for name in _METHODS if not callable(getattr(callback, name, None))]
            if missing:
                raise UsageError(
                    f"callbacks[{number}] is a {type(callback).__name__}, which has no {' and no '.join(missing)}",
                    "derive its class from TrainingCallback",
                )

    def start(self, logdir: str, config: Mapping[str, Any]) -> None:
        """Start all. Raises what a callback raises; those after it are not started. `finish` is still to be called."""
        for callback in self._callbacks:
            callback.start_training(logdir, config)
            self._started.append(callback)

    def handle(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Give one report to all. Raises what a callback raises; those after it do not get the report."""
        for callback in self._started:
            # Copies, so that a callback that changes its own does not change what is reported to others.
            callback.handle_result([dict(result) for result in results])

    def finish(self, error: BaseException | None) -> None:
        """Finish all that were started, also when one of them raises. A second call does nothing.

        `error` is what ended the run; the caller raises it. An exception of `finish_training` becomes a note of it.
        Without an `error`, the first exception is raised after all were called, and has the others as notes.
        """
        started, self._started = self._started, []
        failure = error
        for callback in started:
            try:
                callback.finish_training(error)
            except BaseException as raised:  # noqa: BLE001 - the other callbacks still have to write what they have
                if failure is None:
                    failure = raised
                elif raised is not failure:
                    lines = "".join(traceback.format_exception(raised)).rstrip()
                    name = type(callback).__name__
                    failure.add_note(f"finish_training of {name} raised, too:\n{lines}")
        if error is None and failure is not None:
            raise failure
