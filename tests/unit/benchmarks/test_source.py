"""Counts over the source of a package, here a small one with a room of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.source import (
    Module,
    circles,
    code_lines,
    defined_twice,
    imports,
    modules,
    single_importers,
    unclear_times,
)

FILES = {
    "__init__.py": "",
    "wire/__init__.py": "from house.wire.frames import Frame",
    "wire/frames.py": "class Frame: ...\nclass _Head: ...",
    "wire/codec.py": "import json\nfrom house.wire import Frame\nclass _Head: ...",
    "roles/group.py": "from house.roles.call import Call\nclass Frame: ...",
    "roles/call.py": "def late():\n    from house.roles import types\nclass Call:\n    class Frame: ...",
    "roles/types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.roles.group",
    "roles/lonely.py": "from house.roles.group import Frame\nfrom house.wire import codec",
}


@pytest.fixture
def house(tmp_path: Path) -> list[Module]:
    for name, text in FILES.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return modules(tmp_path / "house")


def test_every_module_has_its_name_and_its_room(house: list[Module]) -> None:
    assert [(module.name, module.room) for module in house][:3] == [
        ("house", ""),
        ("house.roles.call", "roles"),
        ("house.roles.group", "roles"),
    ]
    assert len(house) == len(FILES)


def test_lines_with_code_are_counted_without_blanks_comments_and_docstrings() -> None:
    text = '"""One.\n\nTwo."""\n\n# three\nA = [  # four\n    1,\n]\n"""Five."""\nB = """six\n\nseven"""\n'
    module = Module("house", text)
    assert (module.lines, module.filled_lines, code_lines(module)) == (12, 9, 6)


def test_every_class_is_counted_also_one_in_a_class(house: list[Module]) -> None:
    classes = {module.name: module.classes for module in house}
    assert sorted(classes["house.roles.call"]) == ["Call", "Frame"]


def test_a_name_that_two_modules_define_is_found_with_both(house: list[Module]) -> None:
    frame = {"Frame": ["house.roles.group", "house.wire.frames"]}
    assert defined_twice(house, public=True) == frame
    assert defined_twice(house, public=False) == {**frame, "_Head": ["house.wire.codec", "house.wire.frames"]}


def test_an_import_counts_wherever_it_stands_and_leads_to_a_module(house: list[Module]) -> None:
    found = imports(house)
    assert found["house.roles.call"] == {"house.roles.types"}
    assert found["house.roles.types"] == {"house.roles.group"}
    assert found["house.wire.codec"] == {"house.wire"}


def test_a_circle_is_one_of_late_imports_and_of_types_too(house: list[Module]) -> None:
    assert circles(house) == [["house.roles.call", "house.roles.group", "house.roles.types"]]


def test_imports_between_rooms_make_no_circle() -> None:
    one, two = Module("house.a.x", "import house.b.y"), Module("house.b.y", "import house.a.x")
    assert circles([one, two]) == []


def test_a_small_module_with_one_importer_is_found_with_it(house: list[Module]) -> None:
    assert single_importers(house) == {
        "house.roles.call": "house.roles.group",
        "house.roles.types": "house.roles.call",
        "house.wire.codec": "house.roles.lonely",
        "house.wire.frames": "house.wire",
    }


def test_a_module_of_many_lines_stands_alone() -> None:
    large, user = Module("house.a.large", "x = 1\n" * 110), Module("house.a.user", "import house.a.large")
    assert single_importers([large, user]) == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('AGAIN = 2.0\n"""Seconds until the next attempt."""', True),
        ('_LONG: float = 3 * 60\n"""A job is given up after so many seconds."""', True),
        ('RETRY_INTERVAL = 2.0\n"""Seconds until the next attempt."""', False),
        ('SECONDS = 2.0\n"""Seconds."""', False),
        ('WORDS = "again"\n"""Said for some seconds."""', False),
        ('MAX_STREAMS = 64\n"""Streams at a time. Others wait some seconds."""', False),
        ('again = 2.0\n"""Seconds."""', False),
        ("AGAIN = 2.0", False),
    ],
)
def test_a_constant_of_time_is_named_by_purpose_or_unit(text: str, found: bool) -> None:
    assert bool(unclear_times([Module("house", text)])) == found
