"""Reads typed values from mappings, and shows texts and sizes.

A fault has the place of the value, what was expected and what was found.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import category

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
    """``did you mean 'actor'?`` or, when no word is similar, all of `words`."""
    if not words:
        return "there are none"
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(words))}"


def shown(value: Any) -> str:
    """The ``repr`` of `value` for a message, of at most `MAX_SHOWN` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # A number with more digits than Python turns into text, or something that is nested too deeply.
        return f"a huge {type(value).__name__}"
    return clipped(text, MAX_SHOWN)


def clipped(text: str, most: int) -> str:
    """`text`, with an ellipsis at its end when it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def some(number: int | str, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``all nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str, *, keep: str = "") -> str:
    """Escape each unprintable character of `text`, except those in `keep`, as Python does (``\\x1b``).

    For text from workers, stores and other users' jobs: terminals obey control characters, others change the writing
    direction, and lone surrogates cannot be written at all.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


class Section:
    """One mapping of a job file: methods read typed values by their keys; what is wrong is added to `faults`.

    `where` is the place of the mapping in the file, empty for the file itself. All sections of a file share `faults`.
    A job that runs `here` has the modules of this host.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        where: str = "",
        faults: list[Fault] | None = None,
        *,
        here: bool = True,
    ) -> None:
        self.fields, self.where, self.here = fields, where, here
        self.faults: list[Fault] = [] if faults is None else faults

    def at(self, key: str) -> str:
        """The place of `key` in the file."""
        return f"{self.where}.{key}" if self.where else key

    def fault(self, key: str, problem: str, remedy: str = "") -> None:
        """Add one fault of the value of `key`."""
        self.faults.append(Fault(self.at(key), problem, remedy))

    def given(self, key: str) -> bool:
        """Return True if there is a value, and not null."""
        return self.fields.get(key) is not None

    def below(self, key: str, fields: Mapping[str, Any]) -> Section:
        """The section of `fields`, which are at `key`."""
        return Section(fields, self.at(key), self.faults)

    def section(self, key: str) -> Section:
        """The section at `key`; empty when there is none."""
        return self.below(key, self.mapping(key))

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping with names as keys; empty for null."""
        value = self.fields.get(key)
        if value is None:
            return {}
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return dict(value)
        self.fault(key, f"expected a mapping with names as keys, found {shown(value)}")
        return {}

    def items(self, key: str, what: str, remedy: str) -> Section:
        """The items of a list of `what`, as a section with the keys ``key[0]``, ``key[1]``, …; empty for null."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, list | tuple):
            self.fault(key, f"expected a list of {what}, found {shown(value)}", remedy)
            value = None
        items = {f"{key}[{number}]": item for number, item in enumerate(value or ())}
        return Section(items, self.where, self.faults)

    def known(self, keys: tuple[str, ...], elsewhere: Mapping[str, str] | None = None) -> None:
        """Every key must be one of `keys`; `elsewhere` has the remedy for each key of another launcher."""
        for key in self.fields:
            if key not in keys:
                self.fault(key, "unknown key", (elsewhere or {}).get(key) or nearest(key, keys))

    def text(self, key: str) -> str:
        """A text that a process can be given; empty for null."""
        value = self.fields.get(key)
        return "" if value is None else self._text(key, value)

    def _text(self, key: str, value: Any) -> str:
        if isinstance(value, str) and can_be_passed_on(value):
            return value
        self.fault(key, f"expected a text, found {shown(value)}", _unquoted([value]))
        return ""

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts and numbers; a text alone is a list of one."""
        value = self.fields.get(key)
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        plain = isinstance(value, list | tuple)
        if plain and all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in value):
            return tuple(self._text(key, str(v)) for v in value)
        self.fault(key, f"expected a list of texts, found {shown(value)}", _unquoted(value))
        return ()

    def integer(self, key: str, default: int, least: int, most: int = MAX_COUNT) -> int:
        """A whole number from `least` to `most`, also as digits."""
        value = self.fields.get(key)
        return default if value is None else self.as_integer(key, value, default, least, most)

    def as_integer(self, key: str, value: Any, default: int, least: int, most: int = MAX_COUNT) -> int:
        """The same for `value`, a part of the value of `key`."""
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,12}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fault(key, f"expected a whole number, found {shown(value)}")
            return default
        if not least <= value <= most:
            self.fault(key, f"expected a number from {least} to {most}, found {shown(value)}")
            return default
        return value

    def seconds(self, key: str, default: float, least: float = 0.0) -> float:
        """A duration of at least `least` seconds, as a number of them or with a unit (``10m``)."""
        value = self.fields.get(key)
        if value is None:
            return default
        number = as_duration(value)
        if not least <= number < 1e9:
            self.fault(key, f"expected a number of seconds, at least {least:g}, found {shown(value)}")
            return default
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.fields.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.fault(key, f"expected true or false, found {shown(value)}")
        return default

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of `choices`."""
        value = self.fields.get(key)
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        self.fault(key, f"expected one of {', '.join(choices)}, found {shown(value)}")
        return default

    def env(self, key: str) -> dict[str, str]:
        """Environment variables: names with texts or numbers, none of them unirun's own."""
        found: dict[str, str] = {}
        env = self.section(key)
        for name, value in env.fields.items():
            if not ENV_NAME.fullmatch(name):
                env.fault(name, "not a name for an environment variable")
            elif name in RESERVED_ENV or name.startswith("UNIRUN_"):
                env.fault(name, "unirun sets this for every worker itself")
            elif isinstance(value, bool) or not isinstance(value, str | int | float):
                remedy = _unquoted([value]) or "quote it"
                env.fault(name, f"expected a text or a number, found {shown(value)}", remedy)
            else:
                found[name] = env._text(name, str(value))
        return found


