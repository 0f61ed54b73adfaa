"""A job file means the same to YAML as to its reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from unirun.errors import SpecError
from unirun.spec.job import JobSpec
from unirun.spec.parse import parse_job
from unirun.spec.yaml import load_job_file


def load(folder: Path, text: str, *overrides: str) -> dict[str, Any]:
    file = folder / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return load_job_file(str(file), overrides)


@pytest.mark.parametrize(
    "text", ["count: 2:8", "{count: 2:8}", 'count: "2:8"', "count: '2:8'", "a: &range 2:8\ncount: *range"]
)
def test_a_range_is_none_of_yamls_numbers_in_base_60(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text)["count"] == "2:8"


def test_an_override_may_be_a_range_too(tmp_path: Path) -> None:
    text = "roles: {a: {count: 1}}\nlist: [1:30, 7]\nname: größer"
    found = load(tmp_path, text, "roles.a.count=2:8", "name=x:y")
    assert found == {"roles": {"a": {"count": "2:8"}}, "list": ["1:30", 7], "name": "x:y"}


def test_what_is_twice_in_a_mapping_is_a_fault_also_beside_a_range(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="duplicate"):
        load(tmp_path, "count: 2:8\nname: a\nname: b")


def test_an_empty_file_is_an_empty_job(tmp_path: Path) -> None:
    assert load(tmp_path, "") == {}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("ab :-'\"\n#é", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("pqr"), inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))
def test_all_other_scalars_are_read_as_by_omegaconf(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("yaml")
    text = OmegaConf.to_yaml(OmegaConf.create(values)) if values else ""
    assert load(folder, f"range: 2:8\n{text}") == {**values, "range": "2:8"}


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ({"slots": -1}, "whole number or a share of one"),
        ({"slots": float("nan")}, "whole number or a share of one"),
        ({"slots": True}, "whole number or a share of one"),
        ({"slots": 1.5}, "whole number or a share of one"),
        ({"slots": 0, "device": "cuda"}, "a rank without slots has no device, and device is given; leave"),
        ({"slots": 0, "devices": [0]}, "a rank without slots has no device, and devices is given; leave"),
        ({"cpus": 0}, "expected a number from 1"),
        ({"cpus": 1.5}, "expected a whole number, found 1.5"),
        ({"cpus": "every"}, "expected a whole number or all, found 'every'"),
        ({"memory": "64 gigs"}, "'64 gigs' is no number of bytes; write 64MB"),
        ({"memory": 64}, "64 is 64 bytes, less than any process needs; for example 64GB"),
        ({"memory": 1.5}, "expected a size, found 1.5"),
        ({"devices": [0, 1, 0]}, "0 stands there twice; name each device once"),
        ({"devices": "0-3"}, "'0-3' is no device; name each one"),
        ({"per_group": 3}, "every group has as many: 1, 2, 4"),
        ({"per_node": 3}, "every node has as many: 1, 2, 4"),
    ],
    ids=str,
)
def test_what_a_rank_cannot_need_is_told(role: dict[str, Any], says: str) -> None:
    data = {"program": "true", "roles": {"actor": {"count": 4, **role}}}
    with pytest.raises(SpecError) as caught:
        parse_job(data, count_slots=lambda _kind: 1, run_id="x")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("role", "cpus", "memory"),
    [
        ({}, None, None),
        ({"cpus": 8, "memory": "64GB"}, 8, 64 * 10**9),
        ({"cpus": "8", "memory": "1.5 GiB"}, 8, 3 * 2**29),
        ({"cpus": "all", "memory": 10**9}, "all", 10**9),
    ],
    ids=str,
)
def test_any_rank_may_need_processors_and_memory(role: dict[str, Any], cpus: object, memory: object) -> None:
    data = {
        "roles": {
            "tool": {"program": "true", **role},
            "script": {"module": "this", **role},
            "called": {"workload": "json:JSONDecoder", **role},
        },
        "trainer": {"class": "json:JSONEncoder", **role},
    }
    spec = parse_job(data, count_slots=lambda _kind: 1, run_id="x")
    assert [(each.cpus, each.memory) for each in spec.roles] == [(cpus, memory)] * 4
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
