"""The things that the documents show exist: files, commands, links. (`tests/integration/test_documents.py` runs them.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unirun
from tests.documents import (
    FILES,
    LANGUAGES,
    PAGES,
    ROOT,
    anchors,
    blocks,
    files,
    links,
    numbers_in,
    pattern,
    text_of,
    write,
)
from unirun import experiments, train
from unirun.cli import main, run
from unirun.cli.commandline import Parser, parse
from unirun.cli.commands import SUBCOMMANDS
from unirun.cli.compose import job_spec, plan_job, several_nodes
from unirun.cli.options import PLAN_OPTIONS
from unirun.collocation import local_inventory
from unirun.launcher.hostlist import parse_hosts

NOT_RUN = {
    "pip": "it would install",
    "torchrun": "tests/integration/test_one_role_is_torchrun.py and test_torchrun_plugin.py run it",
    "python": "tests/integration/test_examples.py and test_train_examples.py run the examples",
    "openssl": "tests/contract/store/certificates.py makes the same certificates",
    "etcd": "tests/contract/store/etcd_server.py starts it",
    "etcdctl": "tests/contract/store/test_etcd_security.py makes the same user",
    "srun": "tests/integration/test_slurm.py runs jobs under Slurm",
    "sqlite3": "the program need not be there",
}
"""Programs in ``sh`` blocks, and why a block with them is not looked into any further."""

FOREIGN = ("accelerate", "deepspeed", "vllm")
"""Programs that jobs in the documents run, and that need not be there."""

SHELL = ("export", "for", "done", "chmod", "(umask")
"""Words of the shell between them."""

every_block = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_the_documents_has_a_kind(page: str) -> None:
    assert {block.language for block in blocks(page)} <= {*LANGUAGES}
    pictures = [block for block in blocks(page) if block.language in ("text", "")]
    assert not [block for block in pictures if re.search(r"^(\$ |unirun [-\w])", block.text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_the_documents_has_a_target(page: str) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        path = Path(os.path.normpath((ROOT / page).parent / name)) if name else ROOT / page
        assert path.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(path.relative_to(ROOT))), f"{page}: {link}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[str] = set()
    todo = ["README.md"]
    while todo:
        page = todo.pop()
        page = f"{page}/README.md" if (ROOT / page).is_dir() else page
        if page in PAGES and page not in reached:
            reached.add(page)
            names = (link.partition("#")[0] for link in links(page))
            todo += [os.path.normpath(Path(page).parent / name) for name in names if name]
    assert {*PAGES} - reached == set()


@pytest.mark.starts_processes
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "diff" for b in blocks(page))])
def test_a_difference_that_the_documents_show_is_that_of_the_files(page: str) -> None:
    for block in blocks(page):
        if block.language == "diff":
            names = re.findall(r"^(?:---|\+\+\+) (\S+)$", block.text, re.MULTILINE)
            labels = [word for name in names for word in ("--label", name)]
            command = ["diff", "-u", *labels, *names]
            done = subprocess.run(
                command, cwd=(ROOT / page).parent, capture_output=True, text=True, check=False
            )
            assert block.text == done.stdout, f"{block}: {' '.join(command)}"


PROSE = (*(page for page in PAGES if not page.startswith(("CHANGELOG", "docs/api/"))), "tests/README.md")
"""The pages that are written by hand."""

MAX_WORDS = 120
"""In a paragraph or an item of a list."""

MAX_SENTENCES = 2
"""In a cell of a table."""


@pytest.mark.parametrize("page", PROSE)
def test_paragraphs_of_the_documents_are_short(page: str) -> None:
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|^(?=\|)", prose(page), flags=re.MULTILINE)
    long = [part for part in parts if len(part.split()) > MAX_WORDS and not part.startswith("|")]
    assert not long, f"{page}: {long[0]:.200}"


@pytest.mark.parametrize("page", PROSE)
def test_cells_of_tables_in_the_documents_are_short(page: str) -> None:
    rows = re.findall(r"^\|(.*)\|$", prose(page), flags=re.MULTILINE)
    long = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row) if sentences(cell) > MAX_SENTENCES]
    assert not long, f"{page}: {long[0]:.200}"


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def sentences(cell: str) -> int:
    """The number of sentences in a cell; a semicolon ends one, too."""
    text = re.sub(r"`[^`]*`", "code", cell).strip().rstrip(".")
    return 1 + len(re.findall(r"[.!?;](?=\s)", text))


def test_a_name_stands_for_one_file_in_all_of_docs() -> None:
    names = [
        block.name for block in every_block if block.language in FILES and block.page.startswith("docs/")
    ]
    assert len(names) == len({*names})


@pytest.mark.starts_processes
def test_the_reference_is_that_of_the_docstrings(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs/reference.py"), str(tmp_path)], check=True, timeout=60)
    assert texts_of(tmp_path) == texts_of(ROOT / "docs/api"), "make docs writes it"


def texts_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.starts_processes
def test_the_pictures_are_those_that_the_commands_draw(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs/pictures.py"), str(tmp_path)], check=True, timeout=60)
    drawn = texts_of(tmp_path)
    assert {*drawn} == {"plan.svg", "ppo.svg", "processes.svg", "starts.svg", "status.svg"}
    for name, picture in drawn.items():
        assert picture == (ROOT / "docs/pictures" / name).read_text(), f"{name}: make docs draws it"


def test_the_bars_of_the_start_times_have_the_figures_of_the_readme() -> None:
    picture = (ROOT / "docs/pictures/starts.svg").read_text()
    assert re.findall(r"1/\d+", picture) == re.findall(r"1/\d+", text_of("README.md"))[:2]


@pytest.mark.parametrize("page", PAGES)
def test_a_picture_has_a_text_in_its_place(page: str) -> None:
    assert all(words.strip() for words in re.findall(r"!\[([^\]]*)\]\(", text_of(page)))


@pytest.mark.starts_processes
def test_the_table_of_sizes_has_the_packages_that_are_installed() -> None:
    """Sizes, versions and the dependencies of other projects may be others."""
    command = [sys.executable, str(ROOT / "docs/sizes.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    variable = r" and \d+ others?|\d[\w.+]*( MB)?"
    shown = {re.sub(variable, "", line) for line in text_of("docs/install.md").splitlines()}
    assert [line for line in done.stdout.splitlines() if re.sub(variable, "", line) not in shown] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(texts_of(ROOT / "docs/api").values())
    headings = set(re.findall(r"^### `(\w+)`$", text, re.MULTILINE))
    others = set(re.findall(r"^`(\w+)` is another name for it", text, re.MULTILINE))
    assert {*unirun.__all__, *train.__all__, *experiments.__all__} <= headings | others


@pytest.mark.parametrize("page", PAGES)
def test_every_file_shown_in_the_documents_is_used_by_a_command(page: str) -> None:
    commands = "".join(block.text for block in every_block if block.language in ("console", "sh"))
    others = "".join(files(page).values())
    for block in blocks(page):
        if block.language in FILES:
            module = f"{block.name.removesuffix('.py')}:"
            assert block.name in commands or module in commands or module in others, block


@pytest.mark.parametrize("page", PAGES)
def test_a_command_in_the_documents_that_is_not_run_is_valid(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(page, tmp_path)
    if not page.startswith("docs/"):
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UNIRUN_STORE", raising=False)
    for name in FOREIGN:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for block in blocks(page):
        for program, *args in block.commands() if block.language == "sh" else ():
            if program == "cd":
                os.chdir(args[0])
            elif program == "make":
                assert f"\n{args[0]}:" in (ROOT / "Makefile").read_text()
            elif program == "unirun":
                parsed(args, monkeypatch)
            else:
                why = NOT_RUN.get(program) or program in SHELL
                assert why, f"{block}: {program} is not looked into, and no reason is given"


class Parsed(Exception):
    """The words of a command were understood."""


def parsed(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a command of unirun apart, as it does itself; plan a job, and start nothing."""
    if args[0] == "plan":
        plan_job(parse(args[1:], "unirun plan", PLAN_OPTIONS))
    elif args[0] not in SUBCOMMANDS and "--slurm" in args:
        assert run.main(["--dry-run", *args]) == 0
    elif args[0] not in SUBCOMMANDS:
        line = parse(args)
        if several_nodes(line.options):
            # What the hosts have is not known here.
            job_spec(line, local_inventory(), nodes=(2, 2))
            parse_hosts(line.options.get("hosts", "h1"))
        else:
            plan_job(line)
    else:
        plain = Parser.parse_known_args

        def parse_known_args(parser: Parser, *words: Any) -> Any:
            options, rest = plain(parser, *words)
            if not rest:
                raise Parsed
            return options, rest

        with monkeypatch.context() as patch:
            patch.setattr(Parser, "parse_known_args", parse_known_args)
            with pytest.raises(Parsed):
                main(args)


