"""The rooms of the package and who may enter whom, over the imports that are really there."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings

from benchmarks import source

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "unirun"

FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "cli",
        "dashboard",
        "experiments",
        "rollout",
        "train",
        "weights launcher",
        "roles failover",
        "collocation observe rendezvous",
        "wire",
        "spec",
        "atomic",
        "errors",
        "values",
    )
)
"""From the top. A room may import from floors below its own, and from rooms beside it only where that is drawn."""

LAUNCHER_FLOORS = ("slurm.", "hosts.", "doctor.")
"""Folders of the launcher, from below. All other modules of it are below them."""

DRAWN_SIDEWAYS = {("rendezvous", "observe")}

TORCH_ROOMS = frozenset({"roles", "weights", "train", "experiments"})
TORCH_MODULES = frozenset(
    {
        *(f"unirun.launcher.{name}" for name in ("child", "preloaded", "doctor.collective")),
        "unirun.rendezvous.torchrun.handler",
    }
)
MAY_PICKLE = frozenset(
    {
        "unirun.roles.calls.codec",
        "unirun.roles.worker_main",
        "unirun.train.job",
    }
)
"""Modules that pickle the values which users send each other. unirun's own messages and files are JSON."""

MAY_READ_YAML = frozenset(
    {
        f"unirun.{name}"
        for name in (
            "spec.yaml",
            "experiments.experiment",
            *(f"roles.{n}" for n in ("worker_main", "inprocess", "workload")),
        )
    }
)

MAX_LINES = 800

SMALL = {
    "dashboard.report": "needs no server",
    "launcher.tracing": "is for workers whose job is traced",
    "weights.dtensors": "imports DTensor, which takes long",
    "weights.integrations.vllm": "users import it",
}
"""Modules of fewer than 110 lines that one other module imports."""


@dataclass(frozen=True, eq=False)
class Module:
    """One module of the package; equal to itself only, so that a function of one can be cached."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """``launcher`` for ``unirun.launcher.core``; empty for the package itself."""
        return "" if self.name in ("unirun", "unirun.__main__") else self.name.split(".")[1]


@dataclass(frozen=True)
class Import:
    """`target` is imported, perhaps for the type checker only."""

    target: str
    line: int
    types_only: bool


@functools.cache
def sources() -> tuple[source.Module, ...]:
    """The modules of the package, as `python -m benchmarks house` counts them: read and parsed once by the process that
    runs these tests, not by each that collects them."""
    return tuple(source.modules(PACKAGE))


@functools.cache
def modules() -> tuple[Module, ...]:
    """The same modules with their files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return tuple(Module(each.name, path, each.tree) for path, each in zip(files, sources(), strict=True))


