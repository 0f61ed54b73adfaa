"""The existence of a class is told from its source; nothing is imported."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.spec.entries import missing_name

BOMB = "raise SystemExit('this was imported')\n"


def write(folder: Path, **files: str) -> None:
    """``write(tmp, pkg__mod="…")`` makes pkg/mod.py; packages get an ``__init__.py``."""
    for name, text in files.items():
        *packages, module = name.split("__")
        for depth in range(1, len(packages) + 1):
            package = folder.joinpath(*packages[:depth])
            package.mkdir(exist_ok=True)
            (package / "__init__.py").touch()
        folder.joinpath(*packages, f"{module}.py").write_text(text)


@pytest.mark.parametrize(
    "binding",
    [
        "class Actor: ...",
        "Actor = type('Actor', (), {})",
        "Actor: type = make()",
        "A, (Actor, *rest) = many()",
        "from elsewhere import Actor",
        "from elsewhere import Other as Actor",
        "import Actor",
        "if True:\n    class Actor: ...",
        "try:\n    class Actor: ...\nexcept ImportError:\n    pass",
        "with x as Actor: ...",
        "for Actor in x: ...",
        "(Actor := make())",
        "def set():\n    global Actor\n    Actor = 1",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "globals().update(more)",
    ],
)
def test_whatever_binds_the_name_will_do(tmp_path: Path, binding: str) -> None:
    write(tmp_path, bomb=BOMB + binding)
    assert missing_name("bomb:Actor", "class", [str(tmp_path)]) is None
    assert "bomb" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f():\n    class Actor: ...",
        "class Outer:\n    class Actor: ...",
        "[Actor for Actor in x]",
        "lambda Actor: 1",
        "Actor.x = 1",
    ],
)
def test_what_is_bound_elsewhere_will_not(tmp_path: Path, text: str) -> None:
    write(tmp_path, ppo=text)
    found = missing_name("ppo:Actor", "class", [str(tmp_path)])
    assert found is not None
    assert "has no class 'Actor'" in found.problem


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        ("ppo:Actr", "module ppo ({tmp}/ppo.py) has no class 'Actr'", "did you mean 'Actor'?"),
        ("ppo:Unlike", "has no class 'Unlike'", "its classes: Actor"),
        ("pppo:Actor", "there is no module 'pppo'", "did you mean 'ppo'?"),
        ("unheard_of:Actor", "there is no module 'unheard_of'", "looked in {tmp} and on sys.path"),
        ("pkg.mood:Actor", "there is no module 'pkg.mood'", "did you mean 'pkg.mod'?"),
        ("pkg.far.off:Actor", "there is no module 'pkg.far'", "looked in {tmp}/pkg"),
        ("ppo.deep:Actor", "ppo is a module, not a package", ""),
        ("ppo:make", "'make' in module ppo ({tmp}/ppo.py) is a function", "name a class"),
        ("broken:Actor", "broken.py, line 1 is no Python", "correct it first"),
        ("bytes:Actor", "bytes.py is no Python|bytes.py, line 1 is no Python", "correct it first"),
        ("folder:Actor", "folder is a folder without __init__.py", "name the module in it"),
        ("ppo", "'ppo' is not of the form pkg.mod:Class", "name the module"),
        ("ppo:Outer.Inner", "is not of the form pkg.mod:Class", "name the module"),
        (":Actor", "is not of the form", "name the module"),
        ("a..b:C", "is not of the form", "name the module"),
    ],
)
def test_what_is_not_there_is_told_with_a_remedy(
    tmp_path: Path, target: str, problem: str, remedy: str
) -> None:
    write(tmp_path, ppo="class Actor: ...\ndef make(): ...", pkg__mod="class Actor: ...", broken="class (")
    (tmp_path / "bytes.py").write_bytes(b"\0")
    (tmp_path / "folder").mkdir()
    found = missing_name(target, "class", [str(tmp_path)])
    assert found is not None
    assert any(each.format(tmp=tmp_path) in found.problem for each in problem.split("|")), found
    assert remedy.format(tmp=tmp_path) in found.remedy


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        ("ppo:main", "", ""),
        ("ppo:mian", "module ppo ({tmp}/ppo.py) has no function 'mian'", "did you mean 'main'?"),
        ("ppo:Unlike", "has no function 'Unlike'", "its functions: main"),
        ("ppo:Actor", "'Actor' in module ppo ({tmp}/ppo.py) is a class", "name a function"),
        ("ppo", "'ppo' is not of the form pkg.mod:function", "name the module, a colon, the function"),
    ],
)
def test_a_function_is_looked_for_like_a_class(
    tmp_path: Path, target: str, problem: str, remedy: str
) -> None:
    write(tmp_path, ppo="class Actor: ...\ndef main(): ...")
    found = missing_name(target, "function", [str(tmp_path)])
    assert (found is None) == (not problem)
    if found is not None:
        assert problem.format(tmp=tmp_path) in found.problem
        assert remedy in found.remedy


def test_a_class_of_a_package_is_in_its_init(tmp_path: Path) -> None:
    write(tmp_path, pkg__mod="class Inner: ...")
    (tmp_path / "pkg" / "__init__.py").write_text("class Outer: ...")
    assert missing_name("pkg:Outer", "class", [str(tmp_path)]) is None
    assert missing_name("pkg.mod:Inner", "class", [str(tmp_path)]) is None
    assert missing_name("pkg:Inner", "class", [str(tmp_path)]) is not None


def test_a_module_of_a_namespace_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "mod.py").write_text("class Actor: ...")
    assert missing_name("space.mod:Actor", "class", [str(tmp_path)]) is None
    assert missing_name("space.mod:Actr", "class", [str(tmp_path)]) is not None


def test_what_has_no_source_is_taken_on_trust(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("zipped.py", "class Actor: ...")
    assert missing_name("zipped:Anything", "class", [str(tmp_path / "code.zip")]) is None
    assert missing_name("math:Anything", "class", [str(tmp_path)]) is None


def test_the_first_folder_wins_over_sys_path(tmp_path: Path) -> None:
    write(tmp_path, ppo="class Actor: ...")
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", ppo="class Rollout: ...")
    folders = [str(tmp_path / "other"), str(tmp_path)]
    assert missing_name("ppo:Rollout", "class", folders) is None
    assert missing_name("ppo:Actor", "class", folders) is not None
    assert missing_name("json:JSONDecoder", "class", folders) is None


@examples(150)
@given(
    target=st.text("ab.:_9\0/\ud800é ", max_size=9) | st.from_regex(r"[a-z.]{1,5}:[A-Z]\w{0,4}"),
    text=st.text("class A:\n pdef()=1'\0é", max_size=20),
)
def test_any_target_and_any_source_give_an_answer(tmp_path: Path, target: str, text: str) -> None:
    (tmp_path / "a.py").write_text(text)
    for each in (target, "a:A"):
        found = missing_name(each, "class", [str(tmp_path)])
        assert found is None or found.problem
