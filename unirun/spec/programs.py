"""The keys of a role that are about programs and services: contract, ports, readiness, order, names in braces."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unirun.errors import Fault
from unirun.spec.engines import LOADING_KEYS, RECEIVING
from unirun.spec.job import READY_TIMEOUT, UPDATE_TIMEOUT, Contract, Entry, Probe, RoleSpec, read_probe
from unirun.spec.read import Section, nearest, shown
from unirun.values import RankAddress, Value

# Names in braces, which arguments and variables of processes have for what is known only when they start.
#
# ::
#
#     {rank} {count} {host} {port} {addr} {ports.NAME} {node_rank} {nodes} {head} {group.head}     {roles.ROLE.host}
# {roles.ROLE.port} {roles.ROLE.addr} {roles.ROLE.hosts} {roles.ROLE.addrs} {roles.ROLE.ports.NAME}
#
# The first line is for programs and roles with ports, the second for every role. Anything else in braces stays as it
# is, as JSON does, except a single word that is nearly one of these names; ``{{port}}`` stands for the text ``{port}``.
# They are not OmegaConf's ``${…}``, which are resolved when a job file is read.

OWN_NAMES = ("rank", "count", "host", "port", "addr", "node_rank", "nodes", "head", "group.head")
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


NOBODY = RoleSpec("", 1, Entry("script", ""))
"""Stands for each role, where a text is for the processes of all."""


def fill_roles(text: str, roles: Mapping[str, RoleSpec], places: Places) -> str:
    """`text`, which is for processes of all roles, with the addresses of roles filled in."""
    return fill(text, Own("", 0, 1), {**roles, "": NOBODY}, places)


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
    own = name in OWN_NAMES or (head == "ports" and "." in name)
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
                where = f"roles.{role.name}.{key}" if role.name else key
                yield Fault(where, f"{{{name}}}: {fault[0]}", fault[1])


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
    known = [*OWN_NAMES, *(f"ports.{port}" for port in role.ports)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75) if role.is_program else ()
    if not close:
        return None
    return "there is no such name", f"did you mean {{{close[0]}}}? Write {{{{{name}}}}} for the text itself"


JOB_WIDE_PROGRAM_KEYS = ("contract", "python")
PROGRAM_KEYS = (
    *("ports", "service", "optional", "ready", "ready_timeout", "alive", "group", "after"),
    *LOADING_KEYS,
)
"""Keys of a role, with those that it inherits from the job (`JOB_WIDE_PROGRAM_KEYS`)."""

SERVICE_RESTARTS, SERVICE_WINDOW, SERVICE_DELAY = 10, 3600.0, 1.0
"""Defaults of services: ten restarts of the role in an hour; the first at once, the second after a second, then
after 2, 4, 8 s, and so on."""

_PORT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,30}")


def read_program(role: Section, entry: Entry, contract: Contract) -> dict[str, Any]:
    """The fields of a `RoleSpec` that are about programs and services."""
    service = role.flag("service")
    if service and entry.kind in ("workload", "trainer"):
        role.fault(
            "service", f"a {entry.kind} is none", "leave it out: the job ends without waiting for workloads"
        )
    ports = _ports(role, service=service)
    ready = read_probe(role, "ready")
    alive = read_probe(role, "alive")
    if ready is None and service and ports and _uses_a_port(role, entry):
        ready = Probe("tcp")
    for key, probe in (("ready", ready), ("alive", alive)):
        if probe is not None and probe.kind == "tcp" and not probe.words and not ports:
            role.fault(key, "the role has no port", "write ports: [http]")
        if probe is not None and entry.kind in ("workload", "trainer"):
            role.fault(key, f"a {entry.kind} says itself when it takes calls", "leave it out")
    if alive is not None and ready is None:
        role.fault(
            "alive", "it is asked once the program is ready, and there is no ready:", "write ready: tcp"
        )
    return {
        "contract": contract,
        "python": _python(role, entry),
        "ports": ports,
        "service": service,
        "optional": _optional(role, service=service),
        "ready": ready,
        "ready_timeout": role.seconds("ready_timeout", READY_TIMEOUT, 0.01),
        "alive": alive,
        "group": role.integer("group", 1, 1) if role.given("group") else None,
        "after": _after(role),
        "clear_cache": role.flag("clear_cache", True),
        "update_timeout": role.seconds("update_timeout", UPDATE_TIMEOUT, 0.01),
        "restart_window": role.seconds("restart_window", SERVICE_WINDOW if service else 0.0),
        "restart_delay": role.seconds(
            "restart_delay", SERVICE_DELAY if service and contract == "none" else 0.0
        ),
    }


def read_contract(role: Section, job: Section, entry: Entry) -> Contract:
    """The contract of a program: the role's, the job's, or ``none``; other entries have that of torchrun."""
    if entry.kind == "program":
        section = role if role.given("contract") else job
        chosen = section.choice("contract", ("torchrun", "none"), "none")
        return "none" if chosen == "none" else "torchrun"
    if role.given("contract"):
        role.fault("contract", f"a {entry.kind} has that of torchrun", "leave it out, or write program: NAME")
    return "torchrun"


def _ports(role: Section, *, service: bool) -> tuple[str, ...]:
    if not role.given("ports"):
        return ("http",) if service else ()
    names = role.texts("ports")
    for name in names:
        if not _PORT_NAME.fullmatch(name):
            remedy = "name the ports; unirun chooses the numbers, from port_range: ports: [http]"
            role.fault("ports", f"{name!r} is no name of a port", remedy)
    if len(set(names)) < len(names):
        role.fault("ports", "a name stands there twice", "name each port once")
    return names


def _uses_a_port(role: Section, entry: Entry) -> bool:
    """Return True if the command is told its port, so that it can be expected to listen there."""
    texts = [*entry.args, *(str(value) for value in role.mapping("env").values())]
    return any(name in ("port", "addr") or name.startswith("ports.") for name in names_in(texts))


def _optional(role: Section, *, service: bool) -> bool:
    optional = role.flag("optional")
    if optional and not service:
        role.fault("optional", "only a service is", "add service: true")
    return optional


def _after(role: Section) -> dict[str, int]:
    value = role.fields.get("after")
    if not isinstance(value, Mapping):
        return dict.fromkeys(role.texts("after"), 0)
    after = role.section("after")
    return {name: after.integer(name, 1, 1) for name in after.fields}


def _python(role: Section, entry: Entry) -> str | None:
    """The interpreter that a path of a virtual environment or of an interpreter means."""
    path = role.text("python")
    if not path:
        return None
    if entry.kind in ("workload", "trainer", "function"):
        problem = f"a {entry.kind} runs with unirun's own interpreter"
        role.fault("python", problem, "leave it out; scripts, modules and programs may have another one")
    found = interpreter(path)
    if found is None:
        problem = f"{shown(path)} is no virtual environment, and no interpreter"
        role.fault("python", problem, "name its directory, which has bin/python, or the interpreter")
    return found


def interpreter(path: str) -> str | None:
    """The absolute path of the interpreter in the directory `path`, or `path` itself; None when there is none."""
    given = Path(path).expanduser()
    # Not the methods of Path: they raise OSError for a name that is too long.
    if os.path.isdir(given):
        given = given / "bin" / "python"
    elif "/" not in path:
        return shutil.which(path)
    # Not resolved: the link in an environment is what makes it one.
    return os.path.abspath(given) if os.path.isfile(given) and os.access(given, os.X_OK) else None


def variables_of(python: str | None) -> dict[str, str | None]:
    """The variables of a process whose interpreter is `python`, as ``activate`` sets them; None to unset one.

    ``PATH`` is the folder that goes in front of it.
    """
    if python is None:
        return {}
    folder = Path(python).parent
    environment = str(folder.parent) if (folder.parent / "pyvenv.cfg").is_file() else None
    return {"PATH": str(folder), "VIRTUAL_ENV": environment, "PYTHONHOME": None}


def program_faults(roles: Sequence[RoleSpec], env: Mapping[str, str]) -> Iterator[Fault]:
    """Faults of templates, also in the job's `env`, of the order of roles, and of groups of ranks."""
    known = {role.name: role for role in roles}
    yield from faults_of(replace(NOBODY, env=env), known)
    for role in roles:
        yield from faults_of(role, known)
        yield from _order_faults(role, known)
        yield from _interpreter_faults(role, env)
        if role.group and not (role.service and role.is_program):
            problem = "only ranks of a service are one server together"
            yield Fault(
                f"roles.{role.name}.group", problem, "leave it out; per_group keeps ranks on one node"
            )
        elif role.group and role.count % role.group:
            problem = f"{role.group} does not divide the role's {role.count} ranks"
            yield Fault(f"roles.{role.name}.group", problem, f"write count: {role.group}, or a multiple")
        if role.ports and role.least is not None:
            problem = "ranks with ports have a fixed number, so that their addresses stay"
            yield Fault(f"roles.{role.name}.count", problem, "write one number")
    yield from _circles(known)


