"""Role groups with the signatures of workloads: from the source of classes to the text of a module. Nothing is run.

A group's method takes what the workload's takes. What it returns follows from ``@trainer_invocation``: a list for
target ``ALL`` and lists of ranks, the bare result of one worker otherwise, an ``InvocationRef`` of either with
``blocking=False``.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

from unirun.errors import UsageError
from unirun.values import Value

OF_EVERY_GROUP = frozenset({"call", "call_async", "count", "index", "map", "rank0", "role"})
"""What a role group has itself: a method of that name is called with ``group.call(name, …)``."""

# fmt: off
OF_EVERY_WORKLOAD = frozenset({
    "config", "get_device_collocation", "is_actor_role", "local_rank", "local_world_size", "master_handle", "name",
    "on_generation", "rank", "role", "setup", "teardown", "torch_master_addr", "torch_master_port", "word_size",
    "world_size",
})
# fmt: on
"""What a workload has from its base class, which is not called by a trainer."""

_HEAD = '''"""Role groups of {targets}, written by: unirun stubs {targets}"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unirun import RoleGroup

if TYPE_CHECKING:
'''


_Method = ast.FunctionDef | ast.AsyncFunctionDef


class Source(Value):
    """A class `name` of `module`, whose text is `text`; relative imports count from `package`."""

    module: str
    package: str
    name: str
    text: bytes


def group_stubs(sources: Sequence[Source]) -> str:
    """A module with one role group for each class.

    Raises `UsageError` when two classes, or what their signatures name, would have one name in it.
    """
    imports = _Imports()
    groups, names = [], []
    for source in sources:
        group = f"{source.name}Group"
        if group in names:
            raise UsageError(f"two classes are called {source.name}", "write their stubs to two files")
        names.append(group)
        groups.append(_Class(source, imports).group(group))
    lines = [*imports.lines(), "", *(line for group in groups for line in group)]
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    otherwise = "\n".join(f"    {name} = RoleGroup" for name in names)
    targets = " ".join(f"{source.module}:{source.name}" for source in sources)
    return f"{_HEAD.format(targets=targets)}{body.rstrip()}\nelse:\n{otherwise}\n"


class _Imports:
    """What the signatures need: for each name, the statement that brings it."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def need(self, name: str, statement: str) -> None:
        before = self._of.setdefault(name, statement)
        if before != statement:
            raise UsageError(
                f"{name!r} means two things: {before!r} and {statement!r}", "write the stubs to two files"
            )

    def lines(self) -> list[str]:
        return sorted(set(self._of.values()))


class _Options(Value):
    """What ``@trainer_invocation`` says, as far as the source tells."""

    blocking: bool | None = True
    one: bool | None = False
    pre_func: ast.expr | None = None
    post_func: ast.expr | None = None


class _Class:
    """One class of a workload, in its module."""

    def __init__(self, source: Source, imports: _Imports) -> None:
        self._source, self._imports = source, imports
        tree = ast.parse(source.text)
        self._bound = dict(_statements(tree, source))
        top = [*_top_level(tree.body)]
        self._classes = {node.name: node for node in top if isinstance(node, ast.ClassDef)}
        self._functions = {node.name: node for node in top if isinstance(node, ast.FunctionDef)}
        if source.name not in self._classes:
            raise UsageError(
                f"{source.name} is not defined in {source.module}", "name the module where it is"
            )
        body = self._classes[source.name].body
        self._inner = {node.name for node in body if isinstance(node, ast.ClassDef)}

    def group(self, group: str) -> list[str]:
        """The lines of the group's class."""
        lines = [f"class {group}(RoleGroup):", f'    """All workers whose class is {self._source.name}."""']
        for name, method in self._methods(self._source.name).items():
            if name.startswith("_") or name in OF_EVERY_WORKLOAD:
                continue
            if name in OF_EVERY_GROUP:
                lines += ["", f"    # {name} is a method of every role group: write .call({name!r}, …)."]
                continue
            parameters, result = map(ast.unparse, self._signature(method))
            lines += ["", f"    def {name}({parameters}) -> {result}: ..."]
        return [*lines, ""]

    def _methods(self, name: str, seen: tuple[str, ...] = ()) -> dict[str, _Method]:
        """The methods of a class and of its bases in the same module."""
        node = self._classes.get(name)
        if node is None or name in seen:
            return {}
        found: dict[str, _Method] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                found |= self._methods(base.id, (*seen, name))
        own = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        return found | {each.name: each for each in own if not _is_property(each)}

    def _signature(self, method: _Method) -> tuple[ast.arguments, ast.expr]:
        """What the group's method takes and returns."""
        options = _options(method)
        parameters, bound = method.args, not any(map(_is_static, method.decorator_list))
        if options.pre_func is not None:
            before = self._function(options.pre_func)
            parameters, bound = before.args if before else _anything(), False
        if options.post_func is not None:
            after = self._function(options.post_func)
            result = self._typed(after.returns if after else None)
        elif options.one is None:
            result = self._typed(None)
        else:
            result = self._typed(method.returns)
            result = result if options.one else _of("list", result)
        if options.blocking is None:
            result = self._typed(None)
        elif not options.blocking:
            self._imports.need("InvocationRef", "from unirun import InvocationRef")
            result = _of("InvocationRef", result)
        return self._parameters(parameters, bound=bound), result

    def _function(self, expression: ast.expr) -> ast.FunctionDef | None:
        return self._functions.get(expression.id) if isinstance(expression, ast.Name) else None

    def _parameters(self, found: ast.arguments, *, bound: bool) -> ast.arguments:
        positional = [*found.posonlyargs, *found.args]
        own = positional[1:] if bound else positional
        posonly = max(len(found.posonlyargs) - bound, 0)
        me = ast.arg("self", None)
        typed = [ast.arg(each.arg, self._typed(each.annotation)) for each in own]
        extra = {"vararg": found.vararg, "kwarg": found.kwarg}
        rest = {
            name: each and ast.arg(each.arg, self._typed(each.annotation)) for name, each in extra.items()
        }
        return ast.arguments(
            posonlyargs=[me, *typed[:posonly]] if posonly else [],
            args=typed[posonly:] if posonly else [me, *typed],
            vararg=rest["vararg"],
            kwonlyargs=[ast.arg(each.arg, self._typed(each.annotation)) for each in found.kwonlyargs],
            kw_defaults=[default and ast.Constant(...) for default in found.kw_defaults],
            kwarg=rest["kwarg"],
            defaults=[ast.Constant(...) for _ in found.defaults],
        )

    def _typed(self, annotation: ast.expr | None) -> ast.expr:
        """`annotation`, whose names will be there; ``Any`` when there is none."""
        if annotation is None:
            self._imports.need("Any", "from typing import Any")
            return ast.Name("Any")
        resolved = _Names(self).visit(annotation)
        assert isinstance(resolved, ast.expr)
        return resolved

    def name(self, name: str) -> ast.expr:
        """A name of an annotation, which is imported as its module does, or from there."""
        if name in self._inner:
            self.name(self._source.name)
            return ast.Attribute(ast.Name(self._source.name), name)
        if name in self._bound:
            self._imports.need(name, self._bound[name])
        elif not hasattr(builtins, name):
            self._imports.need(name, f"from {self._source.module} import {name}")
        return ast.Name(name)


class _Names(ast.NodeTransformer):
    """Sees to the names in an annotation, also in one that is written as a text."""

    def __init__(self, home: _Class) -> None:
        self._home = home

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._home.name(node.id)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if _last_name(node.value) == "Literal":
            return ast.Subscript(self.visit(node.value), node.slice)
        return ast.Subscript(self.visit(node.value), self.visit(node.slice))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        inner: ast.expr = self.visit(ast.parse(node.value, mode="eval").body)
        return inner


def _statements(tree: ast.Module, source: Source) -> Iterator[tuple[str, str]]:
    """For each name at the top level of a module, the statement that brings it into another."""
    for node in _top_level(tree.body):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    name = alias.asname or alias.name.partition(".")[0]
                    yield name, f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
            case ast.ImportFrom(module=module, names=aliases, level=level):
                home = _absolute(module or "", level, source.package)
                for alias in aliases:
                    text = f"from {home} import {alias.name}"
                    yield alias.asname or alias.name, text + (f" as {alias.asname}" if alias.asname else "")
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, f"from {source.module} import {name}"
            case ast.Assign() | ast.AnnAssign():
                for each in ast.walk(node):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield each.id, f"from {source.module} import {each.id}"


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _top_level(getattr(node, name, ()))


def _absolute(module: str, level: int, package: str) -> str:
    if not level:
        return module
    parts = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*parts, module] if module else parts)


def _options(method: _Method) -> _Options:
    for decorator in method.decorator_list:
        if isinstance(decorator, ast.Call) and _last_name(decorator.func) == "trainer_invocation":
            given = {keyword.arg: keyword.value for keyword in decorator.keywords}
            return _Options(
                _is_true(given["blocking"]) if "blocking" in given else True,
                _goes_to_one(given["target"]) if "target" in given else False,
                _function_or_none(given.get("pre_func")),
                _function_or_none(given.get("post_func")),
            )
    return _Options()


def _is_true(value: ast.expr) -> bool | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, bool) else None


def _goes_to_one(target: ast.expr) -> bool | None:
    """Whether the target is one worker; None when the source does not tell."""
    if isinstance(target, ast.List | ast.Tuple):
        return False
    value = target.value if isinstance(target, ast.Constant) else _last_name(target)
    if isinstance(value, int):
        return True
    return {"ALL": False, "RANK0": True, "ANY": True}.get(str(value))


def _function_or_none(value: ast.expr | None) -> ast.expr | None:
    return None if isinstance(value, ast.Constant) else value


def _last_name(node: ast.expr) -> str:
    """``trainer_invocation`` for ``unirun.trainer_invocation``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_property(method: _Method) -> bool:
    names = ("property", "cached_property", "setter", "deleter")
    return any(_last_name(each) in names for each in method.decorator_list)


def _is_static(decorator: ast.expr) -> bool:
    return _last_name(decorator) == "staticmethod"


def _of(container: str, inner: ast.expr) -> ast.expr:
    return ast.Subscript(ast.Name(container), inner)


def _anything() -> ast.arguments:
    args, kwargs = ast.arg("args", None), ast.arg("kwargs", None)
    return ast.arguments([], [], args, [], [], kwargs, [])
