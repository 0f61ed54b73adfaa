"""Ready-made services: what ``kind:`` of a role stands for, and the roles that bring weights into engines.

::

    engine: {kind: vllm, model: /models/llama, count: 2, slots: 2}          # vllm serve, as a service
    engine: {kind: builtin, model: /models/llama, count: 2}                 # unirun's own server, on one device
    judge: {kind: openai, program: llama-server, args: [--port, "{port}"]}  # another server with these routes

A channel of weights may name a role of kind vllm or builtin as a receiver. Then the job has one more role,
``engine-weights``: a companion on each host of engines, which receives each version and brings it into them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from unirun.errors import Fault
from unirun.spec.job import ChannelSpec, Edge, Entry, RoleSpec
from unirun.spec.read import Section, as_number

KINDS = ("vllm", "builtin", "openai")
LOADING = ("vllm", "builtin")
"""Kinds of engines that take weights from a companion."""
LOADING_KEYS = ("clear_cache", "update_timeout")
"""Keys of their roles about that."""

SERVER = "unirun.experiments.server"

HEALTH = "http://{addr}/health"
SERVING = ("--host", "{host}", "--port", "{port}", "--enable-scale-out")
"""Arguments of ``vllm serve`` of each engine. Without the last one, answers do not say which weights made them."""

GUARD = "unirun.weights.integrations.vllm_guard.SameHost"
RECEIVING = ("--middleware", GUARD, "--weight-transfer-config", '{"backend": "unirun"}')
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""An engine that receives weights has vLLM's routes for that, which are for processes of its own host (the guard)."""

COMPANION = "unirun.weights.companion"
RESTARTS, WINDOW = 10, 3600.0
"""So many companions may end in an hour, for each rank of the engines: these serve on while there is none."""


def ready_made(job: Section, name: str, role: Section) -> Section:
    """The fields of a role with a ``kind``, and all that this stands for, unless the role says otherwise."""
    kind = role.choice("kind", KINDS, "")
    for key in LOADING_KEYS:
        if role.given(key) and kind not in LOADING:
            role.fault(key, "the role takes no weights", "it is for kind: vllm and kind: builtin")
    if not kind:
        if role.given("model") and not role.given("kind"):
            role.fault("model", "the role has no kind", f"add kind: {' or kind: '.join(KINDS)}")
        return role
    usual: dict[str, Any] = {"service": True, "ready": HEALTH, "alive": {"http": HEALTH}}
    if kind == "vllm":
        usual |= _vllm(role, receives=name in _receivers(job))
        if role.fields.get("contract") == "torchrun":
            role.fault(
                "contract", "vLLM starts its ranks itself, and takes torchrun's for its own", "leave it out"
            )
    elif kind == "builtin":
        usual |= _builtin(job, role)
    else:
        if role.given("model"):
            role.fault("model", "a server of kind openai has its model in its arguments", "write it in args")
        if not role.given("program") and not role.given("module") and not role.given("script"):
            role.fault("program", "a server of kind openai has none", "write program: NAME, with args: […]")
    return Section({**usual, **role.fields, **_joined(role, usual)}, role.where, role.faults)


def _vllm(role: Section, *, receives: bool) -> dict[str, Any]:
    if not role.given("model"):
        role.fault("model", "vllm serve has no model", "write model: NAME, or the path of a folder")
    parallel: list[str] = []
    slots = as_number(role.fields.get("slots", 1))
    if slots > 1 and slots == int(slots) and role.fields.get("device") != "cpu":
        parallel = ["--tensor-parallel-size", str(int(slots))]
    args = ["serve", role.text("model"), *SERVING, *parallel, *(RECEIVING if receives else ())]
    # A slot as a rank of torch has one: a device, or on a node without devices a CPU slot.
    return {"program": "vllm", "args": args, "env": DEVELOPMENT if receives else {}, "slots": 1}


