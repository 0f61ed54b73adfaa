"""Checks of a configuration: the arguments of registered classes, the files of a trial, its networks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from unirun.errors import Fault, SpecError, UsageError
from unirun.experiments import config as derive
from unirun.experiments.config import ExperimentDescription
from unirun.experiments.datasets import TOKENIZERS, is_of_rows, read_rows
from unirun.experiments.graph import Abstraction, MFCDef, ModelInterfaceType, ModelName, ProcessTopology
from unirun.experiments.registry import BACKENDS, DATASETS, INTERFACES, MODELS, Registry
from unirun.observe.jobdir import unirun_home
from unirun.wire.reporting import report

BUILT_IN = ("ddp", "fsdp2", "inference", "null")
"""Backends that check the values of their arguments when they are made, which costs nothing."""


def argument_faults(config: ExperimentDescription) -> list[Fault]:
    """Faults of the arguments of registered classes and functions: unknown ones, and missing ones."""
    found = []
    for where, kind, registry, chosen, first in _named(config):
        if chosen.type_ not in registry:
            continue
        # Users' classes that are registered by a string are not imported here, as that may be slow.
        make = registry.find(chosen.type_) if _is_ours(kind, chosen) else registry.at_hand(chosen.type_)
        if make is None:
            continue
        fault = _signature_fault(where, kind, make, chosen, first)
        if fault is None and kind == "backend" and _is_ours(kind, chosen):
            fault = _value_fault(where, make, chosen)
        if fault is not None:
            found.append(fault)
    return found


def _is_ours(kind: str, chosen: Abstraction) -> bool:
    return chosen.type_ in {"backend": BUILT_IN, "model": ("causal_lm", "null")}.get(kind, ())


def _named(config: ExperimentDescription) -> Iterator[tuple[str, str, Registry[Any], Abstraction, int]]:
    """Each named object once: its place in the configuration, its kind, its registry, its name with the arguments, and
    the number of arguments that come before those."""
    for call in config.model_rpcs:
        yield f"model_rpcs.{call.name}", "interface", INTERFACES, call.interface_impl, 0
    for name, shard in _shards(config).items():
        yield f"models.{name}", "model", MODELS, shard.model, 1
        yield f"models.{name}", "backend", BACKENDS, shard.backend, 0
    for where, dataset in _datasets(config):
        yield where, "dataset", DATASETS, dataset, 1


def _shards(config: ExperimentDescription) -> dict[Any, Any]:
    """A shard of each model; all of a model are alike."""
    return {shard.id.model_name: shard for worker in config.model_worker for shard in worker.shards}


def _datasets(config: ExperimentDescription) -> Iterator[tuple[str, Abstraction]]:
    worker = next((worker for worker in config.model_worker if worker.datasets), None)
    for at, dataset in enumerate(worker.datasets if worker is not None else ()):
        yield f"datasets.{at}", dataset
    for name, shard in _shards(config).items():
        if shard.eval_dataset is not None:
            yield f"models.{name}.eval_dataset", shard.eval_dataset
    if config.auto_eval and config.evaluator.dataset is not None:
        yield "evaluator.dataset", config.evaluator.dataset


def _signature_fault(where: str, kind: str, make: Any, chosen: Abstraction, first: int) -> Fault | None:
    """The error that calling `make` with these arguments would raise."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return None
    takes = [name for name in [*signature.parameters][first:] if signature.parameters[name].kind != _MORE]
    try:
        signature.bind(*[None] * first, **chosen.args)
        if is_of_rows(make):
            # Its other arguments say where the rows are.
            source = {name: value for name, value in chosen.args.items() if name not in takes}
            takes += [*_SOURCE.parameters][2:]
            _SOURCE.bind("", {}, **source)
    except TypeError as error:
        problem = f"{kind} {chosen.type_!r} cannot be made with these arguments: {error}"
        return Fault(where, problem, f"it takes: {', '.join(takes) or 'none'}")
    return None


_MORE = inspect.Parameter.VAR_KEYWORD
_SOURCE = inspect.signature(read_rows)


