"""Flame graphs: from counted stacks to bars, and to SVG."""

from __future__ import annotations

import itertools
import sys
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from unirun.cli.profile import Bar, bars, flame

COUNTS = {"main;a": 2, "main;a;b": 3, "main;c": 5, "other": 1}


def test_a_frame_is_above_those_that_it_calls_and_as_wide_as_all_of_them() -> None:
    assert sorted(bars(COUNTS), key=lambda bar: (bar.first, bar.depth)) == [
        Bar("main", 0, 10, 0),
        Bar("a", 0, 5, 1),
        Bar("b", 2, 3, 2),
        Bar("c", 5, 5, 1),
        Bar("other", 10, 1, 0),
    ]


def test_a_stack_may_be_deeper_than_that_of_this_process() -> None:
    deep = ";".join(["f"] * 2 * sys.getrecursionlimit())
    assert max(bar.depth for bar in bars({deep: 1})) == 2 * sys.getrecursionlimit() - 1


names = st.lists(st.sampled_from(["a", "b", "<c & d>"]), min_size=1, max_size=5).map(";".join)


@given(st.dictionaries(names, st.integers(1, 1000), max_size=20))
def test_boxes_of_one_depth_do_not_overlap_and_the_picture_is_xml(counts: dict[str, int]) -> None:
    for depth in range(6):
        row = sorted((bar.first, bar.samples) for bar in bars(counts) if bar.depth == depth)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(row))
    assert sum(bar.samples for bar in bars(counts) if bar.depth == 0) == sum(counts.values())
    ElementTree.fromstring(flame(counts, "<job>"))


def test_the_picture_names_every_frame_with_its_share() -> None:
    text = flame(COUNTS, "actor:0")
    assert "actor:0: 11 samples" in text
    assert "a: 5 samples, 45.5 %" in text