def _order_faults(role: RoleSpec, known: Mapping[str, RoleSpec]) -> Iterator[Fault]:
    where = f"roles.{role.name}.after"
    for name, number in role.after.items():
        if name not in known:
            yield Fault(where, f"no role is called {name!r}", nearest(name, [*known]))
        elif number > (there := (known[name].least or known[name].count) // (known[name].group or 1)):
            problem = f"{name} has {there}, so {number} are never ready"
            if known[name].least is not None:
                problem = f"{name} may have {there} only, so {number} may never be ready"
            yield Fault(where, problem, "write a smaller number")


def _circles(known: Mapping[str, RoleSpec]) -> Iterator[Fault]:
    """A fault for each circle of roles that start after each other."""
    left = {name: [other for other in role.after if other in known] for name, role in known.items()}
    while left:
        try:
            TopologicalSorter(left).prepare()
            return
        except CycleError as error:
            circle: list[str] = error.args[1][::-1]
        where, shown = f"roles.{circle[0]}.after", " after ".join(circle)
        yield Fault(where, f"a circle: {shown}", "drop one of them")
        left = {name: others for name, others in left.items() if name not in circle}


def _interpreter_faults(role: RoleSpec, env: Mapping[str, str]) -> Iterator[Fault]:
    """The fault of a role whose interpreter has to import unirun and cannot. One that is given ``PYTHONPATH``, or a
    file of variables, may be able to."""
    told = role.env_file or any(each.get("PYTHONPATH") for each in (role.env, env, os.environ))
    if role.entry.kind in ("script", "module"):
        use = f"a {role.entry.kind} needs it there"
        otherwise = ", or write program: python, which does not need it"
    elif role.engine == "vllm" and RECEIVING[-1] in role.entry.args:
        use, otherwise = "vLLM loads its plugin for weights from there", ""
    elif role.engine == "builtin":
        use, otherwise = "the built-in server is a part of it", ""
    else:
        return
    if role.python and not told and lacks_unirun(role.python):
        problem = f"unirun is not installed in {Path(role.python).parent.parent}, and {use}"
        remedy = f"run {role.python} -m pip install torch-unirun{otherwise}"
        yield Fault(f"roles.{role.name}.python", problem, remedy)


def lacks_unirun(python: str) -> bool:
    """Return True if `python` is that of a virtual environment in which unirun is certainly not installed.

    The interpreter is not started: unirun would be in the environment's directory of packages, or in another one that a
    ``.pth`` file there names.
    """
    environment = Path(python).parent.parent
    try:
        settings = (environment / "pyvenv.cfg").read_text()
        if re.search(r"(?im)^include-system-site-packages\s*=\s*true", settings):
            return False
        folders = [*environment.glob("lib*/python*/site-packages")]
        names = [name for folder in folders for name in _names_for_import(folder)]
    except (OSError, UnicodeDecodeError):
        return False
    return bool(folders) and not any("unirun" in name or name == "sitecustomize.py" for name in names)


def _names_for_import(folder: Path) -> Iterator[str]:
    """The names in `folder`, and in the directories that its ``.pth`` files name. Raises `OSError`."""
    for entry in folder.iterdir():
        yield entry.name
        if entry.suffix == ".pth":
            for line in entry.read_text().splitlines():
                if line.strip() and not line.startswith("#") and (more := folder / line.strip()).is_dir():
                    yield from (each.name for each in more.iterdir())
