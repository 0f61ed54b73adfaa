"""``unirun stubs pkg.mod:Class …``: role groups with the signatures of workloads, for editors and type checkers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from unirun.cli.files import write_file
from unirun.cli.options import Parser
from unirun.errors import Fault, SpecError
from unirun.spec.classes import Missing, missing_class, source_of
from unirun.spec.stubs import Source, group_stubs

_HELP = """Print a module with a typed role group for each class, made from its source without importing it.
With ``RG_ACTOR: ActorGroup`` in the trainer's class, an editor knows what RG_ACTOR.update(…) takes and gives."""


def main(argv: list[str]) -> int:
    """Print the module, or write it. Returns 0."""
    parser = Parser(prog="unirun stubs", description=_HELP)
    parser.add_argument("classes", nargs="+", metavar="pkg.mod:Class", help="classes of workloads")
    parser.add_argument("-o", "--output", metavar="FILE", help="a .py or .pyi file (default: print)")
    parser.add_argument("--cwd", default=".", metavar="DIR", help="where modules are looked for first")
    options = parser.parse_args(argv)
    text = group_stubs(_sources(options.classes, options.cwd))
    if options.output is None:
        sys.stdout.write(text)
        return 0
    write_file(options.output, text)
    return 0


def _sources(classes: list[str], cwd: str) -> list[Source]:
    faults, sources = [], []
    for target in classes:
        missing = missing_class(target, [cwd])
        module, _, name = target.partition(":")
        path = missing or source_of(module, [cwd])
        if isinstance(path, Missing):
            faults.append(Fault(target, path.problem, path.remedy))
        else:
            package = module if os.path.basename(path) == "__init__.py" else module.rpartition(".")[0]
            sources.append(Source(module, package, name, Path(path).read_bytes()))
    if faults:
        raise SpecError(faults)
    return sources
