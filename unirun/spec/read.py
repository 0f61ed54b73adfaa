"""Reading typed values out of a mapping. A wrong type is named with the place, what was expected and what was found."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import Fault

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_ENV = frozenset(
    prefix + name
    for prefix, names in {
        "": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "GROUP_": ("RANK", "WORLD_SIZE"),
        "ROLE_": ("NAME", "RANK", "WORLD_SIZE"),
        "TORCHELASTIC_": (
            "RUN_ID",
            "RESTART_COUNT",
            "MAX_RESTARTS",
            "ERROR_FILE",
            "USE_AGENT_STORE",
            "SIGNALS_TO_HANDLE",
        ),
    }.items()
    for name in names
)
MAX_COUNT = 1_000_000
MAX_SHOWN = 200


def nearest(word: str, words: Sequence[str]) -> str:
    """``did you mean 'actor'?`` or, when nothing is near, the list of what there is."""
    if not words:
        return "there are none"
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(words))}"


def shown(value: Any) -> str:
    """`value` as a message can show it, whatever it is: in Python's form, of at most `MAX_SHOWN` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # A number with more digits than Python turns into text, or something that is nested too deeply.
        return f"a huge {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


class Reader:
    """Reads typed values out of mappings and collects the faults on the way."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def fault(self, where: str, problem: str, remedy: str = "") -> None:
        """Note one thing that is wrong."""
        self.faults.append(Fault(where, problem, remedy))

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        """A mapping with names as keys; empty for None."""
        if value is None:
            return {}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return dict(value)
        self.fault(where, f"expected a mapping with names as keys, found {shown(value)}")
        return {}

    def known(self, mapping: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
        """Every key of `mapping` must be one of `keys`."""
        for key in mapping:
            if key not in keys:
                self.fault(f"{where}.{key}" if where else key, "unknown key", nearest(key, keys))

    def text(self, value: Any, where: str, default: str = "") -> str:
        """A text that a process can be given."""
        if value is None:
            return default
        if isinstance(value, str) and can_be_passed_on(value):
            return value
        self.fault(where, f"expected a text, found {shown(value)}")
        return default

    def texts(self, value: Any, where: str) -> tuple[str, ...]:
        """A list of texts and numbers; a text alone is a list of one."""
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple) and all(isinstance(v, str | int | float) for v in value):
            return tuple(self.text(str(v), where) for v in value)
        self.fault(where, f"expected a list of texts, found {shown(value)}")
        return ()

    def integer(self, value: Any, where: str, default: int, least: int, most: int = MAX_COUNT) -> int:
        """A whole number from `least` to `most`, also as digits."""
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,12}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fault(where, f"expected a whole number, found {shown(value)}")
            return default
        if not least <= value <= most:
            self.fault(where, f"expected a number from {least} to {most}, found {shown(value)}")
            return default
        return value

    def seconds(self, value: Any, where: str, default: float, least: float = 0.0) -> float:
        """A duration of at least `least` seconds."""
        if value is None:
            return default
        number = as_number(value)
        if not least <= number < 1e9:
            self.fault(where, f"expected a number of seconds, at least {least:g}, found {shown(value)}")
            return default
        return number

    def flag(self, value: Any, where: str, default: bool = False) -> bool:
        """True or false."""
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.fault(where, f"expected true or false, found {shown(value)}")
        return default

    def choice(self, value: Any, where: str, choices: tuple[str, ...], default: str) -> str:
        """One of `choices`."""
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        self.fault(where, f"expected one of {', '.join(choices)}, found {shown(value)}")
        return default

    def env(self, value: Any, where: str) -> dict[str, str]:
        """Environment variables: names with texts or numbers, none of them unirun's own."""
        found: dict[str, str] = {}
        for key, item in self.mapping(value, where).items():
            if not ENV_NAME.fullmatch(key):
                self.fault(f"{where}.{key}", "not a name for an environment variable")
            elif key in RESERVED_ENV or key.startswith("UNIRUN_"):
                self.fault(f"{where}.{key}", "unirun sets this for every worker itself")
            elif isinstance(item, bool) or not isinstance(item, str | int | float):
                self.fault(f"{where}.{key}", f"expected a text or a number, found {shown(item)}", "quote it")
            else:
                found[key] = self.text(str(item), f"{where}.{key}")
        return found


def as_number(value: Any) -> float:
    """What a number or a text means as one; nan when it is none."""
    try:
        return float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def can_be_passed_on(text: str) -> bool:
    """Whether a process can get `text` as an argument, in its environment or as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
