"""Names in braces, which arguments and variables of processes have for what is known only when they start.

::

    {rank} {count} {host} {port} {addr} {ports.NAME} {node_rank} {nodes} {head} {group.head}
    {roles.ROLE.host} {roles.ROLE.port} {roles.ROLE.addr} {roles.ROLE.hosts} {roles.ROLE.addrs} {roles.ROLE.ports.NAME}

The first line is for programs and roles with ports, the second for every role. Anything else in braces stays as it is,
as JSON does, except a single word that is nearly one of these names; ``{{port}}`` stands for the text ``{port}``. They
are not OmegaConf's ``${…}``, which are resolved when a job file is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from unirun.errors import Fault
from unirun.spec.job import Entry, RoleSpec
from unirun.spec.read import nearest
from unirun.values import RankAddress, Value

OWN = ("rank", "count", "host", "port", "addr", "node_rank", "nodes", "head", "group.head")
OF_ROLE = ("host", "port", "addr", "hosts", "addrs")

_NAME = re.compile(r"(?<!\$)(\{\{|\{)([A-Za-z_][\w-]*(?:\.[\w-]+)*)(\}\}|\})", re.ASCII)


Places = Mapping[str, tuple[RankAddress, ...]]
"""The places of the ranks of roles, by role; of roles whose ranks have an address."""


class Own(Value):
    """The position of the process for which templates are filled in."""

    role: str
    rank: int
    count: int
    host: str = ""
    node_rank: int = 0
    nodes: int = 1


def fill(text: str, own: Own, roles: Mapping[str, RoleSpec], places: Places) -> str:
    """`text` with its names replaced. The names are valid (`faults_of`)."""
    return _NAME.sub(partial(_replace, own, roles, places), text)


def fill_roles(text: str, roles: Mapping[str, RoleSpec], places: Places) -> str:
    """`text`, which is for processes of all roles, with the addresses of roles filled in."""
    nobody = RoleSpec("", 1, Entry("script", ""))
    return fill(text, Own("", 0, 1), {**roles, "": nobody}, places)


def _replace(own: Own, roles: Mapping[str, RoleSpec], places: Places, found: re.Match[str]) -> str:
    opening, name, closing = found.groups()
    if not _is_name(roles[own.role], name):
        return found[0]
    if opening == "{{" and closing == "}}":
        return f"{{{name}}}"
    value = _value(name, own, roles, places)
    # One brace more on a side is a brace of the text: JSON around a name.
    return f"{opening[1:]}{value}{closing[1:]}"


def _is_name(role: RoleSpec, name: str) -> bool:
    """Return True if `name` stands for something in this role."""
    head = name.partition(".")[0]
    if head == "roles":
        return name.count(".") >= 2
    own = name in OWN or (head == "ports" and "." in name)
    return own and (role.is_program or bool(role.ports))


def _value(name: str, own: Own, roles: Mapping[str, RoleSpec], places: Places) -> str:
    if name.startswith("roles."):
        _, other, *rest = name.split(".")
        return _of_role(rest, roles[other], places.get(other, ()))
    role = roles[own.role]
    here = places[own.role][own.rank] if own.role in places else RankAddress(own.host)
    first = places[own.role][own.rank - own.rank % (role.group or own.count)] if own.role in places else here
    match name.split("."):
        case ["ports", port]:
            return str(here.ports[role.ports.index(port)])
        case ["group", _]:
            return first.addr()
    values = {
        "rank": own.rank,
        "count": own.count,
        "host": here.host,
        "addr": here.addr(),
        "node_rank": own.node_rank,
        "nodes": own.nodes,
        "head": first.host,
    }
    return str(here.ports[0] if name == "port" else values[name])


def _of_role(rest: list[str], role: RoleSpec, places: tuple[RankAddress, ...]) -> str:
    heads = places[:: role.group or 1]
    match rest:
        case ["ports", port]:
            return str(heads[0].ports[role.ports.index(port)])
        case ["hosts"]:
            return ",".join(place.host for place in heads)
        case ["addrs"]:
            return ",".join(place.addr() for place in heads)
        case ["host"]:
            return heads[0].host
        case ["port"]:
            return str(heads[0].ports[0])
    return heads[0].addr()


def texts_of(role: RoleSpec) -> Iterator[tuple[str, str]]:
    """The texts of a role that may have templates, each with its key."""
    yield from (("args", text) for text in role.entry.args)
    yield from ((f"env.{name}", text) for name, text in role.env.items())
    for key in ("ready", "alive"):
        probe = getattr(role, key)
        yield from ((key, word) for word in (probe.words if probe else ()))


def names_in(texts: Iterable[str]) -> Iterator[str]:
    """The names in single braces, also those that stand for nothing."""
    for text in texts:
        for opening, name, closing in _NAME.findall(text):
            if (opening, closing) != ("{{", "}}"):
                yield name


def faults_of(role: RoleSpec, roles: Mapping[str, RoleSpec]) -> Iterator[Fault]:
    """The faults of the names that the texts of `role` have."""
    for key, text in texts_of(role):
        for name in names_in([text]):
            if fault := _fault(name, role, roles):
                yield Fault(f"roles.{role.name}.{key}", f"{{{name}}}: {fault[0]}", fault[1])


def faults_of_env(env: Mapping[str, str], roles: Mapping[str, RoleSpec]) -> Iterator[Fault]:
    """The faults of the addresses of roles that variables of all roles name."""
    nobody = RoleSpec("", 1, Entry("script", ""))
    for name, text in env.items():
        for found in names_in([text]):
            if fault := _fault(found, nobody, roles):
                yield Fault(f"env.{name}", f"{{{found}}}: {fault[0]}", fault[1])


def _fault(name: str, role: RoleSpec, roles: Mapping[str, RoleSpec]) -> tuple[str, str] | None:
    if not _is_name(role, name):
        return _nearly(name, role)
    head, *rest = name.split(".")
    if head != "roles":
        # The host of another rank is known with its ports.
        needs = (
            head == "ports" or name in ("port", "addr", "group.head") or (name == "head" and role.count > 1)
        )
        if needs and not role.ports:
            return f"{role.name} has no port", "write ports: [http]"
        return _port_fault(".".join(rest), role) if head == "ports" else None
    other, what = roles.get(rest[0]), rest[1:]
    if other is None:
        return f"no role is called {rest[0]!r}", nearest(rest[0], [*roles])
    if not other.ports:
        return f"{other.name} has no port, and so no address", f"write ports: [http] in {other.name}"
    if what[0] == "ports" and len(what) == 2:
        return _port_fault(what[1], other)
    if len(what) != 1 or what[0] not in OF_ROLE:
        return "there is no such name", nearest(
            ".".join(what), [*OF_ROLE, *(f"ports.{p}" for p in other.ports)]
        )
    return None


def _port_fault(port: str, role: RoleSpec) -> tuple[str, str] | None:
    if port in role.ports:
        return None
    return f"{role.name} has no port of that name", nearest(port, role.ports)


def _nearly(name: str, role: RoleSpec) -> tuple[str, str] | None:
    """The fault of a word in the arguments of a program that is nearly a name."""
    known = [*OWN, *(f"ports.{port}" for port in role.ports)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75) if role.is_program else ()
    if not close:
        return None
    return "there is no such name", f"did you mean {{{close[0]}}}? Write {{{{{name}}}}} for the text itself"
