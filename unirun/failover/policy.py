"""What to do about a failure: start again what the role's level says while its budget lasts, else end the job."""

from __future__ import annotations

from typing import Literal

from unirun.job.failures import Failure
from unirun.spec import EntryKind, Restart
from unirun.values import Value


class Decision(Value):
    """`action` and the `reason` for it in words. `budget_spent`: restarts were allowed, and are used up.

    ``restart_worker`` starts the worker again and makes a new generation; ``join`` starts it again for the generation
    that is being formed, and spends no restart.
    """

    action: Literal["restart_role", "restart_worker", "join", "end_job"]
    reason: str
    budget_spent: bool = False


class Circumstances(Value):
    """What the policy looks at besides the failure itself.

    `survivors` are the workers of the role that live on. `recoverable` is what the failed worker had said of
    itself, None when it had said nothing yet; it counts for trainers. `generation` is the role's present one.
    `behind`: the worker had not begun to form it, and was still setting itself up for an earlier one, or could not be
    woken in that. `lasting`: its error would come again however often it is started.
    """

    kind: EntryKind = "script"
    restart: Restart = "role"
    restarts: int = 0
    max_restarts: int = 0
    survivors: int = 0
    generation: int = 0
    recoverable: bool | None = None
    behind: bool = False
    lasting: bool = False


def decide(failure: Failure, now: Circumstances) -> Decision:
    """The decision after `failure`.

    A restart resets nothing: the second failure is handled like the first, with one restart less left. Each worker
    that is started again alone spends one restart of its role, as a restart of all of them does. A worker that is
    `behind` spends none: the death that ended its generation has. It has left nothing in the store of the present one,
    so another can take its place there.

    A lasting error ends the job when it comes in the first start of a rank. Later it may be an accident all the same,
    as the code has run on that rank: its restarts are spent first.
    """
    what = f"{failure.who} ended with {failure.exit}"
    if now.lasting and now.recoverable is None and failure.incarnation == 0:
        return Decision("end_job", f"{what}, before it was up, with an error that a restart cannot mend")
    if now.kind == "trainer" and not now.recoverable:
        return Decision("end_job", f"{what}; {_why_not_recoverable(failure.who, now)}")
    if now.behind:
        why = f"it was in a generation that another death had ended, and joins generation {now.generation}"
        return Decision("join", f"{what}; {why} at no cost")
    if now.restarts >= now.max_restarts:
        return _without_budget(what, failure.role, now)
    count = f"restart {now.restarts + 1} of {now.max_restarts}"
    if now.restart == "role":
        return Decision("restart_role", f"{what}; {count} of role {failure.role}")
    return Decision("restart_worker", f"{what}; {count}: {failure.who} alone, {_others(failure.role, now)}")


def decide_without_store(role: str, reason: str, now: Circumstances) -> Decision:
    """The decision when the store of `role` ended before its workers could meet in it.

    It spends a restart, so that a store that can never be served does not keep a job busy for ever.
    """
    what = f"the store of role {role} is gone before its workers have met: {reason}"
    if now.restarts >= now.max_restarts:
        return _without_budget(what, role, now)
    return Decision(
        "restart_role" if now.restart == "role" else "restart_worker",
        f"{what}; restart {now.restarts + 1} of {now.max_restarts} of role {role}",
    )


def decide_without_node(role: str, ranks: str, reason: str, now: Circumstances) -> Decision:
    """The decision for `role`, which a node has taken `ranks` of (``0-3``), and for `reason`.

    However many they were, that is one restart of the role. `now.recoverable` is what all of them had said.
    """
    who = f"{role}:{ranks}"
    if now.kind == "trainer" and not now.recoverable:
        return Decision("end_job", f"{reason}; {_why_not_recoverable(who, now)}")
    if now.restarts >= now.max_restarts:
        return _without_budget(reason, role, now)
    count = f"restart {now.restarts + 1} of {now.max_restarts}"
    if now.restart == "role":
        return Decision("restart_role", f"{reason}; {count} of role {role}, with {who} elsewhere")
    return Decision("restart_worker", f"{reason}; {count}: {who} elsewhere, {_others(role, now)}")


def decide_to_make_room(role: str, reason: str, now: Circumstances) -> Decision:
    """The decision for `role`, which has lost nobody, and of which some have to move, or to end, for `reason`.

    All of its ranks start again, which is a restart.
    """
    if now.kind == "trainer" and not now.recoverable:
        return Decision("end_job", f"{reason}; {_why_not_recoverable(role, now)}")
    if now.restarts >= now.max_restarts:
        return _without_budget(reason, role, now)
    return Decision(
        "restart_role", f"{reason}; restart {now.restarts + 1} of {now.max_restarts} of role {role}"
    )


def _without_budget(what: str, role: str, now: Circumstances) -> Decision:
    if now.max_restarts == 0:
        return Decision("end_job", f"{what}; role {role} has no restarts (--max-restarts 0)")
    reason = f"{what}; all {now.max_restarts} restarts of role {role} are used up"
    return Decision("end_job", reason, budget_spent=True)


def _why_not_recoverable(who: str, now: Circumstances) -> str:
    if now.recoverable is None:
        return f"{who} had not told yet whether it is recoverable"
    return f"{who} is not recoverable (is_recoverable() returned False)"


def _others(role: str, now: Circumstances) -> str:
    forms = f"generation {now.generation + 1}"
    match now.survivors:
        case 0:
            return f"as {forms}"
        case 1:
            return f"{role}'s other rank keeps its memory and forms {forms}"
        case count:
            return f"{role}'s other {count} ranks keep their memory and form {forms}"
