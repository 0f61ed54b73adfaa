"""An entry that Python can run is let through, whatever its name; what it does not run is told before anything starts."""

from __future__ import annotations

import py_compile
import zipfile
from pathlib import Path

import pytest

from unirun.spec.entries import ELSEWHERE, missing_entry
from unirun.spec.job import Entry


def script(name: str, folder: Path) -> str | None:
    missing = missing_entry(Entry("script", name), str(folder), [])
    return None if missing is None else f"{missing.problem}; {missing.remedy}"


@pytest.mark.parametrize("name", ["app", "app.egg", "app.pyz", "app.zip", "app.json"])
def test_a_zip_application_may_have_any_name(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("__main__.py", "")
    assert script(name, tmp_path) is None


@pytest.mark.parametrize("name", ["mod.pyc", "app/__main__.pyc", "app/__main__.py"])
def test_compiled_code_and_a_directory_with_a_main_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "source.py").touch()
    (tmp_path / "app").mkdir()
    py_compile.compile(str(tmp_path / "source.py"), str(tmp_path / name))
    assert script(name, tmp_path) is None
    assert name == "mod.pyc" or (script("app", tmp_path), script("app/", tmp_path)) == (None, None)


def test_a_shell_script_is_told_unless_it_is_one_of_python(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("#!/bin/sh\necho python\n")
    assert script("a.sh", tmp_path) == "'a.sh' is a shell script; write --no-python ./a.sh"
    (tmp_path / "a.sh").write_text("#!/usr/bin/env python3\n")
    assert script("a.sh", tmp_path) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", "script 'empty' is a directory; name the file in it"),
        ("-", "a script is read from stdin by its name; write unirun /dev/stdin"),
        ("job.json", "'job.json' is a job file; write --config job.json"),
    ],
)
def test_what_python_does_not_run_is_told(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.json").write_text("{}")
    assert script(name, tmp_path) == says


def module(name: str, folder: Path, *, here: bool = True) -> str | None:
    missing = missing_entry(Entry("module", name), str(folder), [], here=here)
    return None if missing is None else f"{missing.problem}; {missing.remedy}"


def test_a_module_that_python_would_not_find_or_run_is_told(tmp_path: Path) -> None:
    for file in ("pkg/__init__.py", "pkg/train.py", "app/__main__.py", "eval.py", "evaluate"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("raise SystemExit('it was imported')")
    for found in ("pkg.train", "eval", "app", "json.tool", "xml.etree.ElementTree"):
        assert module(found, tmp_path) is None
    assert module("evall", tmp_path) == "there is no module 'evall'; did you mean 'eval'?"
    assert module("pkg.trian", tmp_path) == "there is no module 'pkg.trian'; did you mean 'pkg.train'?"
    assert module("eval.x", tmp_path) == "there is no module 'eval.x': eval is a module, not a package; "
    assert module("pkg", tmp_path) == "package 'pkg' has no __main__.py; name a module in it: -m pkg.…"
    told = module("no_such", tmp_path)
    assert told == f"there is no module 'no_such'; looked in {tmp_path} and on sys.path; {ELSEWHERE}"


def test_another_interpreter_may_have_other_modules(tmp_path: Path) -> None:
    assert module("no_such", tmp_path, here=False) is None
    told = module("no_such.py", tmp_path, here=False)
    assert told == "'no_such.py' is a file and no module; write -m no_such, or leave out -m"


def test_modules_below_folders_without_init_are_found(tmp_path: Path) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "one" / "two" / "train.py").write_text("class Actor: ...\ndef main(): ...\n")
    assert module("one.two.train", tmp_path) is None
    assert missing_entry(Entry("workload", "one.two.train:Actor"), str(tmp_path), []) is None
    assert module("one.two.trian", tmp_path) == (
        "there is no module 'one.two.trian'; did you mean 'one.two.train'?"
    )
    assert (
        module("one.two", tmp_path)
        == "package 'one.two' has no __main__.py; name a module in it: -m one.two.…"
    )
