"""The number of sets of workers that fit side by side, and the devices and threads of each."""

from __future__ import annotations

import inspect
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import examples
from unirun.collocation import Device, Inventory, Node, parse_fake
from unirun.collocation.inventory import NEARNESS
from unirun.errors import PlacementError, UsageError
from unirun.train.setup import MANY, Setup
from unirun.train.trainer import Trainer, _planned, another, inventory_of, setups, with_threads


def asked(ranks: int, slots: int = 1, *, device: str | None = "cuda", least: int = 0) -> Setup:
    return Setup(least or ranks, ranks, "none", device, slots, {}, ("--store", "etcd"))


def devices(found: list[Setup]) -> list[tuple[str, ...]]:
    """Those of all sets but the first."""
    return [each.devices for each in found[1:]]


@pytest.mark.parametrize(
    ("ranks", "cpus", "sets"),
    [(1, 1, 8), (2, 1, 4), (3, 1, 2), (2, 2, 2), (8, 1, 1), (9, 1, 1), (MANY, 1, 1)],
)
def test_there_are_as_many_sets_as_processors_suffice_for_but_one_at_least(
    ranks: int, cpus: int, sets: int
) -> None:
    setup = asked(ranks, cpus, device="cpu" if cpus > 1 else None)
    assert len(setups(setup, parse_fake("fake:cpus=8"))) == sets


def test_max_concurrent_may_be_more_than_there_are_processors() -> None:
    setup = asked(2, device=None)
    assert setups(setup, parse_fake("fake:cpus=2"), 3) == [setup] * 3
    assert setups(setup, None, 2) == [setup] * 2


def test_sets_of_workers_with_several_processors_are_not_all_bound_to_the_first_ones() -> None:
    first, *others = setups(asked(2, 3, device="cpu"), parse_fake("fake:cpus=16"), 3)
    assert (first.device, first.slots) == ("cpu", 3)
    assert [(each.device, each.slots, each.env) for each in others] == [
        (None, 1, {"OMP_NUM_THREADS": "3"})
    ] * 2


def test_each_set_has_gpus_of_its_own() -> None:
    setup = asked(2)
    found = setups(setup, parse_fake("fake:devices=7"))
    assert found[0] is setup
    assert devices(found) == [("2", "3"), ("4", "5")]
    assert devices(setups(setup, parse_fake("fake:devices=7"), 2)) == [("2", "3")]
    assert [each.options for each in found] == [setup.options] * 3


def test_a_part_is_written_into_the_job_file() -> None:
    part = setups(asked(1, 2), parse_fake("fake:devices=4"))[1]
    assert part.job_file("job")["roles"]["worker"]["devices"] == ["2", "3"]


def test_parts_are_named_as_the_mask_of_this_process_names_devices() -> None:
    node = Node("here", (0, 1), tuple(Device(f"GPU-{letter}", "gpu") for letter in "abc"))
    assert devices(setups(asked(1), Inventory((node,)))) == [("GPU-b",), ("GPU-c",)]


def test_ranks_of_any_number_take_all_gpus() -> None:
    assert len(setups(asked(MANY, least=2), parse_fake("fake:devices=8"))) == 1


@st.composite
def hosts(draw: st.DrawFn) -> Inventory:
    """A host with up to eight GPUs, which are near each other in any way."""
    count, numa = draw(st.integers(1, 8)), draw(st.integers(1, 2))
    homes = [draw(st.integers(0, numa - 1)) for _ in range(count)]
    near = {pair: draw(st.sampled_from(NEARNESS)) for pair in combinations(range(count), 2)}
    gpus = tuple(
        Device(
            str(one),
            "gpu",
            numa=homes[one],
            links=tuple(
                (str(other), near[min(one, other), max(one, other)]) for other in range(count) if other != one
            ),
        )
        for one in range(count)
    )
    nodes = tuple((number, tuple(range(number, 8, numa))) for number in range(numa))
    return Inventory((Node("host", tuple(range(8)), gpus, numa=nodes),))