def _builtin(job: Section, role: Section) -> dict[str, Any]:
    if not role.given("model"):
        role.fault("model", "the built-in server has no model", "write model: NAME, or the path of a folder")
    if as_number(role.fields.get("slots", 1)) > 1:
        role.fault("slots", "the built-in server has one device", "leave it out, and write a larger count:")
    # The interpreter of unirun, which may not be the first one in PATH.
    program = "python" if role.given("python") or job.given("python") else sys.executable
    args = ["-m", SERVER, role.text("model"), "--host", "{host}", "--port", "{port}"]
    return {"program": program, "args": args, "slots": 1}


def _joined(role: Section, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the role behind the usual ones, and its variables besides them."""
    joined: dict[str, Any] = {}
    if usual.get("args"):
        joined["args"] = [*usual["args"], *role.texts("args")]
    if usual.get("env"):
        joined["env"] = {**usual["env"], **role.mapping("env")}
    return joined


def _receivers(job: Section) -> set[str]:
    """The names of all roles that receive weights, in a file of which nothing else is known."""
    channels = job.fields.get("channels")
    found: set[str] = set()
    for about in channels.values() if isinstance(channels, Mapping) else ():
        named = about.get("receivers") if isinstance(about, Mapping) else None
        names = [named] if isinstance(named, str) else named if isinstance(named, list | tuple) else []
        found.update(name for name in names if isinstance(name, str))
    return found


def companion_of(role: str) -> str:
    """The name of the role that brings weights into the engines of `role`."""
    return f"{role}-weights"


def with_companions(
    channels: Sequence[ChannelSpec], roles: Sequence[RoleSpec]
) -> tuple[tuple[ChannelSpec, ...], list[RoleSpec], list[Edge], list[Fault]]:
    """The channels with companions in place of engines, the companions and the edges that they have, and the faults of
    channels to programs."""
    known = {role.name: role for role in roles}
    made: dict[str, RoleSpec] = {}
    faults: list[Fault] = []
    changed, edges = [], list[Edge]()
    for channel in channels:
        publisher = known.get(channel.publisher)
        if publisher is not None and publisher.is_program:
            problem = f"{publisher.name} is a program, which publishes nothing"
            faults.append(Fault(f"channels.{channel.name}.publisher", problem, "name a role of torch"))
        where = f"channels.{channel.name}.receivers"
        receivers = []
        for name in channel.receivers:
            role = known.get(name)
            if role is None or not role.is_program:
                receivers.append(name)
                continue
            companion = companion_of(name)
            if role.engine not in LOADING:
                problem = f"{name} is a program, which receives no weights"
                kinds = " or ".join(f"kind: {each}" for each in LOADING)
                faults.append(Fault(where, problem, f"write {kinds} in {name}, or name another role"))
            elif role.group is not None:
                problem = f"{name} is one server of several ranks, which receives no weights yet"
                remedy = "give each rank more slots instead of group:, or leave it out of the channel"
                faults.append(Fault(where, problem, remedy))
            elif role.ready is None or not role.ports:
                problem = (
                    f"{name} has no address or no ready:, so its companion cannot tell when it takes weights"
                )
                faults.append(Fault(where, problem, "leave out ports: and ready:, which its kind has"))
            elif name in made:
                faults.append(Fault(where, f"{name} receives another channel", "an engine has one"))
            elif companion in known:
                problem = f"a role is called {companion}, as the one that brings weights into {name}"
                faults.append(Fault(where, problem, f"rename {companion}"))
            else:
                made[name] = _companion(companion, role, channel)
                edges.append(Edge(channel.publisher, companion, "publish", asynchronous=True))
                edges.append(Edge(companion, name, "load"))
            receivers.append(companion)
        changed.append(replace(channel, receivers=tuple(receivers)))
    return tuple(changed), [*made.values()], edges, faults


def _companion(name: str, engine: RoleSpec, channel: ChannelSpec) -> RoleSpec:
    """One rank on each host of engines; their number is known when these have been placed."""
    keep = () if engine.clear_cache else ("--keep-cache",)
    return RoleSpec(
        name=name,
        count=1,
        entry=Entry("module", COMPANION, (channel.name, f"--timeout={engine.update_timeout}", *keep)),
        max_restarts=RESTARTS * engine.count,
        restart="process",
        restart_window=WINDOW,
        slots=0.0,
        service=True,
        optional=engine.optional,
        beside=engine.name,
    )
