"""The check that the interpreter of a script, or of an engine that receives weights, can import unirun."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from unirun.errors import Fault
from unirun.spec.engines import RECEIVING
from unirun.spec.job import RoleSpec


def interpreter_faults(role: RoleSpec, env: Mapping[str, str]) -> Iterator[Fault]:
    """The fault of a role whose interpreter has to import unirun and cannot. One that is given ``PYTHONPATH``, or a
    file of variables, may be able to."""
    told = role.env_file or any("PYTHONPATH" in each for each in (role.env, env, os.environ))
    if role.entry.kind in ("script", "module"):
        use, otherwise = (
            f"a {role.entry.kind} needs it there",
            ", or write program: python, which does not need it",
        )
    elif role.engine == "vllm" and RECEIVING[-1] in role.entry.args:
        use, otherwise = "vLLM loads its plugin for weights from there", ""
    else:
        return
    if role.python and not told and lacks_unirun(role.python):
        problem = f"unirun is not installed in {Path(role.python).parent.parent}, and {use}"
        remedy = f"run {role.python} -m pip install torch-unirun{otherwise}"
        yield Fault(f"roles.{role.name}.python", problem, remedy)


def lacks_unirun(python: str) -> bool:
    """Return True if `python` is that of a virtual environment in which unirun is certainly not installed.

    The interpreter is not started: unirun would be in the environment's directory of packages, or in another one that a
    ``.pth`` file there names.
    """
    environment = Path(python).parent.parent
    try:
        settings = (environment / "pyvenv.cfg").read_text()
        if re.search(r"(?im)^include-system-site-packages\s*=\s*true", settings):
            return False
        folders = [*environment.glob("lib*/python*/site-packages")]
        names = [name for folder in folders for name in _names_for_import(folder)]
    except (OSError, UnicodeDecodeError):
        return False
    return bool(folders) and not any("unirun" in name or name == "sitecustomize.py" for name in names)


def _names_for_import(folder: Path) -> Iterator[str]:
    """The names in `folder`, and in the directories that its ``.pth`` files name. Raises `OSError`."""
    for entry in folder.iterdir():
        yield entry.name
        if entry.suffix == ".pth":
            for line in entry.read_text().splitlines():
                if line.strip() and not line.startswith("#") and (more := folder / line.strip()).is_dir():
                    yield from (each.name for each in more.iterdir())
