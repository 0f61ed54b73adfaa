"""What to do about a failure: restart the role while its budget lasts, else end the job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unirun.failover.exits import Failure


@dataclass(frozen=True, slots=True)
class Decision:
    """`action` and the `reason` for it in words. `budget_spent`: restarts were allowed, and are used up."""

    action: Literal["restart_role", "end_job"]
    reason: str
    budget_spent: bool = False


def decide(failure: Failure, *, restarts: int, max_restarts: int) -> Decision:
    """The decision after `failure` of a role that was restarted `restarts` times already.

    A restart resets nothing: the second failure is handled like the first, with one restart less left.
    """
    what = f"{failure.who} ended with {failure.exit}"
    if restarts < max_restarts:
        return Decision(
            "restart_role", f"{what}; restart {restarts + 1} of {max_restarts} of role {failure.role}"
        )
    if max_restarts == 0:
        return Decision("end_job", f"{what}; role {failure.role} has no restarts (--max-restarts 0)")
    return Decision(
        "end_job",
        f"{what}; all {max_restarts} restarts of role {failure.role} are used up",
        budget_spent=True,
    )
