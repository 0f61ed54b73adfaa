"""The report as people read it."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.launcher.doctor.sample_reports import healthy_hosts, host_names, links, with_host
from unirun.launcher.doctor.judge import AllReduce, Examination, Link, findings, lines


def text(found: Examination) -> str:
    return "\n".join(lines(found, findings(found)))


def test_hosts_that_are_alike() -> None:
    found = replace(healthy_hosts(2), all_reduces=(AllReduce("gloo", ("h1", "h2"), 0.0012),))
    assert (
        text(found)
        == """\
HOST  ADDRESS   PYTHON  TORCH   KERNEL  DRIVER  GPUS  CPUS  MEMORY    SHM       CLOCK
h1    10.0.0.1  3.11    2.13.0  6.1.0   570.1   8     64    549.8 GB  274.9 GB  +0.000 s ±0.0001
h2    10.0.0.1  3.11    2.13.0  6.1.0   570.1   8     64    549.8 GB  274.9 GB  +0.000 s ±0.0001

MB/S  h1    h2
h1    ·     1000
h2    1000  ·

RTT µS  h1   h2
h1      ·    100
h2      100  ·

working directory: shared by all hosts
$HOME: shared by all hosts
gloo all_reduce over 2 hosts: 1.2 ms for 1 MB

nothing is wrong"""
    )


def test_a_host_that_was_not_reached_has_no_column() -> None:
    found = with_host(
        healthy_hosts(3), "h2", facts=None, clock=None, shared=(), problem="refused", remedy="start sshd"
    )
    shown = text(replace(found, links=links(["h1", "h3"])))
    assert "h2    not reached" in shown
    assert "MB/S  h1    h3" in shown
    assert shown.endswith("! h2: refused; start sshd")


def test_what_was_not_measured_is_not_shown() -> None:
    shown = text(replace(healthy_hosts(3), links=()))
    assert "MB/S" not in shown
    short = text(
        replace(healthy_hosts(3), links=links(host_names(3), lambda one, other: Link(one, other, 1e-4)))
    )
    assert "MB/S" not in short
    assert "RTT µS  h1   h2   h3" in short


def test_a_pair_without_a_way_says_so() -> None:
    def link(one: str, other: str) -> Link:
        return Link(one, other, problem="refused") if "h3" in (one, other) else Link(one, other, 1e-4, 1e9)

    assert "h1    ·       1000    no way" in text(replace(healthy_hosts(3), links=links(host_names(3), link)))


def test_many_hosts_have_medians_in_their_lines_and_no_matrix() -> None:
    shown = text(healthy_hosts(20)).splitlines()
    assert shown[0].endswith("MB/S  RTT")
    assert shown[20].endswith("1000  100 µs")
    assert not [line for line in shown if line.startswith("RTT")]


def test_a_directory_that_some_hosts_share_is_told_with_them() -> None:
    shown = text(with_host(healthy_hosts(3), "h3", shared=()))
    assert "working directory: h1, h2 share it" in shown
    alone = with_host(with_host(healthy_hosts(3), "h3", shared=()), "h2", shared=())
    assert "working directory: not shared" in text(alone)
