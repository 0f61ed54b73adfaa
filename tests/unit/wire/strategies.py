"""The values that have a form on the wire, and specs of jobs that messages have in them."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from unirun.spec.job import Entry, JobSpec, RoleSpec

st.register_type_strategy(
    JobSpec,
    st.builds(
        JobSpec,
        st.text(),
        st.text(),
        st.just((RoleSpec("actor", 2, Entry("script", "train.py")),)),
        st.tuples(st.text()),
        st.dictionaries(st.text(), st.text(), max_size=3),
        st.dictionaries(st.text(), st.none() | st.booleans() | st.text(), max_size=3),
    ),
)


def within(value: object) -> bool:
    """Return True if all numbers are finite and all integers have at most 64 bits."""
    match value:
        case dict():
            return all(map(within, value.values()))
        case list() | tuple():
            return all(map(within, value))
        case float():
            return math.isfinite(value)
        case int():
            return -(1 << 63) <= value < 1 << 64
    return True
