"""``unirun doctor``: what is wrong with hosts before a job runs on them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from unirun.errors import EXIT_FAILURE, UsageError
from unirun.launcher.doctor.examine import Way, by_srun, by_ssh, examine, here
from unirun.launcher.doctor.judge import findings, lines
from unirun.launcher.foreground.terminal import say
from unirun.launcher.hostlist import Host, expand_nodelist, parse_hosts, read_hostfile
from unirun.launcher.slurm.allocation import component_lists


def main(options: Any) -> int:
    """Examine hosts and print what was found. Returns 0 when nothing is wrong, else 1. Raises `UsageError`."""
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("--hosts and --hostfile exclude each other", "leave out one of them")
    hosts, way = _hosts(options.hosts, options.hostfile, os.environ)
    found = asyncio.run(examine(hosts, way, interface=options.interface))
    wrong = findings(found)
    if options.json:
        print(json.dumps({**to_builtins(found), "findings": to_builtins(wrong)}))
    else:
        for line in lines(found, wrong):
            say(line)
    return EXIT_FAILURE if wrong else 0


def _hosts(listed: str | None, file: str | None, environ: Mapping[str, str]) -> tuple[tuple[Host, ...], Way]:
    """The hosts to examine, and how they are reached."""
    if listed is not None:
        return parse_hosts(listed), by_ssh
    if file is not None:
        return read_hostfile(Path(file)), by_ssh
    nodes = environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        name = socket.gethostname()
        return (Host(name, name),), here
    if environ.get("SLURM_PROCID", "0") != "0":
        raise UsageError(
            "unirun doctor runs once in an allocation", "call it without srun, or with srun --ntasks=1"
        )
    parts = component_lists(environ)
    components = {node: number for number, part in enumerate(parts) for node in part}
    names = tuple(components) or expand_nodelist(nodes)
    return tuple(Host(name, name) for name in names), by_srun(components)
