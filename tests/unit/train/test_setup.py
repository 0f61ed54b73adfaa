"""The request of a trainer, made from its arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.observe.status import NO_LIMIT
from unirun.spec.parse import parse_job
from unirun.train.setup import MANY, ROLE, Setup, options_of, range_of, resources_of, threads_of

numbers = st.one_of(st.integers(-3, 9), st.floats(), st.booleans(), st.none(), st.text(max_size=2))


class TestTheNumberOfWorkers:
    @pytest.mark.parametrize(
        ("asked", "found"),
        [
            (1, (1, 1)),
            (4, (4, 4)),
            ((2, 8), (2, 8)),
            ([2, 8], (2, 8)),
            ((3, 3), (3, 3)),
            ((4, math.inf), (4, MANY)),
        ],
    )
    def test_it_is_a_number_or_a_range(self, asked: Any, found: tuple[int, int]) -> None:
        assert range_of(asked) == found

    @pytest.mark.parametrize(
        "asked",
        [
            *(0, -1, 1.5, 4.0, "4", True, None, math.inf, math.nan, range(2, 8)),
            *((), (3,), (1, 2, 3), (3, 2), (0, 4), (True, 4), (2, 4.0), (2, math.nan), (2, "8")),
            (math.inf, math.inf),
        ],
    )
    def test_anything_else_is_refused(self, asked: Any) -> None:
        with pytest.raises(UsageError) as raised:
            range_of(asked)
        assert str(raised.value) == (
            f"num_workers={asked!r}; give a number from 1 on, or a range: (2, 8), (4, math.inf)"
        )

    @given(st.one_of(numbers, st.tuples(numbers, numbers), st.lists(numbers, max_size=3)))
    def test_whatever_is_asked_for_is_a_range_from_1_on_or_a_usage_error(self, asked: Any) -> None:
        try:
            least, most = range_of(asked)
        except UsageError:
            return
        assert 1 <= least <= most
        assert {type(least), type(most)} == {int}


class TestResources:
    @pytest.mark.parametrize(
        ("use_gpu", "resources", "found"),
        [
            (False, {}, (None, 1)),
            (False, {"CPU": 0}, (None, 1)),
            (False, {"CPU": 1}, (None, 1)),
            (False, {"CPU": 3}, ("cpu", 3)),
            (False, {"CPU": 2.0, "GPU": 0}, ("cpu", 2)),
            (True, {}, ("cuda", 1)),
            (True, {"GPU": 2}, ("cuda", 2)),
            (True, {"GPU": 1, "CPU": 4}, ("cuda", 1)),
        ],
    )
    def test_they_are_a_type_of_device_and_a_number_of_them(
        self, use_gpu: bool, resources: dict[str, float], found: tuple[str | None, int]
    ) -> None:
        assert resources_of(use_gpu, resources) == found

    @pytest.mark.parametrize(
        ("use_gpu", "resources", "message"),
        [
            (False, {"TPU": 1}, "resources_per_worker has 'TPU'; it has CPU and GPU"),
            (True, {"gpu": 1}, "resources_per_worker has 'gpu'; it has CPU and GPU"),
            (False, {"CPU": 1.5}, "resources_per_worker: CPU is 1.5; give a whole number"),
            (True, {"GPU": 0.5}, "resources_per_worker: GPU is 0.5; give a whole number"),
            (False, {"CPU": -1}, "resources_per_worker: CPU is -1; give a whole number"),
            (False, {"CPU": True}, "resources_per_worker: CPU is True; give a whole number"),
            (False, {"CPU": "2"}, "resources_per_worker: CPU is '2'; give a whole number"),
            (False, {"CPU": None}, "resources_per_worker: CPU is None; give a whole number"),
            (False, {"CPU": math.nan}, "resources_per_worker: CPU is nan; give a whole number"),
            (False, {"CPU": math.inf}, "resources_per_worker: CPU is inf; give a whole number"),
            (False, {"GPU": 2}, "resources_per_worker asks for 2 GPUs; pass use_gpu=True"),
            (True, {"GPU": 0}, "use_gpu=True with 0 GPUs for each worker; leave out one of them"),
        ],
    )
    def test_what_is_wrong_is_named_with_what_to_do(
        self, use_gpu: bool, resources: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UsageError) as raised:
            resources_of(use_gpu, resources)
        assert str(raised.value) == message

    @given(st.booleans(), st.dictionaries(st.sampled_from(("CPU", "GPU")), numbers))
    def test_each_worker_has_one_slot_or_more_or_it_is_a_usage_error(
        self, use_gpu: bool, resources: dict[str, Any]
    ) -> None:
        try:
            device, slots = resources_of(use_gpu, resources)
        except UsageError:
            return
        assert slots >= 1
        assert (device == "cuda") is use_gpu


@pytest.mark.parametrize(
    ("resources", "found"),
    [({}, {}), ({"CPU": 1}, {}), ({"CPU": 1.0, "GPU": 2}, {}), ({"CPU": 4.0}, {"OMP_NUM_THREADS": "4"})],
)
def test_a_variable_of_the_program_counts_unless_several_processors_were_asked_for(
    resources: dict[str, float], found: dict[str, str]
) -> None:
    assert threads_of(resources) == found


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("4", "1 GPU and 4 CPUs"),
        ("4,2", "1 GPU and 4 CPUs"),
        ("1", "1 GPU"),
        ("", "1 GPU"),
        ("9" * 5000, "1 GPU"),
    ],
)
def test_threads_are_told_as_openmp_reads_them(told: str, words: str) -> None:
    assert Setup(1, 1, "torch", device="cuda", env={"OMP_NUM_THREADS": told}).resources == words


class TestOptionsOfTheCommand:
    @pytest.mark.parametrize(
        ("placement", "store", "found"),
        [
            ("", "", ()),
            ("h1:4,h2:4", "", ("--hosts", "h1:4,h2:4")),
            ("fake:nodes=2,devices=2", "", ("--inventory", "fake:nodes=2,devices=2")),
            (
                {"hosts": "h1,h2", "shutdown_timeout": 5},
                "",
                ("--hosts", "h1,h2", "--shutdown-timeout", "5"),
            ),
            ({"slurm": True, "quiet": False, "interface": None}, "", ("--slurm",)),
            ({"shutdown_timeout": 0, "interface": ""}, "", ("--shutdown-timeout", "0", "--interface", "")),
            ({}, "etcd://h1:2379", ("--store", "etcd://h1:2379")),
            ("h1", "etcd", ("--store", "etcd", "--hosts", "h1")),
        ],
    )
    def test_they_say_where_workers_run(self, placement: Any, store: str, found: tuple[str, ...]) -> None:
        assert options_of(placement, store) == found

    @pytest.mark.parametrize("placement", [5, None, ["h1", "h2"], True])
    def test_what_is_no_placement_is_refused(self, placement: Any) -> None:
        kind = type(placement).__name__
        with pytest.raises(UsageError, match=f"placement is a {kind}; give hosts, an inventory, or a dict"):
            options_of(placement, "")


class TestTheJobFile:
    def test_a_fixed_number_of_workers_is_one_role_that_serves_calls(self) -> None:
        spec = parse_job(
            Setup(3, 3, "gloo", env={"A": "1"}).job_file("mine"), count_slots=lambda _: 8, run_id="mine"
        )
        (role,) = spec.roles
        assert (spec.name, role.name, role.count, role.least, role.elastic) == ("mine", ROLE, 3, None, False)
        assert (role.env["A"], role.max_restarts) == ("1", NO_LIMIT)

    def test_a_range_is_an_elastic_role(self) -> None:
        spec = parse_job(Setup(2, MANY, "none").job_file("mine"), count_slots=lambda _: 8, run_id="mine")
        (role,) = spec.roles
        assert (role.least, role.count, role.elastic) == (2, MANY, True)

    def test_devices_are_asked_for_where_there_are_some(self) -> None:
        assert "device" not in Setup(1, 1, "none").job_file("mine")["roles"][ROLE]
        role = Setup(1, 1, "none", "cuda", 2).job_file("mine")["roles"][ROLE]
        assert (role["device"], role["slots"]) == ("cuda", 2)
