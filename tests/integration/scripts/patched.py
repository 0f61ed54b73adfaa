"""Runs unirun with other values of some of its constants: in the command and in what it forks, which are the agents and the
first master. Later masters are programs of their own, and have the values of the product.

``python patched.py '{"unirun.launcher.master.lead.TERM_TTL": 3}' ARGUMENTS…``
"""

import json
import sys
from importlib import import_module

from unirun.cli import main

for path, value in json.loads(sys.argv[1]).items():
    module, _, name = path.rpartition(".")
    assert hasattr(import_module(module), name), path
    setattr(import_module(module), name, value)
main(sys.argv[2:])
