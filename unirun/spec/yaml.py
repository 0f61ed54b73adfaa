"""A job in YAML, with OmegaConf's interpolation and dotted overrides."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirun.errors import Fault, SpecError
from unirun.spec.parse import JOB_KEYS
from unirun.spec.read import nearest, shown
from unirun.values import natural

# ``key=value`` and ``+key=value`` on a command line: single values of a job file, changed and added.
#
# As in Hydra, a key that the file does not have needs a ``+``, so that a typing error (``config.stepz=5``) is found.

_KEY = re.compile(r"[^.\[\]=\s]+(?:\.[^.\[\]=\s]+|\[\d+\])*")
_TREES = ("config", "roles")
"""The mappings whose keys the user chooses, so that only the file tells which there are."""

_PART = re.compile(r"[^.\[\]]+")


Closed = Mapping[str, frozenset[str]]
"""The names that the file has in each of these trees, if any."""

ReadValue = Callable[[str, str], Any]
"""Reads a text as YAML; the first argument is its place, for errors. Raises `SpecError`."""


def is_override(word: str) -> bool:
    """Return True if an argument has the form of an override."""
    key, equals, _ = word.partition("=")
    return bool(equals) and _KEY.fullmatch(key.removeprefix("+")) is not None


def overridden(file: Mapping[str, Any], texts: Sequence[str], read_value: ReadValue) -> dict[str, Any]:
    """`file`, a job file in its long form, changed by the overrides `texts`. A mapping is merged with the one there.

    Raises `SpecError` with all faults.
    """
    closed = {
        tree: frozenset(map(str, file[tree]))
        for tree in _TREES
        if isinstance(file.get(tree), Mapping) and file[tree]
    }
    data = copy.deepcopy(dict(file))
    faults: list[Fault] = []
    for text in texts:
        try:
            _apply(data, text, read_value, closed)
        except SpecError as error:
            faults += error.faults
    if faults:
        raise SpecError(faults)
    return data


def _apply(data: dict[str, Any], text: str, read_value: ReadValue, closed: Closed) -> None:
    key, _, written = text.partition("=")
    if not is_override(text):
        raise SpecError([Fault(text, "is no override", "write key=value, as roles.actor.count=8")])
    if not written.strip():
        remedy = f"write {key}=VALUE; null is for none, and '\"\"' for an empty text"
        raise SpecError([Fault(text, "has no value", remedy)])
    value, path = read_value(text, written), _PART.findall(key.removeprefix("+"))
    if path[0] == "roles" and len(path) == 2 and not isinstance(value, Mapping):
        path.append("count")
    node: Any = None
    at: Any = ""
    below: Any = data
    for number, part in enumerate(path, 1):
        where = ".".join(path[: number - 1])
        if not isinstance(below, dict | list):
            problem = f"{where} is {shown(below)}, which has no keys"
            raise SpecError([Fault(text, problem, f"write {where}=VALUE")])
        node, at = below, part
        if isinstance(node, list):
            if (item := natural(part)) is None or item >= len(node):
                problem = f"{where} is a list of {len(node)}, and has no item {part}"
                raise SpecError([Fault(text, problem, "items are counted from 0")])
            at = item
        elif part not in node:
            _must_be_open(node, path[:number], text, closed)
        if isinstance(node, dict) and node.get(at) is None and number < len(path):
            node[at] = {}
        below = node[at] if isinstance(node, list) else node.get(at)
    if isinstance(node, dict) and isinstance(below, dict) and isinstance(value, Mapping):
        merge(below, value)
    else:
        node[at] = value


def _must_be_open(node: Mapping[Any, Any], path: Sequence[str], text: str, closed: Closed) -> None:
    """Raise `SpecError` for a new key without ``+`` in a mapping whose keys the user chooses.

    All other keys are checked when the job is parsed.
    """
    tree, adds, word = path[0], text.startswith("+"), text.removeprefix("+")
    for home in _TREES:
        if tree not in JOB_KEYS and tree in closed.get(home, ()):
            remedy = f"did you mean {'+' * adds}{home}.{word}?"
            raise SpecError([Fault(text, f"a job has no {tree!r}", remedy)])
    if tree not in JOB_KEYS and not difflib.get_close_matches(tree, JOB_KEYS, n=1):
        remedy = f"+config.{word} adds it to your own configuration"
        raise SpecError([Fault(text, f"a job has no {tree!r}", remedy)])
    if adds or tree not in closed or (tree == "roles" and len(path) != 2):
        return
    where = ".".join(path[:-1])
    remedy = f"{nearest(path[-1], [*map(str, node)])}; +{text} adds it"
    raise SpecError([Fault(text, f"the job file has no {path[-1]!r} in {where}", remedy)])


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put the values of `over` into `base`; a mapping is merged with the mapping that is there."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


MAX_DEPTH = 100
MAX_BITS = 4096


def load_job_file(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in the file `path`, in its long form, after `overrides` (``roles.actor.count=8``) and interpolation.

    A file whose name ends with ``.json`` is read as it is, without interpolation, because programs write it.
    Raises `SpecError` when it cannot be read, is not YAML, or refers to a missing key.
    """
    try:
        plain = _read_json(path, overrides) if path.endswith(".json") else _read_yaml(path, overrides)
    except OSError as error:
        raise SpecError([Fault(path, f"cannot be read: {(error.strerror or str(error)).lower()}")]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Fault(path, "is no text in UTF-8")]) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    refuse_extremes(path, plain)
    return plain


