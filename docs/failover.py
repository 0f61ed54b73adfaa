"""Writes the tables in failover.md: consequences, and failures by part, fault and moment (``make docs``).

Both are made of decisions of `unirun.failover.policy`. `tests/sim/test_matrix.py` lets each of these failures happen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from unirun.failover.policy import STRIKES, Budget, Decision, Loss, decide
from unirun.failover.state import Ranks, RoleState, WorkerPhase, WorkerState

BEGIN = "<!-- the table is made by docs/failover.py from failover/policy.py; do not edit it -->"
END = "<!-- the end of the table -->"
MATRIX_BEGIN = "<!-- this table is made by docs/failover.py, too -->"
MATRIX_END = "<!-- the end of the second table -->"

LIMIT, JOB = Budget(3), Budget(1)
SPENT = Budget(3, 3)


def role(kind: str) -> RoleState:
    """A role of four ranks, of which one has ended: of scripts, resilient ones, workloads, a trainer or services."""
    ranks = Ranks(WorkerState(rank, "n0", phase=WorkerPhase.RUNNING) for rank in range(3))
    match kind:
        case "resilient":
            inside = Ranks(replace(each, resilient=True) for each in ranks)
            return RoleState(kind, "script", "role", inside, generation=1)
        case "service":
            return RoleState(kind, "program", "process", ranks, is_program=True)
        case "workload" | "trainer":
            return RoleState(kind, kind, "process", ranks, generation=1)
    return RoleState(kind, "script", "role", ranks, generation=1)


Case = tuple[str, Loss, Mapping[str, Budget]]
"""The event in words and as a loss, and the budgets: those of the role, of the job and of the rank."""

ENDED = Loss("ROLE:2 ended with exit code 1", "ROLE", "2", recoverable=True)
NODE = Loss("the agent of node n1 is gone", "ROLE", "2-3", recoverable=True, elsewhere=True)
SICK = replace(ENDED, what=f"{ENDED.what}; n1 is sick", elsewhere=True)
OFTEN = f"ROLE:2 ended with exit code 1; it has failed {STRIKES} times on n0 within an hour"

CASES: tuple[Case, ...] = (
    ("a rank", ENDED, {}),
    ("a rank whose own restarts are used up", ENDED, {"rank": SPENT}),
    ("the same, and the job has restarts", ENDED, {"rank": SPENT, "job": JOB}),
    ("a rank of a role whose restarts are used up", ENDED, {"budget": SPENT}),
    ("the same, and the job has restarts", ENDED, {"budget": SPENT, "job": JOB}),
    (f"a rank, for the {STRIKES}rd time on its node", replace(ENDED, what=OFTEN, elsewhere=True), {}),
    ("a rank on a sick node, whose disk is full or whose device has a fault", SICK, {}),
    ("a rank, with a fatal exit code", replace(ENDED, what="ROLE:2 ended with exit code 77", fatal=77), {}),
    (
        "a rank in its first start, with an error that would come again",
        replace(ENDED, recoverable=None, first_start=True, permanent=True),
        {},
    ),
    ("a rank that waits in a generation that is over", replace(ENDED, stale=True), {}),
    ("a rank whose port another process has", replace(ENDED, taken=True), {}),
    ("a node", NODE, {}),
    ("nothing: a node is drained", replace(NODE, what="node n1 is drained", asked=True), {}),
    (
        "the rendezvous store, before all have met",
        Loss("the store of role ROLE is gone before its workers have met", "ROLE"),
        {},
    ),
)

KINDS = ("scripts", "workload", "service")

NOT_RECOVERABLE: tuple[Case, ...] = (
    ("the trainer, which is not recoverable", replace(ENDED, recoverable=False), {}),
    ("the same, and the job has restarts", replace(ENDED, recoverable=False), {"job": JOB}),
)


def decided(case: Case, kind: str) -> Decision:
    """The decision of the policy."""
    _, loss, budgets = case
    named = replace(loss, role=kind, what=loss.what.replace("ROLE", kind))
    budgets = {"budget": LIMIT, **budgets}
    if kind == "service":
        # Each of its ranks has the budget of the role.
        budgets.pop("rank", None)
    return decide(named, role(kind), **budgets)


def words(decision: Decision, loss: Loss, kind: str) -> str:
    """The ranks or roles that restart, in words."""
    others = "" if kind == "service" else "; the others keep their memory"
    where = " elsewhere" if loss.elsewhere else ""
    code = f"exit code {decision.code}" if decision.code else "the exit code of the root cause"
    text = {
        "restart_job": "all roles",
        "restart_role": f"all ranks of the role{', some' + where if where else ''}",
        "restart_worker": (f"the lost ranks{where}" if loss.ranks else "no rank: they meet again") + others,
        "join": "the rank, in the generation that is formed",
        "end_job": f"the job ends with {code}",
    }[decision.action]
    return f"{text}, at no cost" if decision.free else text


def row(case: Case, kinds: tuple[str, ...], told: str) -> str:
    """A row of the table; the reason is that for the kind `told`."""
    text, loss, _ = case
    shown = [words(decided(case, kind), loss, kind) if kind in kinds else "" for kind in KINDS]
    if told == "trainer":
        shown = ["", words(decided(case, told), loss, told), ""]
    return f"| {' | '.join((text, *shown, f'`{decided(case, told).reason}`'))} |"


def applies(case: Case) -> tuple[str, ...]:
    """The kinds of roles to which this can happen."""
    _, loss, budgets = case
    return tuple(
        kind
        for kind in KINDS
        if not (kind == "service" and (not loss.ranks or loss.stale or "rank" in budgets))
        and not (kind == "scripts" and loss.stale)
        and not (kind != "service" and loss.taken)
    )


def table() -> str:
    """The table of consequences."""
    lines = ["| what fails | scripts | workloads | services | reason |", "| --- " * 5 + "|"]
    for case in CASES:
        kinds = applies(case)
        lines.append(row(case, kinds, kinds[0]))
    lines += [row(case, (), "trainer") for case in NOT_RECOVERABLE]
    return "\n".join(lines)


# Failures by part, fault and moment.

MOMENTS = ("starting", "forming", "running", "in a call", "saving", "stopping")

Outcome = str
"""A row of the table of consequences, by its key in `ROWS`; or a key of `OTHERWISE` or of `NEVER`."""

ROWS: Mapping[Outcome, Case] = {
    "rank": CASES[0],
    "sick": CASES[6],
    "never": CASES[8],
    "stale": CASES[9],
    "port": CASES[10],
    "node": CASES[11],
    "store": CASES[13],
    "trainer": NOT_RECOVERABLE[0],
}

OTHERWISE: Mapping[Outcome, str] = {
    "peers": "the others wait in vain and fail. The report names this rank",
    "ends": "the job ends, as it was told to: 143",
    "killed": "SIGKILL after the grace period; the job ends: 143",
    "master": "another master leads; no rank restarts",
    "later": "decisions wait for the store; no rank restarts",
    "anew": "the ranks meet in another store, at no cost",
    "none": "nothing",
    "again": "it starts again with the lost rank, at no cost",
    "done": "the job ends: 0",
}
"""The outcomes that no loss of a role is the reason for."""

NEVER: Mapping[Outcome, str] = {
    "-term": "no process sends it SIGTERM at that moment",
    "-signal": "it ends on a message, and the wait for its exit has a deadline",
    "-port": "it listens on no port that another process could have: it binds port 0, or inherits the socket",
    "-disk": "it writes nothing then that it could not do without",
    "-alone": "it has no group",
    "-enter": "it has not entered its function yet: as a rank of other scripts",
    "-workload": "as in a workload",
    "-survivor": "no other rank is lost then",
    "-native": "its threads are native: none needs the GIL",
    "-foreign": "its code is not of this project, and has no GIL",
    "-timeout": "whoever waits in it fails by the time-out of the group, as with exit code 1",
    "-has": "it has its port",
    "-save": "it has no checkpoint of its own: as when it runs",
}
"""The reasons why there is no such failure."""

KIND: Mapping[str, str] = {
    "worker": "scripts",
    "resilient worker": "resilient",
    "survivor in a collective": "workload",
    "resilient survivor": "resilient",
    "agent": "scripts",
    "spawner": "scripts",
    "master": "scripts",
    "trainer": "trainer",
    "rendezvous store": "workload",
    "store member": "scripts",
    "service": "service",
}
"""The parts, and the kind of the role that shows the consequence."""

MATRIX: Mapping[tuple[str, str], tuple[Outcome, Outcome, Outcome, Outcome, Outcome, Outcome]] = {
    ("worker", "SIGKILL"): ("rank", "rank", "rank", "rank", "rank", "ends"),
    ("worker", "SIGSTOP"): ("rank", "rank", "rank", "rank", "rank", "killed"),
    ("worker", "SIGTERM ignored"): ("-term", "-term", "-term", "-term", "-term", "killed"),
    ("worker", "exit 1"): ("rank", "rank", "rank", "rank", "rank", "ends"),
    ("worker", "exit 0"): ("peers", "peers", "none", "peers", "none", "ends"),
    ("worker", "GIL held"): ("rank", "rank", "rank", "rank", "rank", "killed"),
    ("worker", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("worker", "disk full"): ("sick", "-disk", "none", "-disk", "sick", "ends"),
    ("survivor in a collective", "SIGKILL"): ("-survivor", "rank", "-survivor", "rank", "-survivor", "ends"),
    ("survivor in a collective", "SIGSTOP"): (
        *("-survivor", "rank", "-survivor", "rank", "-survivor", "killed"),
    ),
    ("survivor in a collective", "SIGTERM ignored"): ("-term", "-term", "-term", "-term", "-term", "killed"),
    ("survivor in a collective", "exit 1"): ("-survivor", "rank", "-survivor", "rank", "-survivor", "ends"),
    ("survivor in a collective", "exit 0"): (
        *("-survivor", "rank", "-survivor", "again", "-survivor", "ends"),
    ),
    ("survivor in a collective", "GIL held"): (
        *("-survivor", "rank", "-survivor", "rank", "-survivor", "killed"),
    ),
    ("survivor in a collective", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("survivor in a collective", "disk full"): ("-disk", "-disk", "-disk", "-disk", "-disk", "-disk"),
    ("resilient worker", "SIGKILL"): ("-enter", "rank", "rank", "rank", "rank", "ends"),
    ("resilient worker", "SIGSTOP"): ("-enter", "rank", "rank", "rank", "rank", "killed"),
    ("resilient worker", "SIGTERM ignored"): ("-term", "-term", "-term", "-term", "-term", "killed"),
    ("resilient worker", "exit 1"): ("-enter", "rank", "rank", "rank", "rank", "ends"),
    ("resilient worker", "exit 0"): (
        "-enter",
        "-workload",
        "-workload",
        "-workload",
        "-workload",
        "-workload",
    ),
    ("resilient worker", "GIL held"): ("-enter", "rank", "rank", "rank", "rank", "killed"),
    ("resilient worker", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("resilient worker", "disk full"): ("-enter", "-disk", "none", "-disk", "sick", "ends"),
    ("resilient survivor", "SIGKILL"): ("-survivor", "rank", "-survivor", "rank", "-survivor", "ends"),
    ("resilient survivor", "SIGSTOP"): ("-survivor", "rank", "-survivor", "rank", "-survivor", "killed"),
    ("resilient survivor", "SIGTERM ignored"): ("-term", "-term", "-term", "-term", "-term", "killed"),
    ("resilient survivor", "exit 1"): ("-survivor", "rank", "-survivor", "rank", "-survivor", "ends"),
    ("resilient survivor", "exit 0"): (
        "-survivor",
        "-workload",
        "-survivor",
        "-workload",
        "-survivor",
        "ends",
    ),
    ("resilient survivor", "GIL held"): ("-survivor", "rank", "-survivor", "rank", "-survivor", "killed"),
    ("resilient survivor", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("resilient survivor", "disk full"): ("-disk", "-disk", "-disk", "-disk", "-disk", "-disk"),
    ("agent", "SIGKILL"): ("node", "node", "node", "node", "node", "ends"),
    ("agent", "SIGSTOP"): ("node", "node", "node", "node", "node", "ends"),
    ("agent", "SIGTERM ignored"): ("-signal", "-signal", "-signal", "-signal", "-signal", "-signal"),
    ("agent", "exit 1"): ("node", "node", "node", "node", "node", "ends"),
    ("agent", "exit 0"): ("node", "node", "node", "node", "node", "ends"),
    ("agent", "GIL held"): ("node", "node", "node", "node", "node", "ends"),
    ("agent", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("agent", "disk full"): ("-disk", "-disk", "-disk", "-disk", "-disk", "-disk"),
    ("spawner", "SIGKILL"): ("rank", "rank", "rank", "rank", "rank", "ends"),
    ("spawner", "SIGSTOP"): ("none", "none", "none", "none", "none", "ends"),
    ("spawner", "SIGTERM ignored"): ("-signal", "-signal", "-signal", "-signal", "-signal", "-signal"),
    ("spawner", "exit 1"): ("rank", "rank", "rank", "rank", "rank", "ends"),
    ("spawner", "exit 0"): ("rank", "rank", "rank", "rank", "rank", "ends"),
    ("spawner", "GIL held"): ("-disk", "-disk", "-disk", "-disk", "-disk", "-disk"),
    ("spawner", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("spawner", "disk full"): ("-disk", "-disk", "-disk", "-disk", "-disk", "-disk"),
    ("master", "SIGKILL"): ("master", "master", "master", "master", "master", "ends"),
    ("master", "SIGSTOP"): ("master", "master", "master", "master", "master", "ends"),
    ("master", "SIGTERM ignored"): ("-signal", "-signal", "-signal", "-signal", "-signal", "-signal"),
    ("master", "exit 1"): ("master", "master", "master", "master", "master", "ends"),
    ("master", "exit 0"): ("master", "master", "master", "master", "master", "ends"),
    ("master", "GIL held"): ("master", "master", "master", "master", "master", "ends"),
    ("master", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("master", "disk full"): ("later", "later", "later", "later", "later", "ends"),
    ("trainer", "SIGKILL"): ("trainer", "-alone", "trainer", "trainer", "trainer", "ends"),
    ("trainer", "SIGSTOP"): ("-timeout", "-alone", "trainer", "trainer", "trainer", "killed"),
    ("trainer", "SIGTERM ignored"): ("-term", "-term", "-term", "-term", "-term", "killed"),
    ("trainer", "exit 1"): ("trainer", "-alone", "trainer", "trainer", "trainer", "ends"),
    ("trainer", "exit 0"): ("done", "-alone", "done", "done", "done", "ends"),
    ("trainer", "GIL held"): ("-timeout", "-alone", "trainer", "trainer", "trainer", "killed"),
    ("trainer", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("trainer", "disk full"): ("-disk", "-alone", "-disk", "-disk", "trainer", "ends"),
    ("rendezvous store", "SIGKILL"): ("store", "store", "anew", "anew", "anew", "ends"),
    ("rendezvous store", "SIGSTOP"): ("-timeout", "-timeout", "none", "none", "none", "ends"),
    ("rendezvous store", "SIGTERM ignored"): (
        "-signal",
        "-signal",
        "-signal",
        "-signal",
        "-signal",
        "-signal",
    ),
    ("rendezvous store", "exit 1"): ("store", "store", "anew", "anew", "anew", "ends"),
    ("rendezvous store", "exit 0"): ("store", "store", "anew", "anew", "anew", "ends"),
    ("rendezvous store", "GIL held"): ("-native", "-native", "-native", "-native", "-native", "-native"),
    ("rendezvous store", "port taken"): ("-port", "-port", "-port", "-port", "-port", "-port"),
    ("rendezvous store", "disk full"): ("-disk", "-disk", "-disk", "-disk", "-disk", "-disk"),
    ("store member", "SIGKILL"): ("later", "later", "later", "later", "later", "ends"),
    ("store member", "SIGSTOP"): ("later", "later", "later", "later", "later", "ends"),
    ("store member", "SIGTERM ignored"): ("-term", "-term", "-term", "-term", "-term", "-term"),
    ("store member", "exit 1"): ("later", "later", "later", "later", "later", "ends"),
    ("store member", "exit 0"): ("later", "later", "later", "later", "later", "ends"),
    ("store member", "GIL held"): ("-foreign", "-foreign", "-foreign", "-foreign", "-foreign", "-foreign"),
    ("store member", "port taken"): ("-has", "-has", "-has", "-has", "-has", "-has"),
    ("store member", "disk full"): ("later", "later", "later", "later", "later", "ends"),
    ("service", "SIGKILL"): ("rank", "-alone", "rank", "rank", "-save", "ends"),
    ("service", "SIGSTOP"): ("never", "-alone", "rank", "rank", "-save", "killed"),
    ("service", "SIGTERM ignored"): ("-term", "-alone", "-term", "-term", "-save", "killed"),
    ("service", "exit 1"): ("rank", "-alone", "rank", "rank", "-save", "ends"),
    ("service", "exit 0"): ("rank", "-alone", "rank", "rank", "-save", "ends"),
    ("service", "GIL held"): ("never", "-alone", "rank", "rank", "-save", "killed"),
    ("service", "port taken"): ("port", "-alone", "-has", "-has", "-save", "-has"),
    ("service", "disk full"): ("sick", "-alone", "none", "none", "-save", "ends"),
}
"""The outcome of each fault of each part, by moment."""


def shown(outcome: Outcome, kind: str) -> str:
    """The outcome in words; a dash where there is no such failure."""
    if outcome in NEVER:
        return "–"
    if outcome in OTHERWISE:
        return OTHERWISE[outcome]
    case = ROWS[outcome]
    return words(decided(case, kind), case[1], kind).partition("; ")[0]


def matrix() -> str:
    """The table of failures by part, fault and moment. Faults of a part with the same outcomes have one row."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (part, fault), outcomes in MATRIX.items():
        if not NEVER.keys() >= {*outcomes}:
            cells = tuple(shown(outcome, KIND[part]) for outcome in outcomes)
            rows.setdefault((part, cells), []).append(fault)
    lines = [f"| part | fault | {' | '.join(MOMENTS)} |", "| --- " * (2 + len(MOMENTS)) + "|"]
    for (part, cells), faults in rows.items():
        lines.append(f"| {part} | {', '.join(faults)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put_between(text: str, begin: str, end: str, made: str) -> str:
    """`text` with what was made between two lines of it."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"


def page(text: str) -> str:
    """The page, whose `text` is that of any time, with the tables as they are now."""
    text = put_between(text, BEGIN, END, table())
    return put_between(text, MATRIX_BEGIN, MATRIX_END, matrix())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
