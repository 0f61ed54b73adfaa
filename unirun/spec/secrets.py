"""Secrets of a job: variables from files that only its processes read, and a mask for what is told of it.

The spec, which is written to the store and shown in plans, has the path of an ``env_file`` and the names of ``secret``
variables, and never a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from unirun.errors import Fault
from unirun.spec.job import JobSpec
from unirun.spec.read import ENV_NAME, RESERVED_ENV, Section

MASK = "***"

MIN_SECRET_CHARACTERS = 6
"""Characters of a value that is masked: ``1`` or ``true`` would hide parts of other words."""


def read_env_file(path: str) -> dict[str, str]:
    """The variables in a file of lines ``NAME=VALUE``, as docker and systemd read it: empty lines and those that begin
    with ``#`` do not count, nor does ``export``, nor quotes around a value. Raises OSError, and ValueError for another
    line."""
    found: dict[str, str] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, equals, value = re.sub(r"^export\s+", "", text).partition("=")
            if not equals or not ENV_NAME.fullmatch(name) or "\0" in value:
                raise ValueError(f"line {number} is not NAME=VALUE")
            if name in RESERVED_ENV or name.startswith("UNIRUN_"):
                raise ValueError(f"line {number}: unirun sets {name} for every worker itself")
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name] = value[1:-1] if quoted else value
    return found


def check_env_file(section: Section) -> str | None:
    """The path at ``env_file``, which can be read. The faults are added to those of `section`, without any value."""
    key = "env_file"
    path = section.text(key)
    if not path:
        return None
    try:
        read_env_file(path)
    except OSError as error:
        section.fault(key, f"{path!r} cannot be read: {(error.strerror or str(error)).lower()}")
    except ValueError as error:
        section.fault(key, f"{path!r}: {error}", "write a NAME=VALUE on each line")
    return path


def read_secrets(job: Section, envs: Iterable[tuple[str, Mapping[str, str]]]) -> tuple[str, ...]:
    """The names of secret variables. A value in `envs`, each with its place, would be in the spec."""
    names = job.texts("secret")
    for name in names:
        if not ENV_NAME.fullmatch(name):
            job.fault("secret", f"{name!r} is no name of a variable", "name variables, not their values")
    for where, env in envs:
        for name in sorted({*names} & {*env}):
            problem = f"{name} is secret, and its value is in the job file"
            job.faults.append(
                Fault(f"{where}.{name}", problem, "set it where unirun is called, or in an env_file")
            )
    return names


def secret_names(spec: JobSpec) -> frozenset[str]:
    """The names of all variables whose values are masked. Files that cannot be read have none."""
    names = {*spec.secret}
    for path in filter(None, (spec.env_file, *(role.env_file for role in spec.roles))):
        try:
            names.update(read_env_file(path))
        except (OSError, ValueError):
            continue
    return frozenset(names)


def masking(values: Iterable[str]) -> Callable[[str], str]:
    """A function that puts `MASK` in place of each of these secret values in a text."""
    long = sorted({value for value in values if len(value) >= MIN_SECRET_CHARACTERS}, key=len, reverse=True)
    if not long:
        return str
    return partial(re.compile("|".join(map(re.escape, long))).sub, MASK)