@functools.cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every import, wherever it stands; `importlib.import_module` with a literal name counts too."""
    return tuple(_imports(module, module.tree, types_only=False))


def _imports(module: Module, node: ast.AST, *, types_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, types_only) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module.name}:{node.lineno}: import by the whole name"
        yield from (Import(f"{node.module}.{alias.name}", node.lineno, types_only) for alias in node.names)
    elif isinstance(node, ast.Call) and called(node).endswith("import_module"):
        literal = [argument for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        yield from (Import(str(each.value), node.lineno, types_only) for each in literal)
    elif isinstance(node, ast.If):
        types_only = types_only or "TYPE_CHECKING" in ast.unparse(node.test)
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt | ast.expr | ast.excepthandler | ast.match_case | ast.withitem):
            yield from _imports(module, inner, types_only=types_only)


def called(node: ast.Call) -> str:
    """``a.b`` for ``a.b(…)``, and ``….b`` where the beginning is no name; `ast.unparse` takes far longer."""
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    parts.append(function.id if isinstance(function, ast.Name) else "…")
    return ".".join(reversed(parts))


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def may_enter(room: str, other: str) -> bool:
    return floor(other) > floor(room) or (room, other) in DRAWN_SIDEWAYS


def none(offenders: Iterable[str]) -> None:
    """Fail with all of them, a line each."""
    found = list(offenders)
    assert not found, "\n" + "\n".join(found)


def each_import() -> Iterator[tuple[Module, Import]]:
    return ((module, found) for module in modules() for found in imports(module))


def test_imports_go_down_only() -> None:
    def offenders() -> Iterator[str]:
        for module, each in each_import():
            parts = each.target.split(".")
            if parts[0] != "unirun" or not module.room:
                continue
            room, where = parts[1], f"{module.name}:{each.line}"
            if not any(room in rooms for rooms in FLOORS):
                yield f"{where}: {room} stands on no floor"
            elif room != module.room and not may_enter(module.room, room):
                yield f"{where}: {module.room} may not enter {room}"

    none(offenders())


def test_every_room_stands_on_a_floor() -> None:
    rooms = {module.room for module in modules()} - {""}
    assert rooms == set().union(*FLOORS)


def test_exceptions_are_for_modules_that_exist() -> None:
    """A check that passes on nothing is none."""
    names = {module.name for module in modules()}
    assert (TORCH_MODULES | MAY_PICKLE | MAY_READ_YAML) - names == set()


def test_torch_is_imported_where_workers_are_and_nowhere_else() -> None:
    none(
        f"{module.name}:{each.line} imports {each.target}"
        for module, each in each_import()
        if each.target.split(".")[0] == "torch"
        and module.room not in TORCH_ROOMS
        and (module.name not in TORCH_MODULES or each.types_only)
    )


def test_no_pickle_and_no_job_files_where_they_do_not_belong() -> None:
    places = {
        **dict.fromkeys(("pickle", "cloudpickle", "marshal", "shelve"), MAY_PICKLE),
        **dict.fromkeys(("omegaconf", "yaml"), MAY_READ_YAML),
    }
    none(
        f"{module.name}:{each.line} imports {each.target}"
        for module, each in each_import()
        if module.name not in places.get(each.target.split(".")[0], {module.name})
    )


def test_a_frozen_value_is_no_dataclass() -> None:
    """A frozen dataclass takes twenty times as long to make; `docs/architecture.md` has the rule. Users fill in those of experiments."""
    none(
        f"{module.name}:{each.line} imports {each.target}"
        for module, each in each_import()
        if each.target.split(".")[0] == "dataclasses" and module.room not in ("roles", "experiments")
    )


def test_transports_know_nothing_of_calls() -> None:
    """Guarantees are made above them, once; so a new transport has nothing to repeat."""
    none(
        f"{module.name}:{each.line} imports {each.target}"
        for module, each in each_import()
        if module.name.startswith("unirun.roles.transport")
        and each.target.startswith("unirun.roles")
        and ".transport." not in each.target
    )


def test_texts_of_digits_are_read_in_one_place() -> None:
    """`int` raises for some texts that `isdigit` lets through, and for thousands of digits."""
    none(
        f"{module.name}:{node.lineno} asks {node.attr}"
        for module in modules()
        if module.name != "unirun.values"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("isdecimal", "isdigit", "isnumeric")
    )


def test_the_cores_do_no_input_and_no_output() -> None:
    pure = (
        *(f"roles.{name}" for name in ("calls.policy", "calls.codec", "transport.frames")),
        *(f"launcher.{name}" for name in ("core", "events")),
        "failover.",
        *(f"collocation.{name}" for name in ("inventory", "graph")),
        *(f"weights.{name}" for name in ("tensors", "messages")),
        "rollout.choosing",
        *(f"train.{name}" for name in ("lockstep", "data.plan", "checkpoints.strategy")),
        "wire.frames",
        "wire.messages",
        "spec.read",
    )
    names = {module.name for module in modules()}
    assert {each for each in pure if f"unirun.{each}".rstrip(".") not in names} == set()
    banned = {"asyncio", "socket", "subprocess", "time", "threading", "random", "os", "select"}
    none(
        f"{module.name}:{each.line} imports {each.target}"
        for module, each in each_import()
        if any(f"{module.name}.".startswith(f"unirun.{name}") for name in pure)
        and each.target.split(".")[0] in banned
    )


def test_no_modules_of_a_room_import_each_other_in_a_circle() -> None:
    """Imports in functions and for the type checker count too: a circle is one module that was cut by length."""
    none(" → ".join(circle) for circle in source.circles(sources()))


def test_the_launcher_has_floors_of_its_own() -> None:
    """The start of a job on this host knows neither Slurm nor other hosts; the doctor looks at all."""

    def floor(name: str) -> int:
        return next(
            (n for n, part in enumerate(LAUNCHER_FLOORS) if name.startswith(f"unirun.launcher.{part}")), -1
        )

    none(
        f"{module.name}:{each.line} imports {each.target}"
        for module, each in each_import()
        if module.room == "launcher" and floor(f"{each.target}.") > floor(f"{module.name}.")
    )


def test_a_module_fits_a_few_screens() -> None:
    sizes = {module.name: len(module.path.read_text().splitlines()) for module in modules()}
    none(f"{name} has {lines} lines" for name, lines in sizes.items() if lines > MAX_LINES)


def test_a_module_says_what_it_is_for() -> None:
    none(f"{module.name} has no docstring" for module in modules() if not ast.get_docstring(module.tree))


def test_public_names_are_explained() -> None:
    none(
        f"{where}:{node.lineno} has no docstring"
        for module in modules()
        for where, node in _public(module.tree, module.name)
        if not ast.get_docstring(node)
    )


def test_a_class_name_means_one_thing() -> None:
    assert not source.defined_twice(sources(), public=False)


def test_a_constant_of_time_says_its_unit_or_its_purpose() -> None:
    none(source.unclear_times(sources()))


def test_a_small_module_has_more_than_one_importer_or_a_reason() -> None:
    assert set(source.single_importers(sources())) == {f"unirun.{name}" for name in SMALL}


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


QUESTION = re.compile(
    r'^[ \t]*r?"""(?:What|Who|How|Where|When|Which|Whether|Why|Whose|Whom|(?:Tell|Say|Return) whether)(?:ever)?\b.*',
    re.MULTILINE,
)
"""The first line of such a docstring; far faster than a parser, and as right, as ruff puts docstrings on lines of their own."""


