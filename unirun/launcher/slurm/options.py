"""What ``--slurm`` asks of Slurm: ``nodes=4,partition=gpu,time=1:00:00,gres=gpu:8``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from unirun.errors import Fault, SpecError
from unirun.spec.read import nearest
from unirun.values import Value

GRACE = 60
"""Seconds before the time limit at which the job is told to end, unless ``grace`` says otherwise."""

_TEXT = r"[^\x00-\x1f\x7f\"'\\`$]+"
"""No line ends, and nothing that a shell or sbatch interprets within double quotes."""
_WORD = r"[A-Za-z0-9_.+:/@%,=\[\]|&*()~^-]+"
_COUNT = r"[1-9][0-9]{0,5}"
_SIZE = r"[0-9]{1,9}[KMGTkmgt]?"
_TIME = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|infinite"

_OF_JOB = {
    "account": _WORD,
    "begin": _TEXT,
    "comment": _TEXT,
    "deadline": _WORD,
    "dependency": _WORD,
    "mail_type": _WORD,
    "mail_user": _WORD,
    "nice": r"-?[0-9]{1,9}",
    "qos": _WORD,
    "time": _TIME,
}
"""Options of sbatch for the whole job, with the form of their values."""

_OF_COMPONENT = {
    "nodes": rf"{_COUNT}(-{_COUNT})?",
    "constraint": _TEXT,
    "cpus_per_gpu": _COUNT,
    "cpus_per_task": _COUNT,
    "exclude": _WORD,
    "exclusive": r"yes|user|mcs",
    "gpus_per_node": _WORD,
    "gres": _WORD,
    "licenses": _WORD,
    "mem": _SIZE,
    "mem_per_cpu": _SIZE,
    "mem_per_gpu": _SIZE,
    "nodelist": _WORD,
    "partition": _WORD,
    "reservation": _WORD,
    "switches": _WORD,
}
"""Options of sbatch for each component of a job."""

_OURS = {
    "env_vars": rf"[A-Za-z_][A-Za-z0-9_]*=({_TEXT})?",
    "grace": r"[0-9]{1,5}",
    "output": _TEXT,
    "requeue": r"yes|no",
}
"""For the whole job, and not passed on as they are."""

_OURS_OF_COMPONENT = {
    "container_image": _TEXT,
    "container_mounts": _TEXT,
    "roles": r"[A-Za-z][A-Za-z0-9_-]*(\+[A-Za-z][A-Za-z0-9_-]*)*",
}

_FORMS = _OF_JOB | _OURS | _OF_COMPONENT | _OURS_OF_COMPONENT
_OTHER_NAMES = {"time_limit": "time", "env": "env_vars"}
_MANY = ("env_vars", "container_mounts")
_INHERITED = ("account", "container_image", "container_mounts", "partition", "qos", "time")
"""What the first component says, for those that do not say otherwise."""

Pairs = Mapping[str, Sequence[str]]
"""The values of each key; several of `_MANY` only."""


class Component(Value):
    """One component of a heterogeneous job, or the only one: options of sbatch by name, and the roles that it is for.

    Without `roles` it is for all that no other component names.
    """

    options: Mapping[str, str]
    roles: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()


class BatchOptions(Value):
    """A batch job. `options` are those of sbatch for the whole job, by name; `grace` is in seconds; `output` is None
    for a file in the job's directory."""

    components: tuple[Component, ...]
    options: Mapping[str, str]
    env: Mapping[str, str]
    requeue: bool = True
    grace: int = GRACE
    output: str | None = None


def parse_slurm(texts: Sequence[str]) -> BatchOptions:
    """The batch job that the values of all ``--slurm`` describe, each with one component, or with several that have
    blanks and a colon between them (``nodes=1 : nodes=4``). Raises `SpecError` with every fault."""
    faults: list[Fault] = []
    parts = [_pairs(part, faults) for text in texts for part in re.split(r"\s+:\s+", text)]
    first = parts[0]
    for number, pairs in enumerate(parts[1:], 2):
        for key in pairs:
            if key in _OURS or (key in _OF_JOB and key not in _INHERITED):
                problem = f"it is for the whole job, and stands in component {number}"
                faults.append(Fault(f"--slurm {key}", problem, "write it in the first one"))
    named = Counter(role for pairs in parts for role in _roles(pairs))
    for role, times in named.items():
        if times > 1:
            faults.append(Fault("--slurm roles", f"{role} is named {times} times", "name each role once"))
    if len([pairs for pairs in parts if not _roles(pairs)]) > 1:
        problem = "several components name no roles"
        faults.append(Fault("--slurm roles", problem, "write roles=actor+rollout in all but one"))
    if faults:
        raise SpecError(faults)
    inherited = {key: value for key, value in first.items() if key in _INHERITED}
    return BatchOptions(
        components=tuple(_component({**inherited, **pairs}) for pairs in parts),
        options={key: first[key][0] for key in _OF_JOB if key in first and key not in _INHERITED},
        env=dict(pair.split("=", 1) for pair in first.get("env_vars", ())),
        requeue=_one(first, "requeue") != "no",
        grace=int(_one(first, "grace") or GRACE),
        output=_one(first, "output"),
    )


def _component(pairs: Pairs) -> Component:
    options = {key: values[0] for key, values in pairs.items() if key in _OF_COMPONENT or key in _OF_JOB}
    mine = {key: value for key, value in options.items() if key in _OF_COMPONENT or key in _INHERITED}
    mounts = tuple(pairs.get("container_mounts", ()))
    return Component({"nodes": "1", **mine}, _roles(pairs), _one(pairs, "container_image"), mounts)


def _roles(pairs: Pairs) -> tuple[str, ...]:
    return tuple(filter(None, (_one(pairs, "roles") or "").split("+")))


def _one(pairs: Pairs, key: str) -> str | None:
    return pairs[key][0] if key in pairs else None


def _pairs(text: str, faults: list[Fault]) -> dict[str, list[str]]:
    """The values of the keys in one component. Commas within brackets, and before a word without ``=``, are part of a
    value: ``nodelist=n[1-3],n7``."""
    found: dict[str, list[str]] = {}
    for item in _items(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        key = _OTHER_NAMES.get(name, name)
        where = f"--slurm {name}"
        if not equals or not value:
            faults.append(Fault(where, "it has no value", f"write {name}=…"))
        elif key not in _FORMS:
            faults.append(Fault(where, "unknown key", nearest(name, [*_FORMS])))
        elif key in found and key not in _MANY:
            faults.append(Fault(where, f"it is there twice: {found[key][0]} and {value}", "leave one out"))
        elif not re.fullmatch(_FORMS[key], value):
            faults.append(Fault(where, f"{value!r:.80} is not of its form", "see docs/slurm.md"))
        else:
            found.setdefault(key, []).append(value)
    return found


def _items(text: str) -> list[str]:
    """The items ``key=value`` between commas."""
    items: list[str] = []
    depth = 0
    for word in text.split(","):
        if items and (depth > 0 or "=" not in word):
            items[-1] += f",{word}"
        else:
            items.append(word)
        depth += word.count("[") - word.count("]")
    return items