def _value_fault(where: str, make: Any, chosen: Abstraction) -> Fault | None:
    try:
        make(**chosen.args)
    except UsageError as error:
        return Fault(where, f"backend {chosen.type_!r}: {error.problem}", error.remedy)
    except (TypeError, ValueError) as error:
        return Fault(where, f"backend {chosen.type_!r}: {error}", "correct its arguments")
    return None


def file_faults(config: ExperimentDescription) -> list[Fault]:
    """Files and directories that a trial needs and that are not on this host, held-out data that is too small, and
    more new tokens than networks have positions."""
    found = []
    tokenizer = config.model_worker[0].tokenizer_name_or_path
    if tokenizer and tokenizer not in TOKENIZERS and (why := _absent(tokenizer)):
        found.append(
            Fault("tokenizer_name_or_path", why, "give a path, a name of Hugging Face's, or a registered one")
        )
    for where, dataset in _datasets(config):
        found += _dataset_faults(where, dataset)
    for name, shard in _shards(config).items():
        if shard.model.type_ == "causal_lm":
            found += _network_faults(f"models.{name}", shard.model.args)
        if shard.eval_dataset is not None:
            found += _held_out_faults(
                f"models.{name}.eval_dataset", shard.eval_dataset, shard.id.topo.get_dim("data")
            )
    return found + _length_faults(config)


def _absent(name: str) -> str:
    """The problem of a path that does not exist; empty if it exists, or may be a name on Hugging Face's hub."""
    path = Path(name).expanduser()
    if path.exists():
        return ""
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    return f"there is no {path}" if is_path else ""


def _dataset_faults(where: str, dataset: Abstraction) -> list[Fault]:
    if dataset.type_ not in DATASETS or not is_of_rows(DATASETS.find(dataset.type_)):
        return []
    given = [name for name in ("path", "hugging_face", "rows") if dataset.args.get(name)]
    if len(given) != 1:
        problem = f"it has {' and '.join(given) or 'none'} of path, hugging_face and rows"
        return [Fault(where, problem, "give one of them")]
    return _unreadable(where, dataset.args["path"]) if given == ["path"] else []


