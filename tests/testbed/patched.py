"""Runs unirun with other values of some of its constants: in the command and in what it forks, which are the agents and the
first master. Later masters are programs of their own, and have the values of the product.

``python patched.py '{"unirun.launcher.master.lead.TERM_TTL": 3}' ARGUMENTS…``
"""

import json
import sys
from collections.abc import Mapping
from importlib import import_module


def patch(constants: Mapping[str, float]) -> None:
    """Give the constants, by their full names, these values in this process."""
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path
        setattr(import_module(module), name, value)


if __name__ == "__main__":
    from unirun.cli import main

    patch(json.loads(sys.argv[1]))
    main(sys.argv[2:])
