"""Logging that a trainer's program has configured, in its ranks."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from unirun.train.setup import configure_logging, logging_told


@contextlib.contextmanager
def new_root() -> Iterator[logging.Logger]:
    """The root logger as it is in a new process, in place of pytest's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        yield root
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_nothing_is_told_of_a_program_that_has_not_configured_logging() -> None:
    with new_root() as root:
        assert logging_told() is None
        configure_logging(None)
        assert root.handlers == []


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "INFO:mine:words"),
        ({"format": "%(name)s %(message)s"}, "mine words"),
        ({"format": "{name} {message}", "style": "{"}, "mine words"),
        ({"format": "${name} ${message}", "style": "$"}, "mine words"),
        ({"format": "%(asctime)s %(message)s", "datefmt": "then"}, "then words"),
    ],
)
def test_info_of_ranks_is_written_as_that_of_the_program(given: dict[str, Any], line: str) -> None:
    with new_root():
        logging.basicConfig(level=logging.INFO, **given)
        # As workers get it.
        setting = OmegaConf.create({"logging": logging_told()}).logging
    with new_root() as root:
        configure_logging(setting)
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        stream = io.StringIO()
        handler.setStream(stream)
        logging.getLogger("mine").info("words")
        logging.getLogger("mine").debug("more words")
        assert stream.getvalue() == f"{line}\n"


def test_a_formatter_of_another_class_is_not_told() -> None:
    class AsJson(logging.Formatter):
        """As many packages have."""

    with new_root() as root:
        handler = logging.StreamHandler()
        handler.setFormatter(AsJson("%(message)s"))
        root.addHandler(handler)
        found = logging_told()
    assert found is not None
    assert found["format"] == logging.BASIC_FORMAT