def _unreadable(where: str, name: Any) -> list[Fault]:
    """A fault if the file cannot be read."""
    try:
        path = Path(name)
        with path.open("rb") as file:
            file.read(1)
    except (OSError, TypeError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
        shown = os.path.abspath(name) if isinstance(name, str) else repr(name)
        return [Fault(where, f"{shown} cannot be read: {why}")]
    return []


def _network_faults(where: str, args: Mapping[str, Any]) -> list[Fault]:
    found = []
    if (path := args.get("path")) and (why := _absent(str(path))):
        found.append(Fault(where, why, "give a path, or a name of Hugging Face's hub"))
    if weights := args.get("weights"):
        found += _unreadable(where, weights)
    return found


def _held_out_faults(where: str, dataset: Abstraction, ranks: int) -> list[Fault]:
    """A fault if there are fewer samples than data-parallel ranks: each rank evaluates some."""
    count = _first_rows(dataset, ranks)
    if count is None or count >= ranks:
        return []
    return [
        Fault(
            where, f"it has {count} samples, and the model has {ranks} data-parallel ranks", "make it larger"
        )
    ]


def _first_rows(dataset: Abstraction, most: int) -> int | None:
    """The number of rows of a dataset, `most` at most; None when only making the dataset would tell."""
    if dataset.type_ not in DATASETS or not is_of_rows(DATASETS.find(dataset.type_)):
        return None
    if rows := dataset.args.get("rows"):
        return min(len(rows), most)
    try:
        with Path(dataset.args.get("path") or "").open("rb") as file:
            return len([*islice((line for line in file if line.strip()), most)])
    except (OSError, TypeError):
        return None


def _length_faults(config: ExperimentDescription) -> list[Fault]:
    """Faults of calls that make more new tokens than their network has positions, whatever the prompt."""
    return [
        Fault(
            f"model_rpcs.{call.name}",
            f"it makes up to {new} new tokens (max_new_tokens), and {call.model_name} has {positions} positions",
            "make max_new_tokens smaller, or give a network with more positions",
        )
        for call, _, new, positions in _lengths(config)
        if new > positions
    ]


def length_warnings(config: ExperimentDescription) -> list[Fault]:
    """Warnings for sequences that may be longer than their network has positions. A dataset only cuts at its
    ``max_length``: all of its samples may be shorter."""
    found = []
    for call, prompt, new, positions in _lengths(config):
        if new <= positions < prompt + new:
            more = f" and {new} new ones (max_new_tokens)" if new else ""
            problem = (
                f"sequences may have {prompt} tokens (max_length){more}, "
                f"and {call.model_name} has {positions} positions"
            )
            found.append(
                Fault(
                    f"model_rpcs.{call.name}",
                    problem,
                    "make them shorter, or give a network with more positions",
                )
            )
    return found


def _lengths(config: ExperimentDescription) -> Iterator[tuple[MFCDef, int, int, int]]:
    """For each call whose network has a known number of positions: the longest prompt, the most new tokens
    (each 0 where the configuration does not say it), and that number."""
    shards = _shards(config)
    prompt = max([0, *(_max_length(each) for worker in config.model_worker for each in worker.datasets)])
    for call in config.model_rpcs:
        shard = shards.get(call.model_name)
        if shard is None or shard.model.type_ != "causal_lm":
            continue
        positions = _positions(shard.model.args)
        if positions is None:
            continue
        generates = call.interface_type is ModelInterfaceType.GENERATE
        new = (_new_tokens(call.interface_impl.args) or 0) if generates else 0
        yield call, max([prompt, *map(_max_length, _held_out(config, call, shard))]), new, positions


def _held_out(config: ExperimentDescription, call: MFCDef, shard: Any) -> Iterator[Abstraction]:
    """The data on which the model of a call that trains is evaluated."""
    if call.interface_type is not ModelInterfaceType.TRAIN_STEP:
        return
    if shard.eval_dataset is not None:
        yield shard.eval_dataset
    evaluator = config.evaluator
    if config.auto_eval and evaluator.dataset is not None and evaluator.role in ("", call.role):
        yield evaluator.dataset


def _max_length(dataset: Abstraction) -> int:
    """The length at which a dataset cuts its samples, as far as its arguments say so; 0 otherwise."""
    found = dataset.args.get("max_length")
    ours = dataset.type_ in DATASETS and is_of_rows(DATASETS.at_hand(dataset.type_))
    return found if ours and isinstance(found, int) else 0


def _positions(args: Mapping[str, Any]) -> int | None:
    """The positions of a network, as far as its arguments or the files of its directory say so."""
    config: Any = args.get("config") or {}
    if path := args.get("path"):
        try:
            config = json.loads(Path(path, "config.json").read_bytes())
        except (OSError, ValueError):
            return None
    found = config.get("max_position_embeddings") if isinstance(config, Mapping) else None
    return found if isinstance(found, int) else None


def _new_tokens(args: Mapping[str, Any]) -> int | None:
    """``max_new_tokens`` among the arguments of an interface, or in a mapping or a `GenerationConfig` there."""
    for name, value in args.items():
        inner = (
            value
            if isinstance(value, Mapping)
            else {"max_new_tokens": getattr(value, "max_new_tokens", None)}
        )
        found = value if name == "max_new_tokens" else inner.get("max_new_tokens")
        if isinstance(found, int):
            return found
    return None


# Checks of networks of transformers against their layouts, which the command makes before a trial starts.
#
# They import transformers and run small networks, which takes seconds. So a network that was found to be right is
# noted, and is not tried again with the same versions. Workers make the same checks, as another host may have no note.


def network_faults(config: ExperimentDescription) -> tuple[list[Fault], list[Fault]]:
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


def _arguments(config: ExperimentDescription) -> dict[ModelName, Mapping[str, Any]]:
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
