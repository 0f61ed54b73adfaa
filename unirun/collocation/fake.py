"""Simulated nodes, for plans and tests: ``fake:nodes=4,devices=8,numa=2``."""

from __future__ import annotations

import re

from unirun.collocation.inventory import Device, Inventory, Node, NumaNode
from unirun.errors import Fault, SpecError
from unirun.spec.read import parse_size

PREFIX = "fake:"
_KEYS = ("nodes", "devices", "nvlink", "numa", "cpus", "memory", "type", "name")
_NUMBERS = {
    "nodes": (1, 1, 100_000),
    "devices": (0, 0, 1024),
    "nvlink": (0, 1, 1024),
    "numa": (1, 1, 1024),
    "cpus": (64, 1, 4096),
}
"""The default, the least and the most of each. Without ``nvlink`` it is as many as a NUMA node has."""
_NAMES = {"type": ("cuda", r"(?!cpu$)[a-z][a-z0-9_]{0,31}"), "name": ("node", r"[A-Za-z][A-Za-z0-9.-]{0,31}")}
"""The default and the form of each. Processors are no devices: ``cpus`` has their number."""
_WHOSE = {"type": "devices", "name": "nodes"}
_MEMORY = 512 * 10**9
_DEVICE_MEMORY = 80 * 2**30


def is_fake(text: str) -> bool:
    """Return True if `text`, as ``--inventory`` has it, describes simulated nodes."""
    return text.startswith(PREFIX)


def parse_fake(text: str) -> Inventory:
    """The nodes that `text` describes; a pure function of it. Raises `SpecError` with every fault.

    Keys, all but the first for each node: ``nodes`` (1), ``devices`` (0), ``numa`` nodes (1) over which processors,
    devices and memory are spread evenly, ``cpus`` (64), ``memory`` (512GB), ``type`` of the devices (cuda), ``name``
    (node), to which the node's number is added: ``node0``, or ``node00`` when there are more than ten. Devices have
    80 GiB. NVLink joins so many consecutive ones as ``nvlink`` says: 2 for bridges between pairs, ``devices`` for
    NVSwitch, 1 for none; without it, those of one NUMA node.
    """
    faults: list[Fault] = []
    values = _pairs(text.removeprefix(PREFIX), faults)
    numbers = {key: _number(key, values, faults) for key in _NUMBERS}
    names = {key: _name(key, values, faults) for key in _NAMES}
    memory = _size(values.get("memory"), faults)
    if numbers["numa"] > numbers["cpus"]:
        problem = f"{numbers['numa']} NUMA nodes of {numbers['cpus']} processors: each needs one"
        faults.append(Fault(f"{PREFIX}numa", problem, f"use numa={numbers['cpus']}, or fewer"))
    if faults:
        raise SpecError(faults)
    return _inventory(numbers, names, memory)


def _pairs(text: str, faults: list[Fault]) -> dict[str, str]:
    """The text of each key; faults are added to `faults`."""
    values: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        where = f"{PREFIX}{key}"
        if not part:
            if text.strip():
                faults.append(Fault(PREFIX, "there is nothing between two commas", "leave one out"))
        elif key not in _KEYS:
            faults.append(Fault(where, "unknown key", f"known: {', '.join(_KEYS)}"))
        elif not equals or not value:
            faults.append(Fault(where, "it has no value", f"write {key}=…"))
        elif key in values:
            faults.append(Fault(where, f"it is there twice: {values[key]} and {value}", "leave one out"))
        else:
            values[key] = value
    return values


def _number(key: str, values: dict[str, str], faults: list[Fault]) -> int:
    default, least, most = _NUMBERS[key]
    text = values.get(key)
    if text is None:
        return default
    if re.fullmatch(r"[0-9]{1,9}", text) and least <= int(text) <= most:
        return int(text)
    faults.append(Fault(f"{PREFIX}{key}", f"expected a whole number from {least} to {most}, found {text!r}"))
    return default


def _name(key: str, values: dict[str, str], faults: list[Fault]) -> str:
    default, pattern = _NAMES[key]
    text = values.get(key, default)
    if re.fullmatch(pattern, text):
        return text
    faults.append(Fault(f"{PREFIX}{key}", f"{text!r} is no {key} of {_WHOSE[key]}", f"write {key}={default}"))
    return default


def _size(text: str | None, faults: list[Fault]) -> int:
    try:
        return _MEMORY if text is None else parse_size(text)
    except ValueError as error:
        faults.append(Fault(f"{PREFIX}memory", str(error)))
        return _MEMORY


def _inventory(numbers: dict[str, int], names: dict[str, str], memory: int) -> Inventory:
    count, numa, cpus = numbers["nodes"], numbers["numa"], tuple(range(numbers["cpus"]))
    devices = _devices(numbers["devices"], numa, numbers["nvlink"], names["type"])
    nodes = tuple(NumaNode(n, tuple(_part(len(cpus), n, numa)), memory // numa) for n in range(numa))
    digits = len(str(count - 1))
    # All nodes share one tuple of devices, so that ten thousand nodes are created quickly.
    return Inventory(
        tuple(
            Node(
                f"{names['name']}{number:0{digits}}",
                cpus,
                devices,
                memory=memory,
                numa=nodes if numa > 1 else (),
            )
            for number in range(count)
        )
    )


def _devices(count: int, numa: int, nvlink: int, kind: str) -> tuple[Device, ...]:
    homes = [number for number in range(numa) for _ in _part(count, number, numa)]
    islands = [index // nvlink for index in range(count)] if nvlink else homes

    def nearness(one: int, other: int) -> str:
        if islands[one] == islands[other]:
            return "nvlink"
        return "numa" if homes[one] == homes[other] else "system"

    return tuple(
        Device(
            index=str(index),
            name=f"fake {kind}",
            pci=f"{index:04x}:00:00.0",
            type=kind,
            memory=_DEVICE_MEMORY,
            numa=home,
            links=tuple((str(peer), nearness(index, peer)) for peer in range(count) if peer != index),
        )
        for index, home in enumerate(homes)
    )


def _part(count: int, number: int, parts: int) -> range:
    """The `number`-th of `parts` even parts of ``range(count)``; the first parts get what is left over."""
    size, rest = divmod(count, parts)
    start = number * size + min(number, rest)
    return range(start, start + size + (1 if number < rest else 0))