@pytest.mark.parametrize(
    ("page", "least"), [("docs/from-ray.md", 10), ("docs/from-dlrover.md", 1), ("docs/from-realhf.md", 1)]
)
def test_each_pattern_of_another_system_is_a_short_program(page: str, least: int) -> None:
    programs = [block for block in blocks(page) if block.language in FILES]
    assert len(programs) >= least
    for program in programs:
        lines = [line for line in program.text.splitlines() if line.strip()]
        assert len(lines) <= 25, f"{program}: {len(lines)} lines that are not blank"


def test_document_output_of_unirun_is_compared_without_figures_and_that_of_workers_literally() -> None:
    shown = "rollout:1  serving  …  10558  0  …  running (generation 0)"
    real = "rollout:1  serving  vm    77  0            184 MB  0.6 s  running (generation 1)"
    match = pattern(shown).fullmatch(real)
    assert match
    assert dict(zip(numbers_in(shown), match.groups(), strict=True))["10558"] == "77"
    assert pattern("job search-4ee389: running, 4 s").fullmatch("job search-0afe11: running, 0.2 s")
    assert pattern("[actor:0] step 5").fullmatch("[actor:0]  step 5")
    assert not pattern("[actor:0] step 5").fullmatch("[actor:0] step 6")
    assert not pattern("a.b").fullmatch("axb")


def test_the_files_that_the_map_names_are_there() -> None:
    text = (ROOT / "docs/map.md").read_text()
    named = set(re.findall(r"`([a-z_]+/[\w/]+(?:\.py|/))`", text))
    assert len(named) > 50
    assert {
        name for name in named if not (ROOT / "unirun" / name).exists() and not (ROOT / name).exists()
    } == set()


def test_the_files_that_the_architecture_names_are_there() -> None:
    """Some by their bare names, where the room is plain from the text."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", text)}
    there = {
        path.name
        for folder in ("unirun", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(named) > 50
    assert named - there == set()


def test_each_helper_of_the_tests_is_in_their_readme_and_exists() -> None:
    folder = Path(ROOT, "tests")
    helpers = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if not path.name.startswith(("test_", "conftest", "__init__")) and "scripts" not in path.parts
    }
    helpers -= {"mutants/run.py", "mutants/plugin.py", "mutants/planted.py", "gpu.py"}
    (_, table) = Path(folder, "README.md").read_text().split("\n## Helpers\n")
    named = re.findall(r"`([\w/]+\.py)`", "\n".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))
    assert len(named) == len({*named})
    assert helpers == {*named}, "a helper is missing in tests/README.md, or one that it names does not exist"
