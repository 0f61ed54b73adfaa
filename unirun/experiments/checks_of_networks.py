"""Checks of networks of transformers against their layouts, which the command makes before a trial starts.

They import transformers and run small networks, which takes seconds. So a network that was found to be right is noted,
and is not tried again with the same versions. Workers make the same checks, as another host may have no note.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirun.errors import Fault, SpecError
from unirun.experiments import derive
from unirun.experiments.graph import ModelName, ProcessTopology
from unirun.observe.jobdir import unirun_home
from unirun.wire.reporting import report

if TYPE_CHECKING:
    from unirun.experiments.config import ExperimentConfig


def network_faults(config: ExperimentConfig) -> tuple[list[Fault], list[Fault]]:
    """Faults of networks that cannot have their layout, and faults of networks that cannot be read on this
    host, as other hosts may have their files. Models that are not built in are not checked."""
    topologies = derive.topologies(config)
    found: list[Fault] = []
    absent: list[Fault] = []
    for name, arguments in sorted(_arguments(config).items()):
        try:
            found += faults_of(f"models.{name}", topologies[name], arguments)
        except SpecError as error:
            of_this_host = arguments.get("path") or isinstance(error.__cause__, ImportError)
            (absent if of_this_host else found).extend(error.faults)
    return found, absent


def faults_of(where: str, topo: ProcessTopology, arguments: Mapping[str, Any]) -> list[Fault]:
    """The reasons why a `causal_lm` with these `arguments` cannot have this layout; nothing for one that was
    noted. Raises `SpecError` when its configuration cannot be read."""
    digest = _digest(arguments, topo)
    note = unirun_home() / "networks" / digest if digest else None
    if note is not None and note.exists():
        return []
    from unirun.experiments.models.stage import network_faults

    faults = network_faults(where, topo, arguments)
    if note is not None and not faults:
        _note(note)
    return faults


def _arguments(config: ExperimentConfig) -> dict[ModelName, Mapping[str, Any]]:
    return {
        shard.id.model_name: shard.model.args
        for worker in config.model_worker
        for shard in worker.shards
        if shard.model.type_ == "causal_lm"
    }


def _digest(arguments: Mapping[str, Any], topo: ProcessTopology) -> str:
    """The same for equal networks, layouts and versions; empty when its configuration or transformers is not here."""
    path = arguments.get("path")
    own = Path(str(path), "config.json") if path else None
    try:
        about = own.read_text() if own is not None else json.dumps(arguments.get("config"), sort_keys=True)
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    except (OSError, TypeError, ValueError, importlib.metadata.PackageNotFoundError):
        return ""
    sources = [file.read_text() for file in sorted((Path(__file__).parent / "models").glob("*.py"))]
    sizes = [topo.get_dim("pipe"), topo.get_dim("tensor"), bool(arguments.get("critic"))]
    return hashlib.sha256(json.dumps([about, sizes, versions, sources]).encode()).hexdigest()


def _note(note: Path) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except OSError as error:
        report(f"unirun: {note} cannot be written, so networks are tried at each start: {error}")
