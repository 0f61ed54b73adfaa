"""The rooms of the package and who may enter whom, over the imports that are really there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "unirun"

FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "cli",
        "train experiments",
        "roles weights launcher master",
        "failover collocation graph rendezvous observe",
        "wire spec",
        "errors names sizes",
    )
)
"""From the top. A room may import from floors below its own, and from rooms beside it only where that is drawn."""

DRAWN_SIDEWAYS = {("observe", "rendezvous")}

TORCH_ROOMS = frozenset({"roles", "weights", "train", "experiments"})
TORCH_MODULES = frozenset(
    {
        *(f"unirun.launcher.{name}" for name in ("spawner", "worker", "store")),
        *(f"unirun.rendezvous.torchrun.{name}" for name in ("backend", "handler", "roundstore")),
    }
)
MAY_PRINT = frozenset(
    {
        *(f"unirun.launcher.{name}" for name in ("worker", "child", "local", "standby")),
        *(f"unirun.master.{name}" for name in ("__main__", "writing")),
        "unirun.roles.serving",
    }
)
"""Bootstraps, a worker that ends from a thread, a master whose store is away, an agent that can start no master: what they have to say goes to the stderr of their process."""

MASTER_SHELLS = frozenset(f"unirun.master.{name}" for name in ("shell", "writing", "lead", "__main__"))
"""Streams, the tasks that write to the store, how a process comes to lead, and that process. All else decides."""

MAY_PICKLE = frozenset(
    {"unirun.roles.calls.codec", "unirun.roles.calls.remote", "unirun.roles.host", "unirun.train.handle"}
)
"""What users send each other. unirun's own messages and files are JSON."""

MAY_READ_YAML = frozenset(
    {
        f"unirun.{name}"
        for name in ("spec.yaml", *(f"roles.{n}" for n in ("host", "inprocess", "trainer", "workload")))
    }
)

MAX_LINES = 400


@dataclass(frozen=True)
class Module:
    """One module of the package."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """``launcher`` for ``unirun.launcher.core``; empty for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""


@dataclass(frozen=True)
class Import:
    """`target` is imported, perhaps for the type checker only."""

    target: str
    line: int
    types_only: bool


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return found


MODULES = modules()
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def imports(module: Module) -> Iterator[Import]:
    """Every import, wherever it stands; `importlib.import_module` with a literal name counts too."""
    types_only = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        hidden = id(node) in types_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, hidden)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}:{node.lineno}: import by the whole name"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, hidden)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            literal = [argument for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (Import(str(each.value), node.lineno, hidden) for each in literal)


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@each_module
def test_imports_go_down_only(module: Module) -> None:
    for each in imports(module):
        parts = each.target.split(".")
        if parts[0] != "unirun" or not module.room:
            continue
        room = parts[1]
        where = f"{module.name}:{each.line}"
        assert any(room in rooms for rooms in FLOORS), f"{where}: {room} stands on no floor"
        allowed = room == module.room or floor(room) > floor(module.room)
        assert allowed or (module.room, room) in DRAWN_SIDEWAYS, (
            f"{where}: {module.room} may not enter {room}"
        )


def test_every_room_stands_on_a_floor() -> None:
    rooms = {module.room for module in MODULES} - {""}
    assert rooms <= set().union(*FLOORS)


@each_module
def test_torch_is_imported_where_workers_are_and_nowhere_else(module: Module) -> None:
    for each in imports(module):
        if each.target.split(".")[0] == "torch":
            allowed = module.room in TORCH_ROOMS or (module.name in TORCH_MODULES and not each.types_only)
            assert allowed, f"{module.name}:{each.line} imports {each.target}"


@each_module
def test_no_pickle_and_no_job_files_where_they_do_not_belong(module: Module) -> None:
    for each in imports(module):
        top = each.target.split(".")[0]
        if top in ("pickle", "cloudpickle", "marshal", "shelve"):
            assert module.name in MAY_PICKLE, f"{module.name}:{each.line} imports {each.target}"
        assert top not in ("omegaconf", "yaml") or module.name in MAY_READ_YAML


