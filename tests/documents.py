"""The documents: their fenced blocks and their links.

The language of a block says what becomes of it:

=============  ==================================================================================================
python, yaml   a file; the first line is its name, ``# train.py``
console        ``$ command`` and what it prints; run, in a folder with the files of the page
sh             commands that are not run: those of unirun are parsed, and the jobs among them planned
diff           what ``diff -u`` says of two files in the folder of the page
text, none     a picture, or output of something that is not run
py             a signature below docs/api, which `docs/reference.py` writes
=============  ==================================================================================================
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

PAGES = tuple(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "docs/api/*.md", "examples/*/README.md")
    for path in sorted(ROOT.glob(pattern))
)

FILES = ("python", "yaml")
LANGUAGES = (*FILES, "console", "sh", "diff", "text", "", "py")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of `page`; `line` is that of its first fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def name(self) -> str:
        """The name of the file that it is."""
        found = re.match(r"# ([\w/.]+\.(?:py|yaml))\b", self.text)
        assert found, f"{self}: the first line of a {self.language} block is a comment with the file's name"
        return found[1]

    def commands(self) -> list[list[str]]:
        """The words of each command of an ``sh`` block, without variables that are set in front of it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [_without_variables(each) for each in words if each]


@dataclass(frozen=True)
class Step:
    """One command of a ``console`` block, and the lines that it is said to print."""

    command: str
    shown: tuple[str, ...]


def text_of(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = text_of(page)
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in _FENCE.finditer(text)
    ]


def files(page: str) -> dict[str, str]:
    """The files that a page speaks of, by name: its own, and under ``docs`` those of its neighbours."""
    neighbours = [each for each in PAGES if each.startswith("docs/")] if page.startswith("docs/") else []
    return {
        block.name: block.text
        for each in (*neighbours, page)
        for block in blocks(each)
        if block.language in FILES
    }


def write(page: str, folder: Path) -> None:
    """Put the files that a page speaks of into `folder`; a script of the reader's own is empty."""
    for name, text in ({"serving/serve.py": ""} | files(page)).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def steps(block: Block) -> Iterator[Step]:
    """The commands of a ``console`` block."""
    first, *rest = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not first, f"{block}: a console block begins with a command, after a $"
    for each in rest:
        command, _, shown = each.replace("\\\n", " ").partition("\n")
        yield Step(command, tuple(line for line in shown.splitlines() if line.strip()))


def pattern(line: str) -> re.Pattern[str]:
    """The pattern of the real lines that are shown as `line`.

    ``…`` stands for anything, and spaces for any number of spaces. What a worker has printed (``[actor:0] step 3``) is
    compared as it stands. What unirun tells has pids, sizes, times and job ids in it, which are others each time; each
    number without a unit is a group of the pattern.
    """
    wild = r"(?P<any>…)|(?P<space>\s+)"
    if not line.startswith("["):
        wild = (
            r"(?P<measured>[\d.]+ (?:[kMG]?B|µs|ms|s|min)\b)|(?P<id>(?<=[a-z]-)[0-9a-f]{6}\b)|(?P<number>[\d.]+)|"
            + wild
        )
    real = {
        "any": ".*?",
        "space": r"\s+",
        "measured": r"[\d.]+ (?:[kMG]?B|µs|ms|s|min)",
        "id": "[0-9a-f]{6}",
        "number": r"([\d.]+)",
    }
    line = line.strip()
    parts, end = [], 0
    for found in re.finditer(wild, line):
        parts += [re.escape(line[end : found.start()]), real[str(found.lastgroup)]]
        end = found.end()
    return re.compile("".join([*parts, re.escape(line[end:])]))


def numbers_in(line: str) -> list[str]:
    """The groups of `pattern`, as they are shown."""
    match = pattern(line).fullmatch(line.strip())
    assert match, line
    return [*match.groups()]


def links(page: str) -> list[str]:
    """The links of a page, but for those to other sites."""
    return [each for each in _LINK.findall(text_of(page)) if "://" not in each]


def anchors(page: str) -> set[str]:
    """The places in a page that a link can name, as GitHub makes them of headings, and those that the page sets."""
    text = _FENCE.sub("", text_of(page))
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)
    }
    return headings | set(re.findall(r'<a id="([^"]+)"', text))


def _without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words