def test_a_docstring_begins_with_a_noun_or_a_verb_and_not_with_a_question() -> None:
    none(
        f"{path.relative_to(ROOT)} has {found[0].strip()}"
        for folder in ("unirun", "tests", "examples", "benchmarks", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for found in QUESTION.finditer(path.read_text())
    )


PRINTS = frozenset({"print", "traceback.print_exc", "traceback.print_exception"})


def test_only_the_command_prints_and_only_what_is_printable() -> None:
    """Output of workers and of other users' jobs goes through `unirun.launcher.foreground.terminal`; JSON
    escapes it itself. All other processes report, which never raises: the disk may be full that holds their
    log."""

    def offenders() -> Iterator[str]:
        for module in modules():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and called(node) in PRINTS:
                    json = ast.unparse(node.args[0]).startswith("json.dumps(") if node.args else False
                    ours = module.name in ("unirun.launcher.foreground.terminal", "unirun.wire.reporting")
                    if not ours and not (module.room == "cli" and json):
                        yield f"{module.name}:{node.lineno} prints"

    none(offenders())


def test_a_package_offers_what_it_names() -> None:
    """``__all__`` has each name once, and holds what is there."""

    def offenders() -> Iterator[str]:
        for module in modules():
            for node in module.tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    names = ast.literal_eval(node.value)
                    twice = [name for name, count in Counter(names).items() if count > 1]
                    if missing := set(names) - _defined(module):
                        yield f"{module.name} names {missing}, which it does not have"
                    if twice:
                        yield f"{module.name} names {twice} twice"

    none(offenders())


def _defined(module: Module) -> set[str]:
    """The names at the top of a module."""
    found = {each.target.rpartition(".")[2] for each in imports(module)}
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
    return found


APPENDED = "appended to, and read while it grows"
LOCK = "a lock, which has no content"
TEMPORARY = "in a temporary directory that no other process knows"
MOVED = "moves what is whole already"
REMOTE = "behind a URL, where a name is given at the end, or by moving"

NOT_ATOMIC = {
    "experiments.buffer.Buffer._file": "appended to; what was cut at its end was not accepted",
    "experiments.buffer.append_line": "appended to; a line that was cut counts for nothing",
    "experiments.recovery.Recovery.record": APPENDED,
    "launcher.hosts.copying._start": APPENDED,
    "launcher.local._become": APPENDED,
    "launcher.local.running_member": APPENDED,
    "launcher.standby.Standby._popen": APPENDED,
    "launcher.warm.borrowing.start": APPENDED,
    "observe.events.LineLog.open": APPENDED,
    "observe.jobdir.open_log": "appended to, with the rights of a directory that a group reads",
    "train.callbacks.loggers.CsvLoggerCallback._add": APPENDED,
    "train.callbacks.loggers._continued": APPENDED,
    "experiments.starting.alone": LOCK,
    "rendezvous.creation._make": LOCK,
    "train.arguments.hold": LOCK,
    "launcher.hosts.copying.pack": TEMPORARY,
    "launcher.hosts.copying.send_tree": TEMPORARY,
    "weights.disk._header": TEMPORARY,
    "weights.integrations.sglang.SGLangClient.deliver": TEMPORARY,
    "experiments.recovery.Recovery.discard": MOVED,
    "experiments.recovery.Recovery.set_aside": MOVED,
    "launcher.local.AgentProcess.begin": MOVED,
    "rendezvous.creation._make_room": MOVED,
    "rendezvous.creation._keep_attempt": MOVED,
    "train.checkpoints.state._can_be_saved": "to /dev/null",
    "train.checkpoints.state._writer": "torch writes the parts of a checkpoint, which counts when its manifest is there",
    "train.checkpoints.folder.Folder.write": REMOTE,
    "train.checkpoints.folder.Folder.publish": REMOTE,
    "weights.disk.save": REMOTE,
    "cli.output.write_file": "the user names it, perhaps /dev/stdout: written in place, as a shell does",
    "launcher.foreground.terminal.prepare_streams": "the standard streams",
    "rendezvous.creation._make_logs": "a link, which is there or not",
}
"""Functions that may open, link or move a file under its final name, and why `unirun.atomic` is not for it."""


def test_one_module_opens_final_names_for_writing() -> None:
    found = {
        f"{module.name}.{where}".removeprefix("unirun."): node
        for module in modules()
        if module.name != "unirun.atomic"
        for where, node in _calls(module.tree)
        if _writes_a_name(node)
    }
    none(
        f"{where}:{node.lineno}: {ast.unparse(node)}: write it with unirun.atomic"
        for where, node in found.items()
        if where not in NOT_ATOMIC
    )
    assert set(NOT_ATOMIC) - set(found) == set()


def _calls(node: ast.AST, where: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Each call, and the function that it is in."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Call):
            yield where, inner
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calls(inner, f"{where}.{inner.name}".lstrip("."))
        else:
            yield from _calls(inner, where)


WRITE = frozenset(
    (
        *(
            "write_text",
            "write_bytes",
            "rename",
            "renames",
            "link",
            "symlink",
            "symlink_to",
            "hardlink_to",
            "mv",
        ),
        *("copyfile", "copy2", "copytree", "save_file", "put_file", "mkstemp", "NamedTemporaryFile"),
        *("FileSystemWriter", "FsspecWriter"),
    )
)
FLAGS = re.compile("O_CREAT|O_WRONLY|O_TRUNC|_APPEND")
MODE = re.compile(r"(?=.*[wax+])[rwaxbt+]+(:gz)?")


def _writes_a_name(node: ast.Call) -> bool:
    """Return True if a call opens a file to be written, or gives one a name."""
    owner, _, name = called(node).rpartition(".")
    if name == "open" and owner == "os":
        return bool(FLAGS.search(ast.unparse(node.args[1])))
    if name == "open":
        inside = (each for argument in (*node.args, *node.keywords) for each in ast.walk(argument))
        return any(isinstance(each, ast.Constant) and MODE.fullmatch(str(each.value)) for each in inside)
    if name == "replace" and owner != "atomic":
        # Of a string it has two arguments, and of a value the changes.
        return owner == "os" or (bool(owner) and len(node.args) == 1 and not node.keywords)
    if name == "save" and owner == "torch":
        return ast.unparse(node.args[1]) != "file"
    return name in WRITE


FOLDERS = ("unirun", "tests", "examples", "benchmarks")


def lines(*words: str) -> Iterator[tuple[str, str]]:
    """Every line of our own code that has one of `words`, and where it stands."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if any(word in line for word in words):
                    yield f"{path.relative_to(ROOT)}:{number}", line


def test_nothing_is_left_for_later_in_a_comment() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    whole = re.compile(r"\b(" + "|".join(words) + r")\b")
    none(f"{where}: {line.strip()}" for where, line in lines(*words) if whole.search(line))


def test_properties_have_one_profile() -> None:
    """Deadlines of examples fail on a busy machine; `tests.conftest` has switched them off for all."""
    word = "dead" + "line="
    none(
        f"{where}: {line.strip()}"
        for where, line in lines(word)
        if "settings(" in line and not where.startswith("tests/conftest.py")
    )
    assert settings().deadline is None


def test_properties_have_a_share_of_the_examples_of_the_profile() -> None:
    """With a number of their own they would have as many in `make quick` as in `make test`."""
    none(where for where, _ in lines("max_" + "examples") if where.startswith("tests/unit/"))


def test_the_package_ships_its_types() -> None:
    assert (PACKAGE / "py.typed").is_file()
