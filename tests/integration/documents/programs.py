"""Programs of other systems' documents, run as they are typed there.

A document's test has the text of each program, the names that the document imports or takes for granted, and a list of
what differs: the fragment of the text, ours in its place, and the reason. A fragment that does not occur is an error,
so the list stays true.
"""

from __future__ import annotations

import itertools
import linecache
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Differs:
    """The fragment `typed` of a document, which is written as `ours`, as the `reason` says."""

    typed: str
    ours: str
    reason: str


def ours(program: str, *differences: Differs) -> str:
    """The text of a program with what differs."""
    text = textwrap.dedent(program).strip("\n")
    for each in differences:
        assert each.typed in text, f"{each.typed!r} is not in the program"
        assert each.reason
        text = text.replace(each.typed, each.ours)
    return text + "\n"


def run(program: str, names: Mapping[str, Any], *differences: Differs) -> dict[str, Any]:
    """Run a program as a script, with `names` in place of its imports. Returns its names after the end."""
    text = ours(program, *differences)
    file = f"<program {next(_numbers)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    # Functions of a script are sent by value.
    found = {**names, "__name__": "__main__"}
    exec(compile(text, file, "exec"), found)  # noqa: S102 - the programs are below
    return found
