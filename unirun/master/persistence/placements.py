"""The nodes of a job and the places of its ranks as documents, and back.

Of a node only that is kept which a planner looks at; where nodes are alike, and in most jobs they are, it is kept once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from unirun.collocation import Assignment, Device, Inventory, Node, NumaNode, Placement
from unirun.collocation.numa import parse_cpu_list
from unirun.graph import show_ranks
from unirun.master.persistence.documents import Changes, Documents, as_json, blocks, numbered, pieces

RANKS = 50
"""In a block: when a few of them move, not much more is written again."""


def inventory_documents(inventory: Inventory) -> Changes:
    """The documents ``inventory/<n>``."""
    kinds: dict[str, int] = {}
    by_devices: dict[tuple[Device, ...], list[Any]] = {}
    nodes = []
    for node in inventory.nodes:
        devices = by_devices.setdefault(node.devices, [])
        if not devices:
            devices += [[d.index, d.type, d.numa, d.links] for d in node.devices]
        kind = as_json([node.cpus, devices, [[n.id, n.cpus] for n in node.numa]])
        nodes.append([node.name, kinds.setdefault(kind, len(kinds))])
    return pieces("inventory", {"kinds": [json.loads(kind) for kind in kinds], "nodes": nodes})


def read_inventory(documents: Documents) -> Inventory:
    """The inventory that the documents hold, with what is kept of it."""
    content = json.loads("".join(numbered("inventory", documents)))
    kinds = [_kind(*fields) for fields in content["kinds"]]
    return Inventory(tuple(Node(name, *kinds[kind]) for name, kind in content["nodes"]))


def _kind(cpus: list[int], devices: list[Any], numa: list[Any]) -> tuple[Any, ...]:
    found = tuple(
        Device(index, "", type=type, numa=home, links=tuple((peer, near) for peer, near in links))
        for index, type, home, links in devices
    )
    return tuple(cpus), found, 0, 0, tuple(NumaNode(number, tuple(there)) for number, there in numa)


def placement_documents(before: Placement | None, after: Placement, roles: Sequence[str]) -> Changes:
    """The documents ``placement/<role>/<n>`` that are others than those of `before`."""
    found: Changes = {}
    for role in roles:
        old = before.of_role(role) if before else ()
        found |= blocks(f"placement/{role}", RANKS, old, after.of_role(role), _places)
    return found


def placement_head(placement: Placement) -> dict[str, Any]:
    """What a placement has besides the places of ranks."""
    return {
        "note": placement.note,
        "spares": placement.spares,
        "crossing": placement.crossing,
        "excluded": placement.excluded,
        "lost": placement.lost,
        "masks": dict(placement.masks),
    }


def read_placement(head: dict[str, Any], roles: Sequence[str], documents: Documents) -> Placement:
    """The placement that `head` and the documents hold."""
    return Placement(
        tuple(place for role in roles for place in _read_places(role, documents)),
        head["note"],
        tuple(head["spares"]),
        head["crossing"],
        tuple(head["excluded"]),
        tuple(head["lost"]),
        head["masks"],
    )


def _places(places: Sequence[Assignment]) -> Any:
    return [
        [
            place.rank,
            place.node,
            place.slot,
            place.local_rank,
            place.devices,
            None if place.cpus is None else show_ranks(place.cpus),
            place.own,
            place.share,
            place.numa,
        ]
        for place in places
    ]


def _read_places(role: str, documents: Documents) -> list[Assignment]:
    return [
        Assignment(
            role,
            rank,
            node,
            slot,
            local_rank,
            None if devices is None else tuple(devices),
            None if cpus is None else parse_cpu_list(cpus),
            tuple(own),
            share,
            numa,
        )
        for block in numbered(f"placement/{role}", documents)
        for rank, node, slot, local_rank, devices, cpus, own, share, numa in json.loads(block)
    ]
