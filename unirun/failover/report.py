"""The report that a person reads when a job has failed: the cause last, with everything to find it."""

from __future__ import annotations

from unirun.failover.root_cause import Diagnosis
from unirun.job.failures import Failure

OTHERS_SHOWN = 8


def failure_report(reason: str, diagnosis: Diagnosis) -> str:
    """Several lines: the consequences first, then the cause with its traceback and its log."""
    cause = diagnosis.cause
    lines = [f"job failed: {reason}"]
    if diagnosis.others:
        lines.append(f"other failures ({len(diagnosis.others)}):")
        lines += [f"  {_short(failure, cause)}" for failure in diagnosis.others[:OTHERS_SHOWN]]
        if len(diagnosis.others) > OTHERS_SHOWN:
            lines.append(f"  … and {len(diagnosis.others) - OTHERS_SHOWN} more")
    lines.append(f"root cause: {cause.worker} on {cause.node}: {cause.exit} ({diagnosis.reason})")
    if cause.note:
        lines.append(f"  {cause.note}")
    words = cause.traceback or cause.message
    if not words and cause.tail:
        lines.append("  the end of its stderr:")
        words = cause.tail
    lines += [f"  {line}" for line in words.rstrip().splitlines()]
    lines.append(f"  log: {cause.log}/stderr.log")
    return "\n".join(lines)


def _short(failure: Failure, cause: Failure) -> str:
    later = failure.time - cause.time
    when = f"{abs(later):.3f} s {'later' if later >= 0 else 'before'}"
    words = failure.message.splitlines()[0][:160] if failure.message else failure.note
    return f"{failure.worker} on {failure.node}: {failure.exit}, {when}{': ' + words if words else ''}"
