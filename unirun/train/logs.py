"""Logging in the ranks of a trainer as its program has configured it: the level and the format of the root logger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_STYLES = {logging.PercentStyle: "%", logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}


def told() -> dict[str, Any] | None:
    """The level and format of this program's root logger; None when it has not configured logging.

    A formatter of another class, such as one that writes JSON, cannot be told: then the format is Python's own.
    """
    root = logging.getLogger()
    if not root.handlers:
        return None
    found = {"level": root.level, "format": logging.BASIC_FORMAT, "datefmt": None, "style": "%"}
    for formatter in (handler.formatter for handler in root.handlers):
        if type(formatter) is logging.Formatter and formatter._fmt:
            style = next((_STYLES[each] for each in type(formatter._style).mro() if each in _STYLES), "%")
            # A dollar with a brace would be a reference to another value of the config.
            text = formatter._fmt.replace("${", r"\${")
            return {**found, "format": text, "datefmt": formatter.datefmt, "style": style}
    return found


def configure(setting: Mapping[str, Any] | None) -> None:
    """Configure logging so, unless a module that was imported before has configured it."""
    if setting is not None:
        logging.basicConfig(**setting)
