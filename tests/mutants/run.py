"""Mutates one room and says which mutants no test has noticed.

mutmut does the work, in a directory of its own for each room (``.mutants/ROOM``). ``rooms.toml`` says what is mutated and
which tests have to notice. A mutant that behaves as the original does is listed, with the reason, in ``equivalent.toml``.
mutmut mutates functions without decorators. What is only said to people is left alone: it is no behaviour.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import random
import re
import resource
import shutil
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENOUGH = 0.9
"""The share of a room's mutants, without the equivalent ones, that tests have to notice."""

PYTEST = (
    *("-p", "tests.mutants.plugin", "--hypothesis-profile=mutants", "--timeout=40"),
    *("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"),
)
"""A thread of a test that has failed may raise when pytest ends, which mutmut takes for a run that could not begin."""

SETTINGS = {
    "source_paths": "unirun",
    # Words for people: of errors, faults of a URL, and the log. SQL has no case of its own.
    "do_not_mutate_patterns": "\n".join(
        [
            "",
            r"\braise \w+",
            r"\breturn (AuthError|ConnectionLost|Exposure|Fenced|Store(Away|Broken|Refused)|UsageError)\(",
            r"\bFault\(",
            r"\blogger\.",
            '"(SELECT|INSERT|DELETE|UPDATE|PRAGMA|BEGIN|COMMIT)',
        ]
    ),
    "pytest_add_cli_args": "\n".join(["", *PYTEST]),
    "process_isolation": "forkserver",
    "timeout_constant": "5.0",
    "timeout_multiplier": "5.0",
    "use_git_change_detection": "false",
}

NOTICED = {"killed", "timeout", "segfault"}
NOT_RUN = 255
"""The exit code of mutmut's worker when pytest could not begin, which mutmut takes for a time-out."""


def prepare(room: str, fresh: bool) -> None:
    """Enter the directory of `room`, with links to what mutmut copies from, and its configuration."""
    place = ROOT / ".mutants" / room
    place.mkdir(parents=True, exist_ok=True)
    for name in ("unirun", "tests", "pyproject.toml"):
        if not (place / name).is_symlink():
            (place / name).symlink_to(ROOT / name)
    of_room = tomllib.loads((HERE / "rooms.toml").read_text())[room]
    config = ConfigParser(interpolation=None)
    config["mutmut"] = SETTINGS | {
        "only_mutate": "\n".join(["", *of_room["mutate"]]),
        "do_not_mutate": "\n".join(["", "*/__main__.py", *of_room.get("leave", [])]),
        "pytest_add_cli_args_test_selection": "\n".join(["", *of_room["tests"]]),
    }
    with (place / "setup.cfg").open("w") as file:
        config.write(file)
    os.chdir(place)
    shutil.rmtree("mutants" if fresh else "mutants/tests", ignore_errors=True)
    # Tests compare tables of the documents with the code.
    Path("mutants").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        Path("mutants/docs").symlink_to(ROOT / "docs")
    # Processes that tests start find the mutated package too.
    os.environ["PYTHONPATH"] = str(place / "mutants")
    # A mutant may write to another home than its test wants.
    os.environ["UNIRUN_HOME"] = str(place / "home")
    # A mutant that needs more histories than these to be noticed is not looked for well.
    os.environ.setdefault("UNIRUN_SIM_SEEDS", "100")


def change(name: str, path: Path) -> tuple[str, str]:
    """The lines that the mutant `name` takes away, and those that it puts there."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    removed, added = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return removed, added


STRICT = re.compile(r",\s*(strict=\w+)?\)")
"""The end of a call of `zip` that makes sure that its arguments are equally long: they are, so nothing changes without it."""


def is_equivalent(name: str, removed: str, added: str, known: list[dict[str, str]]) -> bool:
    """Return True if a reason is known why the mutant behaves as the original does."""
    function = name.partition("__mutmut_")[0]
    return STRICT.sub(")", removed) == STRICT.sub(")", added) or any(
        entry["in"] == function and entry["from"] in removed and entry.get("to", added) in added
        for entry in known
    )


def minutes() -> float:
    """The minutes of processor time of this process and of all that have ended below it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) / 60


def main() -> int:
    """Exit code 1 when fewer than `ENOUGH` of the mutants are noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("room")
    parser.add_argument("--sample", type=int, help="test only so many mutants, drawn with a fixed seed")
    parser.add_argument("--only", default="*", help="a pattern for the names of mutants")
    parser.add_argument(
        "--again", action="store_true", help="test only those that were not noticed last time"
    )
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()

    prepare(chosen.room, fresh=not chosen.again)
    # They read their configuration from the directory that they are used in.
    from mutmut import __main__ as mutmut
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import copy_src_dir

    def results() -> dict[str, tuple[Path, str]]:
        found, _ = mutmut.collect_source_file_mutation_data(mutant_names=())
        return {
            name: (Path(data.path), "not run" if code == NOT_RUN else status_by_exit_code[code])
            for data, name, code in found
            if fnmatch.fnmatch(name, chosen.only)
        }

    copy_src_dir()
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        mutmut.create_mutants(chosen.jobs)
    known = tomllib.loads((HERE / "equivalent.toml").read_text()).get(chosen.room, [])
    names = [name for name, (_, status) in sorted(results().items()) if status not in NOTICED]
    if chosen.sample is not None:
        names = sorted(random.Random(0).sample(names, min(chosen.sample, len(names))))
    mutmut._run(names, chosen.jobs)

    tested = {name: found for name, found in results().items() if found[1] != "not checked"}
    noticed = [name for name, (_, status) in tested.items() if status in NOTICED]
    equivalent, left = list[str](), list[str]()
    for name, (path, status) in tested.items():
        if status not in NOTICED:
            removed, added = change(name, path)
            same = is_equivalent(name, removed, added, known)
            (equivalent if same else left).append(f"{name}: {status}\n  - {removed}\n  + {added}")
    share = len(noticed) / max(len(noticed) + len(left), 1)
    print("\n".join(left))
    print(
        f"{chosen.room}: {len(tested)} mutants, {len(noticed)} noticed ({share:.1%}), "
        f"{len(equivalent)} equivalent, {len(left)} not noticed, in {minutes():.1f} minutes of processor time"
    )
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
