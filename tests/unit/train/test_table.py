"""The table that a trainer shows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from unirun.observe.status import JobStatus, RoleStatus, WorkerStatus
from unirun.train.trainer import COLUMNS, table


def worker(rank: int, **more: Any) -> WorkerStatus:
    found = {"phase": "serving", "node": "h1", "incarnation": 0, "pid": 100 + rank, "exit": "", **more}
    return WorkerStatus(rank, **found)


def status(*workers: WorkerStatus) -> JobStatus:
    role = RoleStatus("worker", "running", 0, 0, 9, workers)
    return JobStatus("train-1a2b", "train-1a2b", "running", "", 0.0, None, None, (role,))


def own(pid: int, devices: str = "") -> dict[str, Any]:
    return {"pid": pid, "devices": devices, "memory": 250_000_000, "cpu": 1.25}


def test_each_worker_has_a_line_with_what_it_says_of_itself() -> None:
    shown = table(
        status(worker(0), worker(1, node="node12")), [own(7, "0,1"), own(8)], "gloo", "2 GPUs and 4 CPUs"
    )
    assert shown.splitlines() == [
        "Trainer train-1a2b: 2 workers with 2 GPUs and 4 CPUs each, backend gloo",
        "RANK  NODE    PID  DEVICES  CPU    MEMORY    STATE",
        "0     h1      7    0,1      1.2 s  250.0 MB  serving",
        "1     node12  8    cpu      1.2 s  250.0 MB  serving",
    ]


def test_what_is_not_known_is_left_empty() -> None:
    """While a worker is started again nobody answers, and there are more workers than have answered before."""
    shown = table(status(worker(0, phase="lost", pid=None), worker(1)), [], "none", "1 CPU").splitlines()
    assert shown[2].split() == ["0", "h1", "cpu", "lost"]
    assert shown[3].split() == ["1", "h1", "101", "cpu", "serving"]
    assert table(status(worker(0), worker(1)), [own(7)], "none", "1 CPU").splitlines()[3].split()[2] == "101"


def test_a_worker_that_was_started_again_says_how_often() -> None:
    shown = table(status(worker(0, incarnation=2)), [own(7)], "none", "1 CPU")
    assert shown.endswith("serving, started 3 times")


@given(
    st.lists(
        st.tuples(st.text("abc-1", min_size=1, max_size=20), st.none() | st.integers(1, 4_000_000)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 8),
)
def test_columns_begin_below_their_names(nodes: list[tuple[str, int | None]], answers: int) -> None:
    workers = [worker(rank, node=node, pid=pid) for rank, (node, pid) in enumerate(nodes)]
    _, head, *rows = table(
        status(*workers), [own(5 + rank) for rank in range(answers)], "none", "1 CPU"
    ).splitlines()
    assert head.split() == [*COLUMNS]
    assert len(rows) == len(nodes)
    for row, (node, _) in zip(rows, nodes, strict=True):
        assert row[head.index("NODE") :].split()[0] == node
        assert row[head.index("STATE") :] == "serving"
        assert row == row.rstrip()