@each_module
def test_transports_know_nothing_of_calls(module: Module) -> None:
    """Guarantees are made above them, once; so a new transport has nothing to repeat."""
    if module.name.startswith("unirun.roles.transport"):
        for each in imports(module):
            allowed = not each.target.startswith("unirun.roles") or ".transport." in each.target
            assert allowed, f"{module.name}:{each.line} imports {each.target}"


@each_module
def test_the_cores_do_no_input_and_no_output(module: Module) -> None:
    calls = "sharding", "policy", "envelope", "directory"
    pure = (
        *(f"roles.calls.{name}" for name in calls),
        "roles.transport.frames",
        *(f"launcher.{name}" for name in ("core", "hearing", "ends", "state", "events")),
        "failover.",
        "graph.",
        *(f"collocation.{name}" for name in ("inventory", "fake")),
        "wire.frames",
        "wire.messages",
        "wire.codec",
    )
    master = module.room == "master" and module.name not in MASTER_SHELLS
    if not master and not any(f"{module.name}.".startswith(f"unirun.{name}") for name in pure):
        return
    banned = {"asyncio", "socket", "subprocess", "time", "threading", "random", "os", "select"}
    for each in imports(module):
        assert each.target.split(".")[0] not in banned, f"{module.name}:{each.line} imports {each.target}"


def test_nothing_is_imported_in_a_circle() -> None:
    """Between modules, at import time: what stands in functions or under TYPE_CHECKING does not count."""
    names = {module.name for module in MODULES}
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        top = Module(module.name, module.path, ast.Module([*_top_level(module.tree)], []))
        targets = {each.target for each in imports(top) if not each.types_only}
        graph[module.name] = {
            name for target in targets for name in (target, target.rpartition(".")[0]) if name in names
        } - {module.name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                if not name.startswith(f"{target}."):  # a package's __init__ names what its modules offer
                    visit(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    return (node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef))


@each_module
def test_a_module_fits_a_few_screens(module: Module) -> None:
    lines = len(module.path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{module.path.name} has {lines} lines"


@each_module
def test_a_module_says_what_it_is_for(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.name} has no docstring"


@each_module
def test_public_names_are_explained(module: Module) -> None:
    for where, node in _public(module.tree, module.name):
        assert ast.get_docstring(node), f"{where}:{node.lineno} has no docstring"


def _is_overload(node: ast.stmt) -> bool:
    return any(ast.unparse(each) == "overload" for each in getattr(node, "decorator_list", ()))


def _public(
    tree: ast.Module | ast.ClassDef, where: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not (
            node.name.startswith("_") or _is_overload(node)
        ):
            yield f"{where}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{where}.{node.name}")


@each_module
def test_only_the_command_prints(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            to_stderr = any(k.arg == "file" and ast.unparse(k.value) == "sys.stderr" for k in node.keywords)
            allowed = module.room == "cli" or (module.name in MAY_PRINT and to_stderr)
            assert allowed, f"{module.name}:{node.lineno} prints"


@each_module
def test_a_package_offers_what_it_names(module: Module) -> None:
    """``__all__`` is sorted (constants, classes, functions), and holds what is there."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert len(set(names)) == len(names)
            defined = {each.target.rpartition(".")[2] for each in imports(module)} | {
                name
                for each in module.tree.body
                for name in (
                    [each.name]
                    if isinstance(each, ast.FunctionDef | ast.ClassDef)
                    else [ast.unparse(t) for t in each.targets]
                    if isinstance(each, ast.Assign)
                    else []
                )
            }
            assert set(names) <= defined, f"{module.name} names {set(names) - defined}"


def test_nothing_is_left_for_later_in_a_comment() -> None:
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    for folder in ("unirun", "tests", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not words.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_the_package_ships_its_types() -> None:
    assert (PACKAGE / "py.typed").is_file()
