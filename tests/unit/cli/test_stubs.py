"""Stubs say what a role group takes and gives; a type checker holds users to it."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from pathlib import Path

import pytest
from mypy import api

import unirun
from tests.unit.cli.shell import call
from unirun.roles import BaseWorkload, RoleGroup
from unirun.spec.stubs import OF_EVERY_GROUP, OF_EVERY_WORKLOAD

ALGO = """
    from __future__ import annotations
    raise SystemExit("this was imported")
    import numpy as np
    import collections.abc
    from collections.abc import Callable, Sequence
    from typing import TYPE_CHECKING, Any, Literal
    from unirun import BaseWorkload, trainer_invocation
    import unirun as u
    if TYPE_CHECKING:
        from pathlib import Path

    Batch = dict[str, list[float]]

    class Step:
        number: int

    def first(results: list[float]) -> float:
        return results[0]

    def prepare(path: Path, *, limit: int = 3) -> tuple[Batch]:
        raise NotImplementedError

    class Base(BaseWorkload):
        def inherited(self, x: int) -> int:
            return x

        def replaced(self, x: int) -> int:
            return x

    class Actor(Base):
        class Inner: ...

        @trainer_invocation()
        def update(self, batch: Batch, lr: float = 1e-3, /, *, clip: bool = True) -> float:
            return lr

        def plain(self, step: "Step", more: Sequence[Step] | None = None) -> "Step":
            return step

        def untyped(self, x, *args, y=1, **kwargs):
            return x

        @trainer_invocation(target="RANK0")
        def rank0(self) -> int:
            return 1

        @u.trainer_invocation(target="RANK0")
        def save(self, path: Path) -> None: ...

        @u.trainer_invocation(target=u.roles.ANY)
        def any_one(self, kind: Literal["a", "b"]) -> np.ndarray[Any, Any]:
            raise NotImplementedError

        @trainer_invocation(target=2)
        def second(self) -> Inner:
            raise NotImplementedError

        @trainer_invocation(target=[0, 1], blocking=False)
        def some(self) -> collections.abc.Iterator[int]:
            raise NotImplementedError

        @trainer_invocation(blocking=False, target="RANK0")
        def later(self) -> int:
            return 1

        @trainer_invocation(post_func=first)
        def reduced(self) -> float:
            return 1.0

        @trainer_invocation(post_func=lambda found: found[0])
        def reduced_somehow(self) -> float:
            return 1.0

        @trainer_invocation(pre_func=prepare)
        def prepared(self, batch: Batch) -> int:
            return 1

        @trainer_invocation(pre_func=print)
        def prepared_somehow(self, batch: Batch) -> int:
            return 1

        async def slow(self) -> int:
            return 1

        @staticmethod
        def static(x: int) -> int:
            return x

        @classmethod
        def of_class(cls, x: int) -> int:
            return x

        @property
        def hidden(self) -> int:
            return 1

        def replaced(self, y: str) -> str:
            return y

        def setup(self) -> None: ...
        def _private(self) -> None: ...
        def count(self) -> int:
            return 1
