"""The accidents of a simulated job: processes die or hang, streams are cut, the store is away, cables are out."""

from __future__ import annotations

import random
import signal
from functools import partial

from msgspec import to_builtins
from msgspec.json import encode as to_json

from tests.sim.invariants import Invariants
from tests.sim.masters import MasterModel
from tests.sim.network import Network
from tests.sim.node import NodeModel
from tests.sim.scenario import HOST_ACCIDENTS
from tests.sim.store import StoreClient
from unirun.collocation import Device
from unirun.collocation import Node as InventoryNode
from unirun.failover.draft import Arrived, Event, OwnerLost, Straggles
from unirun.launcher import events
from unirun.values import WorkerId
from unirun.wire.messages import Drain, Grow, Offer, Stop
from unirun.wire.reports import Boundary, Sick

REASONS = frozenset(
    [
        "store_away",
        "stop_unwritten",
        "master_cut_off",
        "agent_hangs",
        "agent_hears_nothing",
        "agent_says_nothing",
    ]
)
"""Accidents that may be the reason why a node is silent, or ends its workers."""


class Accidents(Invariants):
    """The accidents of a history; `Simulation` says when."""

    rng: random.Random
    network: Network
    _away_until: float
    _clients: list[StoreClient]

    def tell(self, event: Event) -> None:
        """Somebody tells whoever leads."""
        raise NotImplementedError

    @property
    def steady(self) -> bool:
        """True if nothing has happened for which a node may be given up. A cable that was out for three
        seconds is no reason, where messages take no longer than a tenth of a second and a master is there."""
        about_hosts = [what for _, what in self.scenario.accidents if what in HOST_ACCIDENTS]
        others = {what for _, what in self.scenario.accidents}
        led = not self.scenario.crashes and "master_killed" not in others
        return (
            about_hosts == ["cable_out_briefly"]
            and led
            and not others & REASONS
            and self.scenario.slow < 0.01
        )

    def accident(self, what: str) -> None:
        """Let it happen, to somebody."""
        self.trace(f"accident: {what}")
        node = self.rng.choice([*self.nodes.values()])
        alive = [master for master in self.masters if master.alive]
        if what == "stop_unwritten":
            # The store is away when somebody wants the job to end, and the master that sees to it dies.
            self._trouble_masters("store_away", alive)
            self.clock.after(self.rng.uniform(0.0, 3.0), lambda: self.accident("stop"))
            self.clock.after(self.rng.uniform(1.0, 10.0), lambda: self.accident("master_killed"))
        elif what.startswith("stop"):
            signum = self.rng.choice((signal.SIGTERM, signal.SIGINT))
            self.tell(Stop(signum, what, 0.0 if what == "stop_now" else None))
            if what == "stop_again":
                self.clock.after(self.rng.uniform(0, 1), lambda: self.tell(Stop(signum, what)))
        elif what == "owner":
            self.clock.after(self.rng.uniform(0, 0.1), lambda: self.tell(OwnerLost()))
            lost = events.Abandon("the unirun command is gone")
            for each in self.nodes.values():
                self.clock.after(self.rng.uniform(0, 0.1), partial(each.apply, lost))
        elif what == "node_comes":
            name = f"late{len(self.nodes)}-{self.rng.randrange(1000)}"
            devices = tuple(Device(str(number), "") for number in range(4))
            there = to_json(to_builtins(InventoryNode(name, (0, 1), devices))).decode()
            self.tell(Arrived(Offer(name, "host", -1, there, {})))
        elif what == "node_drained":
            self.tell(Drain(node.name))
        elif what in ("rank_straggles", "boundary"):
            self._disturb_rank(what)
        elif what == "growth_asked":
            elastic = [role.name for role in self.scenario.spec.roles if role.elastic]
            self.tell(Grow(self.rng.choice(elastic or [*self.state.roles])))
        elif what == "node_sickens":
            full, faulty = (
                Sick(node.name, "disk", "its disk is full"),
                Sick(node.name, "device", "it is lost"),
            )
            node.says(self.rng.choice((full, faulty)))
        elif what == "agent_killed":
            node.die("killed")
        elif what == "agent_signalled":
            node.apply(events.Abandon("the agent got a signal"))
        elif what in ("master_killed", "master_hangs", "master_cut_off", "store_away"):
            self._trouble_masters(what, alive)
        elif what in HOST_ACCIDENTS:
            self._trouble_host(what, node, alive)
        elif what == "agent_cut_off":
            node.cut_off()
        elif what == "clock_jumps":
            jump = self.rng.choice((-3600.0, -1.0, 1.0, 3600.0))
            self.scenario.skews[node.name] = self.scenario.skews.get(node.name, 0.0) + jump
        elif what in ("agent_hears_nothing", "agent_says_nothing", "agent_hangs", "spawner_hangs"):
            self._trouble_node(what, node)
        elif what == "worker_hangs":
            # The master has found it, which is no part of its state.
            running = [worker.id for worker in node.state.workers.values() if worker.running]
            if running:
                node.apply(events.Hung(self.rng.choice(running), "hangs: no progress for 9.0 s"))
        elif node.spawners:
            self.rng.choice([*node.spawners.values()]).die()

    def _disturb_rank(self, what: str) -> None:
        """A rank makes the others wait, or its role is at a boundary, where it may grow; or a trainer says so of another
        role. It is one that listens, as the master knows of these."""
        nodes = [node for node in self.nodes.values() if node.alive]
        ranks = [(node, number, process) for node in nodes for _, number, process in node.linked()]
        if not ranks:
            return
        node, number, process = self.rng.choice(ranks)
        if what == "boundary":
            node.apply(events.LinkMessage(number, Boundary(self.rng.choice(("", *self.state.roles)))))
        else:
            who = WorkerId(*process.who)
            self.tell(Straggles(who, f"{who} is a straggler"))

    def _trouble_host(self, what: str, node: NodeModel, alive: list[MasterModel]) -> None:
        victims = [self.nodes[name] for name in self.state.placement.nodes if not self.state.given_up(name)]
        node = self.rng.choice(victims or [node])
        masters = self.rng.choice(alive).node if alive else node.name
        seconds = (
            self.rng.choice((1.0, 3.0)) if what == "cable_out_briefly" else self.rng.choice((20.0, 200.0))
        )
        host = masters if "of_master" in what else node.name
        match what:
            case "way_out" | "way_back_out" | "way_there_out":
                if what != "way_back_out":
                    self.network.lose(host, masters, seconds)
                if what != "way_there_out":
                    self.network.lose(masters, host, seconds)
            case "host_stopped" | "host_of_master_stopped":
                stopped = self.nodes[host]
                stopped.hang(seconds)
                for spawner in stopped.spawners.values():
                    spawner.hang(seconds)
                for master in alive:
                    if master.node == host:
                        master.hang(seconds)
            case _:
                self.network.pull_cable(host, seconds)
        self.troubled = max(self.troubled, self.clock.now + seconds + 40.0)

    def _trouble_node(self, what: str, node: NodeModel) -> None:
        seconds = self.rng.choice((0.5, 5.0, 20.0))
        if what == "agent_hangs":
            node.hang(seconds)
        elif what != "spawner_hangs":
            node.lose_one_way(to_master=what == "agent_says_nothing", seconds=seconds)
        elif node.spawners:
            self.rng.choice([*node.spawners.values()]).hang(seconds)
        self.troubled = max(self.troubled, self.clock.now + seconds + 30.0)

    def _trouble_masters(self, what: str, alive: list[MasterModel]) -> None:
        seconds = self.rng.choice((0.5, 5.0, 20.0))
        if what == "store_away":
            self._away_until = self.clock.now + seconds
            for client in self._clients:
                client.away_until = self._away_until
        elif alive:
            master = self.rng.choice(alive)
            if what == "master_killed":
                master.die("killed")
                seconds = 5.0
            elif what == "master_hangs":
                master.hang(seconds)
            else:
                master.client.away_until = self.clock.now + seconds
        # Until things are as before, and a moment longer.
        self.troubled = max(self.troubled, self.clock.now + seconds + 30.0)
