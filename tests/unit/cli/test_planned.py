"""The nodes that a job is planned for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unirun.cli.options import parse
from unirun.cli.planned import inventory_of
from unirun.collocation import local_inventory, parse_fake
from unirun.errors import UsageError

JobFile = Callable[[str], str]


def test_nodes_are_those_of_the_option_or_this_host() -> None:
    assert inventory_of(parse(["--inventory", "fake:nodes=2", "train.py"])) == parse_fake("fake:nodes=2")
    assert inventory_of(parse(["train.py"])) == local_inventory()


@pytest.mark.parametrize("text", ["", "nodes=2", "slurm"])
def test_an_inventory_that_is_not_known_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="--inventory .* is none that is known; write fake:"):
        inventory_of(parse([f"--inventory={text}", "train.py"]))
