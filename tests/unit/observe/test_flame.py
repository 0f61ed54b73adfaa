"""Flame graphs: from counted stacks to bars, and to SVG."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from unirun.observe.flame import Bar, bars, folded, svg

COUNTS = {"main;a": 2, "main;a;b": 3, "main;c": 5, "other": 1}


def test_a_stack_is_folded_by_functions_and_the_last_part_of_their_paths() -> None:
    frames = [("/home/me/train.py", "<module>"), ("/home/me/lib/model.py", "Net;x")]
    assert folded(frames, "MainThread") == "MainThread;<module> (me/train.py);Net:x (lib/model.py)"


def test_a_frame_is_above_those_that_it_calls_and_as_wide_as_all_of_them() -> None:
    assert bars(COUNTS) == [
        Bar("main", 0, 10, 0),
        Bar("a", 0, 5, 1),
        Bar("b", 2, 3, 2),
        Bar("c", 5, 5, 1),
        Bar("other", 10, 1, 0),
    ]


names = st.lists(st.sampled_from(["a", "b", "<c & d>"]), min_size=1, max_size=5).map(";".join)


@given(st.dictionaries(names, st.integers(1, 1000), max_size=20))
def test_boxes_of_one_depth_do_not_overlap_and_the_picture_is_xml(counts: dict[str, int]) -> None:
    for depth in range(6):
        row = sorted((bar.first, bar.samples) for bar in bars(counts) if bar.depth == depth)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(row))
    assert sum(bar.samples for bar in bars(counts) if bar.depth == 0) == sum(counts.values())
    ElementTree.fromstring(svg(counts, "<job>"))


def test_the_picture_names_every_frame_with_its_share() -> None:
    text = svg(COUNTS, "actor:0")
    assert "actor:0: 11 samples" in text
    assert "a: 5 samples, 45.5 %" in text
