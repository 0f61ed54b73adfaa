"""Writes the table of consequences in failover.md, made of decisions of `unirun.failover.policy` (``make docs``)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from unirun.failover.budgets import Budget
from unirun.failover.policy import STRIKES, Decision, Loss, decide
from unirun.failover.state import Ranks, RoleState, WorkerPhase, WorkerState

BEGIN = "<!-- the table is made by docs/failover.py from failover/policy.py; do not edit it -->"
END = "<!-- the end of the table -->"

LIMIT, JOB = Budget(3), Budget(1)
SPENT = Budget(3, 3)


def role(kind: str) -> RoleState:
    """A role of four ranks, of which one has ended: of scripts, workloads, a trainer or services."""
    ranks = Ranks(WorkerState(rank, "n0", phase=WorkerPhase.RUNNING) for rank in range(3))
    match kind:
        case "service":
            return RoleState(kind, "program", "process", ranks, is_program=True)
        case "workload" | "trainer":
            return RoleState(kind, kind, "process", ranks, generation=1)
    return RoleState(kind, "script", "role", ranks, generation=1)


Case = tuple[str, Loss, Mapping[str, Budget]]
"""The event in words and as a loss, and the budgets: those of the role, of the job and of the rank."""

ENDED = Loss("ROLE:2 ended with exit code 1", "ROLE", "2", recoverable=True)
NODE = Loss("the agent of node n1 is gone", "ROLE", "2-3", recoverable=True, elsewhere=True)
OFTEN = f"ROLE:2 ended with exit code 1; it has failed {STRIKES} times on n0 within an hour"

CASES: tuple[Case, ...] = (
    ("a rank", ENDED, {}),
    ("a rank whose own restarts are used up", ENDED, {"rank": SPENT}),
    ("the same, and the job has restarts", ENDED, {"rank": SPENT, "job": JOB}),
    ("a rank of a role whose restarts are used up", ENDED, {"budget": SPENT}),
    ("the same, and the job has restarts", ENDED, {"budget": SPENT, "job": JOB}),
    (f"a rank, for the {STRIKES}rd time on its node", replace(ENDED, what=OFTEN, elsewhere=True), {}),
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
    ("the rendezvous store, before all have met", Loss("the store of role ROLE is gone", "ROLE"), {}),
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
    return f"{text}, at no cost" if decision.free or decision.action == "join" else text


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


def page(text: str) -> str:
    """The page, whose `text` is that of any time, with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
