"""The odd one out is named, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.launcher.doctor.sample_reports import (
    BANDWIDTH,
    RTT,
    healthy_hosts,
    host_names,
    links,
    with_facts,
    with_host,
)
from unirun.launcher.doctor.judge import AllReduce, Clock, Examination, Link, bad_hosts, findings

COUNTS = st.integers(3, 9)
ANOTHER = {
    "python": "3.12",
    "torch": "2.12.0",
    "unirun": "0.0.9",
    "driver": "560.2",
    "gpus": ("NVIDIA H100",) * 7,
}


@given(st.integers(1, 9))
def test_nothing_is_wrong_with_hosts_that_are_alike(count: int) -> None:
    assert findings(healthy_hosts(count)) == ()


@given(COUNTS, st.data())
def test_a_version_that_one_host_has_alone_is_named_with_that_host(count: int, data: st.DataObject) -> None:
    odd, field = data.draw(st.sampled_from(host_names(count))), data.draw(st.sampled_from([*ANOTHER]))
    [finding] = findings(with_facts(healthy_hosts(count), odd, **{field: ANOTHER[field]}))
    assert finding.hosts == (odd,)


def test_a_minority_of_versions_is_named_with_what_the_others_have() -> None:
    found = healthy_hosts(5)
    for odd in ("h2", "h4"):
        found = with_facts(found, odd, torch="2.12.0")
    [finding] = findings(found)
    assert finding.hosts == ("h2", "h4")
    assert finding.problem == "torch 2.12.0, the others have 2.13.0"


def test_without_a_majority_all_hosts_are_named_and_none_is_bad() -> None:
    found = with_facts(healthy_hosts(2), "h2", torch="2.12.0")
    [finding] = findings(found)
    assert finding.problem == "torch differs: 2.13.0 on h1, 2.12.0 on h2"
    assert bad_hosts(found) == {}


@given(COUNTS, st.data(), st.floats(0.5, 1e6), st.sampled_from([1, -1]))
def test_a_clock_that_differs_is_named(count: int, data: st.DataObject, off: float, sign: int) -> None:
    odd = data.draw(st.sampled_from(host_names(count)))
    all_off = data.draw(st.floats(-1e3, 1e3))  # the command's own clock may be the wrong one
    found = healthy_hosts(count)
    for name in host_names(count):
        clock = Clock(all_off + (sign * off if name == odd else 0.0), 1e-3)
        found = with_host(found, name, clock=clock)
    [finding] = findings(found)
    assert finding.hosts == (odd,)
    assert ("ahead of" if sign > 0 else "behind") in finding.problem


def test_a_clock_is_not_named_when_the_question_took_longer_than_it_differs() -> None:
    assert findings(with_host(healthy_hosts(3), "h2", clock=Clock(0.5, 0.3))) == ()


NOISE = st.floats(0.9, 1.1)


@given(COUNTS, st.data())
def test_noise_makes_no_host_odd(count: int, data: st.DataObject) -> None:
    found = links(
        host_names(count),
        lambda one, other: Link(one, other, RTT * data.draw(NOISE), BANDWIDTH * data.draw(NOISE)),
    )
    assert findings(replace(healthy_hosts(count), links=found)) == ()


@given(COUNTS, st.data(), st.floats(4.0, 1e3), st.sampled_from(["sends", "receives"]))
def test_a_host_that_sends_or_receives_slowly_is_named(
    count: int, data: st.DataObject, factor: float, verb: str
) -> None:
    odd = data.draw(st.sampled_from(host_names(count)))

    def link(one: str, other: str) -> Link:
        slow = odd == (one if verb == "sends" else other)
        return Link(one, other, RTT, BANDWIDTH * data.draw(NOISE) / (factor if slow else 1.0))

    [finding] = findings(replace(healthy_hosts(count), links=links(host_names(count), link)))
    assert finding.hosts == (odd,)
    assert finding.problem.startswith(verb)
    assert not finding.stops


@given(COUNTS, st.data(), st.floats(4.0, 1e3))
def test_a_host_with_slow_round_trips_is_named(count: int, data: st.DataObject, factor: float) -> None:
    odd = data.draw(st.sampled_from(host_names(count)))

    def link(one: str, other: str) -> Link:
        return Link(one, other, RTT * (factor if odd in (one, other) else 1.0), 0.0)

    [finding] = findings(replace(healthy_hosts(count), links=links(host_names(count), link)))
    assert finding.hosts == (odd,)
    assert finding.problem.startswith("a round trip takes")


def test_of_two_kinds_of_hosts_none_is_odd() -> None:
    """Four hosts in one rack and four in another, with a slow network between the racks."""

    def link(one: str, other: str) -> Link:
        far = (int(one[1:]) <= 4) != (int(other[1:]) <= 4)
        return Link(one, other, RTT * (20 if far else 1), BANDWIDTH / (20 if far else 1))

    assert findings(replace(healthy_hosts(8), links=links(host_names(8), link))) == ()


@given(COUNTS, st.data())
def test_a_host_that_nobody_reaches_explains_all_broken_links(count: int, data: st.DataObject) -> None:
    odd = data.draw(st.sampled_from(host_names(count)))

    def link(one: str, other: str) -> Link:
        return Link(one, other, problem="timed out") if odd in (one, other) else Link(one, other, RTT)

    found = replace(healthy_hosts(count), links=links(host_names(count), link))
    [finding] = findings(found)
    assert finding.hosts == (odd,)
    assert [*bad_hosts(found)] == [odd]


@given(st.integers(3, 9), st.data())
def test_the_hosts_that_are_left_all_reach_each_other(count: int, data: st.DataObject) -> None:
    broken = data.draw(
        st.sets(st.tuples(st.sampled_from(host_names(count)), st.sampled_from(host_names(count))))
    )

    def link(one: str, other: str) -> Link:
        return Link(one, other, problem="timed out" if {(one, other), (other, one)} & broken else "")

    found = replace(healthy_hosts(count), links=links(host_names(count), link))
    named = {host for finding in findings(found) for host in finding.hosts}
    assert not [each for each in found.links if each.problem and not {each.source, each.target} & named]


def test_of_two_hosts_that_do_not_reach_each_other_the_later_one_is_named() -> None:
    def link(one: str, other: str) -> Link:
        return Link(one, other, problem="refused" if {one, other} == {"h2", "h3"} else "")

    [finding] = findings(replace(healthy_hosts(4), links=links(host_names(4), link)))
    assert finding.hosts == ("h3",)
    assert finding.problem == "no connection between h3 and h2: refused"


def test_a_host_that_was_not_reached_is_bad_with_the_reason() -> None:
    found = with_host(
        healthy_hosts(2), "h1", facts=None, clock=None, problem="Connection refused", remedy="start sshd"
    )
    found = replace(found, links=())
    assert str(findings(found)[0]) == "h1: Connection refused; start sshd"
    assert bad_hosts(found) == {"h1": "Connection refused"}


@pytest.mark.parametrize(
    ("facts", "problem"),
    [({"shm": 64 << 20}, "/dev/shm has 67 MB"), ({"open_files": 256}, "a process may open 256 files")],
)
def test_a_limit_that_is_too_low_is_named_and_does_not_stop_a_job(
    facts: dict[str, float], problem: str
) -> None:
    found = with_facts(healthy_hosts(3), "h2", **facts)
    assert [(each.hosts, each.problem) for each in findings(found)] == [(("h2",), problem)]
    assert bad_hosts(found) == {}


@pytest.mark.parametrize(("sharing", "odd"), [(3, 0), (2, 1), (1, 0)])
def test_a_directory_is_shared_by_all_or_by_none(sharing: int, odd: int) -> None:
    found = healthy_hosts(3)
    for name in host_names(3)[sharing:]:
        found = with_host(found, name, shared=("home",))
    assert [each.hosts for each in findings(found)] == [("h3",)] * odd


def test_an_all_reduce_that_failed_names_who_failed_and_not_who_waited() -> None:
    problems = {"h1": "timed out waiting for h3", "h2": "Connection timeout", "h3": "cannot bind"}
    failed = AllReduce("gloo", ("h1", "h2", "h3"), problems=problems)
    [finding] = findings(replace(healthy_hosts(3), all_reduces=(failed,)))
    assert (finding.hosts, finding.problem) == (("h3",), "gloo all_reduce failed: cannot bind")


def test_an_all_reduce_in_which_all_waited_names_all() -> None:
    failed = AllReduce("nccl", ("h1", "h2"), problems=dict.fromkeys(("h1", "h2"), "timed out"))
    [finding] = findings(replace(healthy_hosts(2), all_reduces=(failed,)))
    assert finding.hosts == ("h1", "h2")


def test_no_facts_at_all_are_no_error() -> None:
    assert findings(Examination(())) == ()
