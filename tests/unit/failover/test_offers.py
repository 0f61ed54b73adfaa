"""The offers of nodes: why one cannot take part, and what all of them have."""

from __future__ import annotations

from msgspec.json import encode as to_json
from msgspec.structs import replace

from unirun.collocation.inventory import Node
from unirun.failover.offers import inventory_of, misfits
from unirun.launcher.hosts.lobby import refusal
from unirun.wire.messages import Offer

OURS = {"python": "3.11", "torch": "2.13.0", "unirun": "0.1.0"}


def offer(node: str, versions: dict[str, str] | None = None, **more: object) -> Offer:
    inventory = to_json(Node(node, (0, 1))).decode()
    return Offer(node, node, -1, inventory, OURS | (versions or {}), **more)  # type: ignore[arg-type]


def test_other_versions_and_faults_of_nodes_are_told_with_the_remedy() -> None:
    offers = [
        offer("h1"),
        offer("h2", versions={"torch": "2.11.0"}),
        offer("h3", versions={"unirun": ""}, faults=(("/job: no such file", "share it"),)),
    ]
    found = [str(each) for each in misfits(offers, OURS)]
    assert found == [
        "h2: it has torch 2.11.0, here it is 2.13.0; install torch 2.13.0 there",
        "h3: /job: no such file; share it",
        "h3: it has no unirun; install unirun 0.1.0 there",
    ]
    assert refusal(misfits(offers[:2], OURS)).remedy == "install torch 2.13.0 there"


def test_a_node_of_the_inventory_has_the_name_that_it_has_in_the_job() -> None:
    assert inventory_of([replace(offer("h2"), node="h2.2")]).names == ("h2.2",)


def test_the_inventory_is_what_the_nodes_say_of_themselves() -> None:
    assert inventory_of([offer("b"), offer("a")]).names == ("b", "a")
