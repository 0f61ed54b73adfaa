"""The interface of a callback, and the callbacks of one run."""

from __future__ import annotations

import contextlib
import json
import math
import traceback
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

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
    """The callbacks of one run, called in the order of the list. Raises `UsageError` unless that is a list of objects
    with the three methods of a callback."""

    def __init__(self, callbacks: Any = ()) -> None:
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
        self._callbacks: tuple[TrainingCallback, ...] = tuple(callbacks)
        self._started: list[TrainingCallback] = []

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


# Metrics of any type as values that every reader knows: strict JSON, numbers, texts.
#
# No library is imported to recognise its types: tensors and arrays have ``tolist`` and ``item``, numbers ``__float__``.
# Nothing here raises, whatever the value is: a report that cannot be written must not end a run.

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

_DEEPEST = 64
"""Containers in containers; what is deeper becomes a text, as the readers of JSON have a limit."""

_LONGEST = 1023
"""Bits of an int. A longer one becomes a text, as no double has its value and most readers of JSON have doubles."""


def plain(value: object) -> Plain:
    """Return `value` as strict JSON has it.

    Tensors and arrays become lists, and their scalars numbers; nan and the infinities become None, which is null; keys
    become texts, sets sorted lists, and everything else a text.
    """
    return _plain(value, ())


def readable(value: object) -> Plain:
    """The same for formats other than JSON: a figure that is not finite becomes ``"nan"``, ``"inf"`` or
    ``"-inf"``."""
    found = plain(value)
    figure = number(value) if found is None else None
    return found if figure is None else str(figure)


def _plain(value: object, within: tuple[int, ...]) -> Plain:
    """`within` has the identities of the containers around `value`, which ends a circle."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONGEST else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if id(value) not in within and len(within) < _DEEPEST:
        inside = (*within, id(value))
        # A type of the user may raise anything; so may a tensor without data, and a DictConfig with values missing.
        with contextlib.suppress(Exception):
            if isinstance(value, Mapping):
                return {text(key): _plain(item, inside) for key, item in value.items()}
            if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
                return [_plain(item, inside) for item in value]
            if isinstance(value, Set):
                return sorted((_plain(item, inside) for item in value), key=repr)
            return _plain(value.tolist(), inside)  # type: ignore[attr-defined]
    found = number(value)
    return text(value) if found is None else _plain(found, within)


def number(value: object) -> int | float | None:
    """Return `value` as a number if it is one, or a tensor or an array of one real number; otherwise None.

    nan and the infinities are numbers here. An int that no float can hold is none.
    """
    if type(value) is float:
        return value
    with contextlib.suppress(Exception):  # more than one element, a signalling Decimal, a foreign `item`
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _LONGEST else None
        if hasattr(value, "__float__"):
            return float(value)
    return None


def text(value: object) -> str:
    """Return ``str(value)``, with characters that UTF-8 does not have (lone surrogates, as in paths) escaped."""
    if type(value) is str and value.isascii():
        return value
    shown = f"<{type(value).__qualname__}>"
    with contextlib.suppress(Exception):
        shown = str(value)
    return shown.encode("utf-8", "backslashreplace").decode()


def flat(result: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metrics in `result`, those of nested dicts under ``outer/inner``, as they are."""
    return dict(_leaves(result, "", ()))


def _leaves(value: Mapping[Any, Any], prefix: str, within: tuple[int, ...]) -> list[tuple[str, Any]]:
    """`within` has the identities of the dicts around `value`, which ends a circle."""
    inside, found = (*within, id(value)), list[tuple[str, Any]]()
    for key, item in value.items():
        name = prefix + text(key)
        if isinstance(item, Mapping) and id(item) not in inside and len(inside) < _DEEPEST:
            with contextlib.suppress(Exception):
                found += _leaves(item, f"{name}/", inside)
                continue
        found.append((name, item))
    return found


def numbers(result: Mapping[Any, Any]) -> dict[str, int | float]:
    """Return the metrics in `result` that are numbers, by their names in `flat`."""
    found = ((name, number(value)) for name, value in flat(result).items())
    return {name: value for name, value in found if value is not None}


def json_of(value: object) -> str:
    """Return `value` as one line of strict JSON, in ASCII."""
    return json.dumps(plain(value), allow_nan=False)