def _unquoted(values: Any) -> str:
    """The remedy for ``[--port, {port}]`` and ``[--mode, on]``: in YAML, a name in braces without quotes is a mapping,
    and ``on`` and ``no`` are true and false."""
    for value in values if isinstance(values, list | tuple) else ():
        if isinstance(value, bool):
            return "quote it"
        if isinstance(value, Mapping) and len(value) == 1 and [*value.values()] == [None]:
            return f"quote it: '{{{next(iter(value))}}}'"
    return ""


def as_number(value: Any) -> float:
    """A number, or a text that is one, as a float; nan for anything else."""
    try:
        return float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError, OverflowError):
        return float("nan")


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def as_duration(value: Any) -> float:
    """The seconds of a number, or of a text like ``90s``, ``30m``, ``12h``, ``7d``; nan for anything else."""
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(found[1]) * _SECONDS[found[2]] if found else as_number(value)


def can_be_passed_on(text: str) -> bool:
    """Return True if a process can get `text` as an argument, in its environment or as a path."""
    try:
        text.encode(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
    except UnicodeEncodeError:
        return False
    return "\0" not in text


# Numbers of bytes, as people write and read them.

_UNITS = {
    "": 1,
    **{prefix: 1000 ** (power + 1) for power, prefix in enumerate("kmgtp")},
    **{f"{prefix}i": 1024 ** (power + 1) for power, prefix in enumerate("kmgtp")},
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgtp]i?)?b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """``64MB`` as 64 000 000, ``1.5GiB`` as 1 610 612 736, ``12`` as 12. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes; write 64MB, 1.5GiB or 4096")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def show_size(size: float) -> str:
    """``512 B``, ``12.3 kB``, ``4.0 MB``, ``1.2 GB``: powers of 1000."""
    if size < 999.5:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} PB"


# Names of jobs: what a run id may look like, and how one is made of a script's or a module's name.

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

RUN_ID_RULE = "use letters, digits, '.', '-' and '_', a letter or digit first, at most 63"
"""The rule in words, as the remedy of an error."""


def is_run_id(value: object) -> bool:
    """Return True if `value` may be the id of a job.

    A run id is the name of a directory and a part of keys in a store. So it has no ``/``, is neither ``.`` nor ``..``,
    and holds nothing that a shell or a terminal would interpret. Ids that were read from a store, a directory or a
    message are checked here before they are used.
    """
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


MAX_STEM = 40
"""Characters of a name that become part of an id."""


def id_stem(name: str) -> str:
    """`name` with everything that no id may hold as a dash, for the beginning of an id: ``my train é`` → ``my-train``.

    ``job`` when nothing is left.
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:MAX_STEM].rstrip("-_") or "job"
