"""``unirun weights``: the versions that a job's ranks have of each channel, and on which paths they have come."""

from __future__ import annotations

from collections import defaultdict

from unirun.cli.commandline import Parser
from unirun.cli.output import print_table
from unirun.cli.stored import JOB_HELP, STORE_HELP, find_status
from unirun.collocation.graph import show_ranks
from unirun.launcher.foreground.terminal import say, warn
from unirun.observe.status import JobStatus
from unirun.spec.read import show_size
from unirun.values import Value
from unirun.wire.reports import FROM, VERSION


class Transfer(Value):
    """Bytes of the last version that `receiver` has got from `source`."""

    channel: str
    receiver: str
    source: str
    path: str
    size: float


def main(argv: list[str]) -> int:
    """Print what `argv` asks for. Returns 0. Raises `UsageError`, `JobError`, `StoreError`."""
    parser = Parser(
        prog="unirun weights",
        usage="unirun weights [JOB] [--plan] [--store URL]",
        description="Which version of the weights each rank has, in a job that runs or ran.",
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", help=JOB_HELP)
    parser.add_argument(
        "--plan", action="store_true", help="the bytes of the last version, by path and pair of ranks"
    )
    parser.add_argument("--store", help=STORE_HELP, metavar="URL")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    options = parser.parse_args(argv)
    status, _ = find_status(options.store, options.job)
    found = versions(status)
    if not found:
        warn(f"job {status.run_id} has moved no weights yet")
    elif options.plan:
        _print_moves(moves(status))
    else:
        print_table(
            ["CHANNEL", "VERSION", "RANKS"],
            [[channel, str(version), ranks] for (channel, version), ranks in found.items()],
        )
    return 0


def versions(status: JobStatus) -> dict[tuple[str, int], str]:
    """The ranks that have each version of each channel: ``actor:0-3, rollout:1``; the latest versions first."""
    found: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for role in status.roles:
        for worker in role.workers:
            for name, value in worker.metrics.items():
                if name.endswith(VERSION) and value is not None:
                    found[name.removesuffix(VERSION), -int(value)][role.name].append(worker.rank)
    return {
        (channel, -older): ", ".join(
            f"{role}:{show_ranks(ranks)}" for role, ranks in found[channel, older].items()
        )
        for channel, older in sorted(found)
    }


def moves(status: JobStatus) -> list[Transfer]:
    """For each receiver, the amounts that it has received from each source."""
    found = []
    for role in status.roles:
        for worker in role.workers:
            for name, value in worker.metrics.items():
                channel, separator, rest = name.partition(FROM)
                source, _, path = rest.partition("/")
                if separator and value:
                    found.append(Transfer(channel, f"{role.name}:{worker.rank}", source, path, value))
    return sorted(found, key=lambda move: (move.channel, move.path))


def _print_moves(found: list[Transfer]) -> None:
    print_table(
        ["CHANNEL", "RECEIVER", "FROM", "PATH", "SIZE"],
        [[m.channel, m.receiver, m.source, m.path, show_size(m.size)] for m in found],
    )
    sums: dict[str, float] = defaultdict(float)
    for move in found:
        sums[move.path] += move.size
    say()
    say("in all: " + ", ".join(f"{show_size(size)} by {path}" for path, size in sums.items()))