def refuse_extremes(path: str, plain: Mapping[str, Any]) -> None:
    """Raise `SpecError` for values nested too deeply and for huge numbers: JSON or Python fail at them later."""
    rest: list[tuple[Any, str, int]] = [(plain, "", 0)]
    while rest:
        value, where, depth = rest.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(path)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SpecError([Fault(path, f"{where}: a number of more than {MAX_BITS} bits", "quote it")])
        pairs = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        rest += [(each, f"{where}.{key}" if where else str(key), depth + 1) for key, each in pairs]


def _too_deep(path: str) -> SpecError:
    return SpecError([Fault(path, f"is nested too deeply; at most {MAX_DEPTH} levels are possible")])


def _read_value(where: str, text: str) -> Any:
    """`text`, the value of an override `where`, parsed as YAML. Raises `SpecError`."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        config = OmegaConf.from_dotlist([f"value={_without_base_60(text, root)}"])
        return OmegaConf.to_container(config)["value"]  # type: ignore[call-overload, index]
    except yaml.YAMLError as error:
        raise SpecError([Fault(where, f"its value is no YAML: {_problem(error)}", "quote it")]) from error
    except RecursionError as error:
        raise SpecError([Fault(where, "its value is nested too deeply")]) from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise SpecError([Fault(where, _first_line(error), "quote it")]) from error


def long_form(data: Mapping[Any, Any]) -> dict[str, Any]:
    """``actor: 4`` in a job file means ``actor: {count: 4}``; in the long form, overrides and options can add to it."""
    long = {str(key): value for key, value in data.items()}
    roles, trainer = long.get("roles"), long.get("trainer")
    if isinstance(roles, dict):
        long["roles"] = {
            n: r if isinstance(r, dict) else {} if r is None else {"count": r} for n, r in roles.items()
        }
    if trainer is not None and not isinstance(trainer, dict):
        long["trainer"] = {"class": trainer}
    return long


def write_yaml(*documents: Mapping[str, Any]) -> str:
    """`documents` of plain values as YAML, in their order; texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """A class of its own, as representers are kept by class."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _read_json(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    if overrides:
        raise SpecError([Fault(path, "is no YAML, so nothing can be overridden", "write a job in YAML")])
    with open(path, encoding="utf-8") as file:
        try:
            plain = json.load(file)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise SpecError([Fault(path, f"is no JSON: {_first_line(error)}")]) from error
    if not isinstance(plain, dict):
        raise SpecError([Fault(path, "holds no object, expected one with keys like 'roles'")])
    return long_form(plain)


def _read_yaml(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            what = "a list" if isinstance(root, yaml.SequenceNode) else "a text"
            raise SpecError([Fault(path, f"holds {what}, expected a mapping with keys like 'roles'")])
        config = OmegaConf.create(_without_base_60(text, root))
        plain = OmegaConf.to_container(config)
        assert isinstance(plain, dict)
        changed = OmegaConf.create(overridden(long_form(plain), overrides, _read_value))
        plain = OmegaConf.to_container(changed, resolve=True, throw_on_missing=True)
    except UnicodeDecodeError:
        raise
    except yaml.YAMLError as error:
        raise SpecError([Fault(path, f"is no YAML: {_problem(error)}", _unquoted(error, text))]) from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        key, problem = getattr(error, "full_key", None), _first_line(error)
        if isinstance(error, MissingMandatoryValue):
            problem = "has no value yet (???)"
        raise SpecError([Fault(path, f"{key}: {problem}" if key else problem)]) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _problem(error: Exception) -> str:
    """The message of a YAML parser and its position, in one line."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _unquoted(error: Exception, text: str) -> str:
    """The remedy for ``{x: ${config.y}}`` and ``{lr: ???}``: in braces YAML gives these characters a meaning."""
    mark = getattr(error, "problem_mark", None)
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    found = re.search(r"\$\{[^}]*\}|\?\?\?", line)
    return f"quote it in braces: '{found[0]}'" if found is not None else ""


def _first_line(error: Exception) -> str:
    """The first line of an error: OmegaConf adds lines about its own classes."""
    if str(error).startswith("Exceeds the limit"):
        # Python's message is about a setting of the interpreter.
        return "a number of more than 4300 digits"
    return (str(error).splitlines() or [type(error).__name__])[0]


_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""A number in base 60 in YAML 1.1, where ``2:8`` is 128."""


def _without_base_60(text: str, root: Any) -> str:
    """`text`, whose nodes are below `root`, with such numbers as texts: ``count: 2:8`` is a range."""
    import yaml

    seen: set[int] = set()
    changed = False
    nodes = [root] if root is not None else []
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            nodes += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.ScalarNode) and node.style is None and _BASE_60.fullmatch(node.value):
            node.tag, node.style, changed = "tag:yaml.org,2002:str", "'", True
    return yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True) if changed else text


def plain_config(config: object) -> Mapping[Any, Any]:
    """`config`, a mapping or a ``DictConfig``, as plain values with its interpolations resolved.

    Raises `SpecError` when it is neither, or refers to a missing key.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(config, DictConfig):
        try:
            config = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            raise SpecError([Fault("config", _first_line(error), "correct the reference")]) from error
    if not isinstance(config, Mapping):
        problem = f"expected a dict or a DictConfig, found {shown(config)}"
        raise SpecError([Fault("config", problem, "pass the training configuration")])
    return config
