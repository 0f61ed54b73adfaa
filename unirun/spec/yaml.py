"""A job in YAML, with OmegaConf's interpolation and dotted overrides. The only room that imports OmegaConf."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unirun.errors import Fault, SpecError


def load_job_file(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in the file `path` after `overrides` (``roles.actor.count=8``) and interpolation.

    A file whose name ends with ``.json`` is taken as it is: in what programs write, ``${`` is no interpolation.
    Raises `SpecError` when it cannot be read, is no YAML, or refers to what is not there.
    """
    try:
        plain = _read_json(path, overrides) if path.endswith(".json") else _read_yaml(path, overrides)
    except OSError as error:
        raise SpecError([Fault(path, f"cannot be read: {(error.strerror or str(error)).lower()}")]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Fault(path, "is no text in UTF-8")]) from error
    return {str(key): value for key, value in plain.items()}


def _read_json(path: str, overrides: Sequence[str]) -> Mapping[Any, Any]:
    if overrides:
        raise SpecError([Fault(path, "is no YAML, so nothing can be overridden", "write a job in YAML")])
    with open(path, encoding="utf-8") as file:
        try:
            plain = json.load(file)
        except (json.JSONDecodeError, RecursionError) as error:
            raise SpecError([Fault(path, f"is no JSON: {error}")]) from error
    if not isinstance(plain, dict):
        raise SpecError([Fault(path, "holds no object, expected one with keys like 'roles'")])
    return plain


def _read_yaml(path: str, overrides: Sequence[str]) -> Mapping[Any, Any]:
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with open(path, encoding="utf-8") as file:
            config = OmegaConf.create(_without_base_60(file.read()))
        if not isinstance(config, DictConfig):
            raise SpecError([Fault(path, "holds a list, expected a mapping with keys like 'roles'")])
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist([*map(_quoted, overrides)]))
        plain = OmegaConf.to_container(merged, resolve=True)
    except UnicodeDecodeError:
        raise
    except yaml.YAMLError as error:
        raise SpecError([Fault(path, f"is no YAML: {' '.join(str(error).split())}")]) from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise SpecError([Fault(path, " ".join(str(error).split()))]) from error
    assert isinstance(plain, dict)
    return plain


_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""What YAML 1.1 takes for a number in base 60: ``2:8`` would be 128."""


def _without_base_60(text: str) -> str:
    """`text` with such numbers as what they look like: ``count: 2:8`` is a range."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
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


def _quoted(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key}='{value}'" if equals and _BASE_60.fullmatch(value) else override


def plain_config(config: object) -> Mapping[Any, Any]:
    """`config`, a mapping or a ``DictConfig``, as plain values with its interpolations resolved.

    Raises `SpecError` when it is neither, or refers to what is not there.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(config, DictConfig):
        try:
            config = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            raise SpecError(
                [Fault("config", " ".join(str(error).split()), "correct the reference")]
            ) from error
    if not isinstance(config, Mapping):
        problem = f"expected a dict or a DictConfig, found {config!r}"
        raise SpecError([Fault("config", problem, "pass the training configuration")])
    return config
