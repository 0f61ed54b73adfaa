"""The keys of ``unirun top``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unirun.cli.top import pressed
from unirun.observe.top import ORDERS, TopView

KEYS = {
    b"s": "order",
    b"/": "filter",
    b"\x1b[A": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"j": "down",
    b"\r": "detail",
    b"\n": "detail",
    b"\t": "job",
    b"x": "",
}


@given(st.lists(st.tuples(st.sampled_from([*KEYS]), st.integers(0, 4)), max_size=30), st.integers(1, 3))
def test_each_key_changes_what_it_stands_for_and_another_job_is_shown_from_its_first_rank(
    keys: list[tuple[bytes, int]], count: int
) -> None:
    jobs = tuple(f"job-{number}" for number in range(count))
    view = TopView(jobs=jobs)
    order, row, detail, job, text = 0, 0, False, 0, ""
    for number, (key, rows) in enumerate(keys):
        # Ranks come and go between two keys.
        view = pressed(view, key, lambda number=number: str(number), rows)
        match KEYS[key]:
            case "order":
                order = (order + 1) % len(ORDERS)
            case "filter":
                text, row = str(number), 0
            case "up":
                row = max(min(row, max(rows - 1, 0)) - 1, 0)
            case "down":
                row = min(row + 1, max(rows - 1, 0))
            case "detail":
                detail = not detail
            case "job":
                job, row, detail = (job + 1) % count, 0, False
        assert view == TopView(ORDERS[order], text, row, detail, job, jobs)