"""


@pytest.fixture
def algo(scripts: Path) -> Path:
    """The working directory, with algo.py in it."""
    (scripts / "algo.py").write_text(textwrap.dedent(ALGO))
    return scripts


@pytest.fixture
def stubs(algo: Path) -> Path:
    """Stubs of algo.py, written to a file."""
    assert call("stubs", "algo:Actor", "ppo:Rollout", "-o", "groups.py") == 0
    return algo / "groups.py"


def test_results_and_parameters_follow_from_the_decorator(stubs: Path) -> None:
    text = stubs.read_text()
    methods = [line.strip() for line in text.splitlines() if line.strip().startswith("def ")]
    assert methods == [
        "def inherited(self, x: int) -> list[int]: ...",
        "def replaced(self, y: str) -> list[str]: ...",
        "def update(self, batch: Batch, lr: float=..., /, *, clip: bool=...) -> list[float]: ...",
        "def plain(self, step: Step, more: Sequence[Step] | None=...) -> list[Step]: ...",
        "def untyped(self, x: Any, *args: Any, y: Any=..., **kwargs: Any) -> list[Any]: ...",
        "def save(self, path: Path) -> None: ...",
        "def any_one(self, kind: Literal['a', 'b']) -> np.ndarray[Any, Any]: ...",
        "def second(self) -> Actor.Inner: ...",
        "def some(self) -> InvocationRef[list[collections.abc.Iterator[int]]]: ...",
        "def later(self) -> InvocationRef[int]: ...",
        "def reduced(self) -> float: ...",
        "def reduced_somehow(self) -> Any: ...",
        "def prepared(self, path: Path, *, limit: int=...) -> list[int]: ...",
        "def prepared_somehow(self, *args: Any, **kwargs: Any) -> list[int]: ...",
        "def slow(self) -> list[int]: ...",
        "def static(self, x: int) -> list[int]: ...",
        "def of_class(self, x: int) -> list[int]: ...",
    ]
    assert "# count is a method of every role group: write .call('count', …)." in text
    assert "from algo import Batch" in text
    assert "class RolloutGroup(RoleGroup):" in text


def test_stubs_are_a_module_that_brings_nothing(stubs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(stubs.parent)
    before = {*sys.modules}
    try:
        groups = importlib.import_module("groups")
        assert groups.ActorGroup is unirun.RoleGroup
        assert "algo" not in {*sys.modules} - before
    finally:
        del sys.modules["groups"]


def test_a_type_checker_takes_them_and_finds_mistakes(stubs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # mypy does not see what an editable install finds.
    monkeypatch.setenv("MYPYPATH", str(Path(unirun.__file__).parents[1]))
    # What follows `raise` is unreachable, so mypy would not look at it.
    algo = stubs.parent / "algo.py"
    algo.write_text(algo.read_text().replace('raise SystemExit("this was imported")\n', ""))
    (stubs.parent / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    (stubs.parent / "trainer.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path
            from groups import ActorGroup, RolloutGroup
            from unirun import BaseTrainer

            class T(BaseTrainer):
                RG_ACTOR: ActorGroup
                RG_ROLLOUT: RolloutGroup

                def init(self) -> None: ...

                def fit(self) -> float:
                    losses: list[float] = self.RG_ACTOR.update({"a": [1.0]}, clip=False)
                    self.RG_ACTOR.save(Path("x"))
                    later: int = self.RG_ACTOR.later().result()
                    self.RG_ACTOR[1].update({})
                    self.RG_ACTOR.update(3)
                    wrong: int = self.RG_ACTOR.prepared(Path("x"), limit=3)
                    return losses[later]
            """
        )
    )
    out, err, _ = api.run(["--config-file", "mypy.ini", "--cache-dir", "cache", "groups.py", "trainer.py"])
    errors = [line for line in out.splitlines() if line.startswith(("groups.py", "trainer.py"))]
    assert len(errors) == 2, out + err
    assert (
        'trainer.py:17: error: Argument 1 to "update" of "ActorGroup" has incompatible type "int"'
        in errors[0]
    )
    assert (
        'trainer.py:18: error: Incompatible types in assignment (expression has type "list[int]"' in errors[1]
    )


def test_a_package_has_its_relative_imports_made_absolute(
    scripts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scripts / "deep" / "er").mkdir(parents=True)
    (scripts / "deep" / "__init__.py").touch()
    (scripts / "deep" / "er" / "__init__.py").write_text(
        "from . import two\nclass A:\n def f(self, x: two.X): ..."
    )
    (scripts / "deep" / "er" / "one.py").write_text(
        "from .two import X\nfrom .. import Y as Z\nclass B:\n def f(self, x: X, y: Z) -> Z: ..."
    )
    (scripts / "deep" / "er" / "two.py").touch()
    assert call("stubs", "deep.er:A", "deep.er.one:B") == 0
    text = capsys.readouterr().out
    assert "from deep.er import two\n" in text
    assert "from deep.er.two import X\n" in text
    assert "from deep import Y as Z\n" in text
    ast.parse(text)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["ppo:Actr"], r"unirun: ppo:Actr: module ppo (*/ppo.py) has no class 'Actr'; did you mean 'Actor'?"),
        (["ppo"], "is not of the form pkg.mod:Class"),
        (["math:Actor"], "module math has no source"),
        (["ppo:Actor", "other:Actor"], "two classes are called Actor; write their stubs to two files"),
        (
            ["other:Mine", "clash:Its"],
            "'Batch' means two things: 'from a import Batch' and 'from b import Batch'",
        ),
        (["other:Borrowed"], "Borrowed is not defined in other; name the module where it is"),
        (["ppo:Actor", "-o", "no/such/folder.py"], "no/such/folder.py cannot be written: no such file"),
        ([], "the following arguments are required"),
    ],
)
def test_what_cannot_be_written_is_told(
    scripts: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    method = "def f(self, x: Batch): ..."
    (scripts / "other.py").write_text(
        f"from a import Batch, Borrowed\nclass Actor: ...\nclass Mine:\n {method}"
    )
    (scripts / "clash.py").write_text(f"from b import Batch\nclass Its:\n {method}")
    assert call("stubs", *argv) == 2
    error = capsys.readouterr().err
    before, _, after = says.partition("*")
    assert before in error
    assert after in error
    assert len(error.splitlines()) == 1


def test_names_that_groups_and_workloads_have_are_known() -> None:
    public = {name for name in dir(RoleGroup) if not name.startswith("_")}
    assert public == OF_EVERY_GROUP
    assert {name for name in dir(BaseWorkload) if not name.startswith("_")} == OF_EVERY_WORKLOAD