@examples(40)
@given(hosts(), st.integers(1, 3), st.integers(1, 3))
def test_jobs_of_all_sets_get_different_gpus_and_no_more_sets_fit(
    host: Inventory, ranks: int, slots: int
) -> None:
    count, setup = len(host.nodes[0].devices), asked(ranks, slots)
    if count < ranks * slots:
        with pytest.raises(PlacementError):
            setups(setup, host)
        return
    found = setups(setup, host)
    assert len(found) == count // (ranks * slots)
    placed = [_planned(each, host) for each in found]
    assert placed[1:] == devices(found)
    assert len({device for each in placed for device in each}) == len(found) * ranks * slots


def test_more_trials_than_gpus_suffice_for_is_an_error_that_says_how_many_do() -> None:
    with pytest.raises(UsageError, match=r"max_concurrent=4, and there are known to be GPUs for 3; leave it"):
        setups(asked(2), parse_fake("fake:devices=7"), 4)
    with pytest.raises(UsageError, match="for 1"):
        setups(asked(2), None, 2)


@pytest.mark.parametrize("option", ["--hosts", "--hostfile", "--slurm", "--nnodes"])
def test_what_other_hosts_have_is_not_known(option: str) -> None:
    assert inventory_of(Setup(1, 1, "none", options=(option, "2"))) is None
    assert len(setups(asked(1), None)) == len(setups(asked(1, device=None), None)) == 1


def test_the_inventory_is_this_host_s_or_the_simulated_one() -> None:
    fake = Setup(1, 1, "none", options=("--inventory", "fake:devices=3"))
    assert inventory_of(fake) == parse_fake("fake:devices=3")
    assert inventory_of(Setup(1, 1, "none", options=("--inventory", "fake:nodes=2"))) is None
    here = inventory_of(Setup(1, 1, "none"))
    assert here is not None
    assert here.nodes[0].cpus


def test_another_trainer_has_the_same_settings_and_a_directory_of_its_own() -> None:
    trainer = Trainer(2, "none", logdir="/runs/", env={"A": "1"}, max_failures=7)
    other = another(trainer)
    assert (other._setup, other._max_failures) == (trainer._setup, 7)
    assert other._logdir.startswith("/runs/")
    assert len({trainer._logdir, other._logdir, another(trainer)._logdir}) == 3
    assert another(Trainer(1))._logdir == ""


def test_another_trainer_has_nothing_of_what_the_first_one_has_begun() -> None:
    kept = {"_setup", "_decode", "_max_failures", "_retry", "_grow_every", "_hook", "_kind"}
    trainer, begun = Trainer(2, "none", logdir="/runs"), object()
    trainer._hook, trainer._kind = dict, list
    for name in vars(trainer).keys() - kept - {"_logdir"}:
        setattr(trainer, name, begun)
    other, new = vars(another(trainer)), vars(Trainer(2, "none"))
    assert {name for name in kept if other[name] is not getattr(trainer, name)} == set()
    assert {name: other[name] for name in new.keys() - kept - {"_logdir", "_trainables"}} == {
        name: new[name] for name in new.keys() - kept - {"_logdir", "_trainables"}
    }
    assert len(other["_trainables"]) == 0


def test_functions_run_with_few_threads_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert with_threads(before + 2, torch.get_num_threads)() == before + 2
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        with_threads(before + 2, lambda config: 1 // config)(0)
    assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert with_threads(before + 2, torch.get_num_threads)() == before


def test_a_function_with_few_threads_takes_what_it_took() -> None:
    def function(config: int) -> int:
        return config + 1

    limited = with_threads(1, function)
    assert limited(1) == 2
    assert limited.__name__ == "function"
    assert list(inspect.signature(limited).parameters) == ["config"]
    assert not inspect.signature(with_threads(1, lambda: 1)).parameters
