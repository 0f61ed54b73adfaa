"""The options of ``--slurm`` for Slurm: ``nodes=4,partition=gpu,time=1:00:00,gres=gpu:8``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from unirun.errors import Fault, SpecError
from unirun.spec.read import nearest
from unirun.values import Value, natural

DEFAULT_GRACE_SECONDS = 60
"""Seconds before the time limit at which the job is told to end, unless ``grace`` says otherwise."""


# The forms of values: a regular expression, and the same in words.

_CONTROL = r"\x00-\x1f\x7f\x85\u2028\u2029"
_TEXT = (rf"[^{_CONTROL}\"'\\`$]+", "a text without quotes, backslashes, ` and $")
"""No line ends, and nothing that a shell or sbatch interprets within double quotes."""
_WORD = (r"[A-Za-z0-9_.+:/@%,=\[\]|&*()~^-]+", "a word without blanks and quotes")
_NUMBER = r"[1-9][0-9]{0,5}"
_COUNT = (_NUMBER, "a number from 1")
_SIZE = (r"[0-9]{1,9}[KMGTkmgt]?", "a size: 4000 (MB) or 64G")
_TIME = (
    r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|infinite",
    "a time: 90 (minutes), 8:00:00 or 2-0 (days-hours)",
)

_OF_JOB = {
    "account": _WORD,
    "begin": _TEXT,
    "comment": _TEXT,
    "deadline": _WORD,
    "dependency": _WORD,
    "mail_type": _WORD,
    "mail_user": _WORD,
    "nice": (r"-?[0-9]{1,9}", "a whole number"),
    "qos": _WORD,
    "time": _TIME,
}
"""Options of sbatch for the whole job, with the form of their values."""

_OF_COMPONENT = {
    "nodes": (rf"{_NUMBER}(-{_NUMBER})?", "a number of nodes, or MIN-MAX: nodes=4"),
    "constraint": _TEXT,
    "cpus_per_gpu": _COUNT,
    "cpus_per_task": _COUNT,
    "exclude": _WORD,
    "exclusive": (r"yes|user|mcs", "yes, user or mcs"),
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

WITHOUT = (
    *("job_name", "no_kill", "nodes", "ntasks_per_node"),
    *("open_mode", "output", "requeue", "signal"),
)
"""Options of sbatch that unirun writes into every script, and that the user can leave out."""
_LEFT_OUT = "|".join(WITHOUT).replace("_", "[-_]")

_OURS = {
    "env_vars": (rf"[A-Za-z_][A-Za-z0-9_]*=({_TEXT[0]})?", "NAME=VALUE, and the value " + _TEXT[1]),
    "grace": (r"[0-9]{1,5}", "a number of seconds"),
    "output": _TEXT,
    "requeue": (r"yes|no", "yes or no"),
    "without": (
        rf"({_LEFT_OUT})(\+({_LEFT_OUT}))*",
        f"some of {', '.join(WITHOUT)}, with + between them",
    ),
}
"""For the whole job, and not passed on as they are."""

_OURS_OF_COMPONENT = {
    "container_image": _TEXT,
    "container_mounts": _TEXT,
    "roles": (
        r"[A-Za-z][A-Za-z0-9_-]*(\+[A-Za-z][A-Za-z0-9_-]*)*",
        "names of roles, with + between them: actor+critic",
    ),
}

_FORMS = _OF_JOB | _OURS | _OF_COMPONENT | _OURS_OF_COMPONENT
_OTHER_NAMES = {"time_limit": "time", "env": "env_vars"}
_MANY = ("env_vars", "container_mounts")
_INHERITED = ("account", "container_image", "container_mounts", "partition", "qos", "time")
"""Options of the first component that hold for the others unless they say otherwise."""

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
    for a file in the job's directory. `extra` are more options of sbatch, as they stand in a script, `setup` are lines
    of bash that the script begins with, and `without` names options that it would have without being asked."""

    components: tuple[Component, ...]
    options: Mapping[str, str]
    env: Mapping[str, str]
    requeue: bool = True
    grace: int = DEFAULT_GRACE_SECONDS
    output: str | None = None
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def parse_slurm(
    texts: Sequence[str], *, extra: Sequence[str] = (), setup: Sequence[str] = ()
) -> BatchOptions:
    """The batch job that the values of all ``--slurm`` describe, each with one component, or with several that have
    blanks and a colon between them (``nodes=1 : nodes=4``); `extra` and `setup` are the values of ``--slurm-extra`` and
    ``--slurm-setup``. Raises `SpecError` with every fault."""
    faults = [*_faulty("extra", extra, _EXTRA), *_faulty("setup", setup, _SETUP)]
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
    if faults:
        raise SpecError(faults)
    inherited = {key: value for key, value in first.items() if key in _INHERITED}
    return BatchOptions(
        components=tuple(_component({**inherited, **pairs}) for pairs in parts),
        options={key: first[key][0] for key in _OF_JOB if key in first and key not in _INHERITED},
        env=dict(pair.split("=", 1) for pair in first.get("env_vars", ())),
        requeue=_one(first, "requeue") != "no",
        grace=int(_one(first, "grace") or DEFAULT_GRACE_SECONDS),
        output=_one(first, "output"),
        extra=tuple(extra),
        setup=tuple(setup),
        without=tuple(name.replace("-", "_") for name in _names(first, "without")),
    )


_EXTRA = (
    rf"(-[A-Za-z]|--[A-Za-z][A-Za-z0-9-]*)([= ][^{_CONTROL}]*)?",
    "an option of sbatch in one line: --account=x",
)
_SETUP = (rf"[^{_CONTROL}]*[^{_CONTROL}\s][^{_CONTROL}]*", "a line of bash: module load cuda")


def _faulty(option: str, values: Sequence[str], form: tuple[str, str]) -> Iterator[Fault]:
    for value in values:
        if not re.fullmatch(form[0], value):
            yield Fault(f"--slurm-{option}", f"expected {form[1]}, found {value!r:.80}", "see docs/slurm.md")


def _component(pairs: Pairs) -> Component:
    options = {key: values[0] for key, values in pairs.items() if key in _OF_COMPONENT or key in _OF_JOB}
    mine = {key: value for key, value in options.items() if key in _OF_COMPONENT or key in _INHERITED}
    mounts = tuple(pairs.get("container_mounts", ()))
    return Component({"nodes": "1", **mine}, _roles(pairs), _one(pairs, "container_image"), mounts)


def _roles(pairs: Pairs) -> tuple[str, ...]:
    return _names(pairs, "roles")


def _names(pairs: Pairs, key: str) -> tuple[str, ...]:
    return tuple(filter(None, (_one(pairs, key) or "").split("+")))


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
        where = f"--slurm {name}".rstrip()
        if not name:
            faults.append(Fault(where, f"{text!r:.80} has an item without a name", "write nodes=4,time=60"))
        elif not equals or not value:
            missing = f"nodes={name}" if natural(name) is not None else f"{name}=…"
            faults.append(Fault(where, "it has no value", f"write {missing}"))
        elif key not in _FORMS:
            faults.append(Fault(where, "unknown key", nearest(name, [*_FORMS])))
        elif key in found and key not in _MANY:
            faults.append(Fault(where, f"it is there twice: {found[key][0]} and {value}", "leave one out"))
        elif not re.fullmatch(_FORMS[key][0], value):
            problem = f"expected {_FORMS[key][1]}, found {value!r:.80}"
            faults.append(Fault(where, problem, "see docs/slurm.md"))
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
