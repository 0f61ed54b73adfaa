"""The table that ``print(trainer)`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unirun.observe.status import JobStatus
from unirun.spec.sizes import show_size

COLUMNS = ("RANK", "NODE", "PID", "DEVICES", "CPU", "MEMORY", "STATE")


def table(status: JobStatus, described: Sequence[Mapping[str, Any]], backend: str) -> str:
    """One line for each worker. `described` is what each says of itself, or nothing."""
    (role,) = status.roles
    rows = [COLUMNS]
    for worker in role.workers:
        own = described[worker.rank] if worker.rank < len(described) else {}
        restarted = f", started {worker.incarnation + 1} times" if worker.incarnation else ""
        rows.append(
            (
                str(worker.rank),
                worker.node,
                str(own.get("pid") or worker.pid or ""),
                str(own.get("devices") or "cpu"),
                f"{own['cpu']:.1f} s" if own else "",
                show_size(own["memory"]) if own else "",
                f"{worker.phase}{restarted}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    head = f"Trainer {status.run_id}: {len(role.workers)} workers, backend {backend}"
    return "\n".join([head, *lines])
