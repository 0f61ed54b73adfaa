"""Lists of hosts as users, hostfiles and Slurm have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.launcher.hostlist import MOST_HOSTS, Host, compress, expand_nodelist, parse_hosts, read_hostfile

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)
NUMBERED = st.builds("{}{}".format, st.sampled_from(["n", "gpu-", "r1n", "a.b"]), st.integers(0, 120))
PADDED = st.builds("n{:0{}d}".format, st.integers(0, 1200), st.integers(1, 4))


def test_hosts_have_users_and_slots_as_written() -> None:
    assert parse_hosts("h1,h2:4,user@h3, user@h4:8") == (
        Host("h1", "h1"),
        Host("h2", "h2", 4),
        Host("h3", "user@h3"),
        Host("h4", "user@h4", 8),
    )


def test_a_range_of_hosts_has_the_user_and_the_slots_of_its_item() -> None:
    assert parse_hosts("me@n[09-10]:2") == (Host("n09", "me@n09", 2), Host("n10", "me@n10", 2))


def test_ipv6_addresses_stand_in_brackets() -> None:
    assert parse_hosts("[fd00::1]:4,me@[::1]") == (Host("fd00::1", "fd00::1", 4), Host("::1", "me@::1"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("h1,h1", "h1 is there twice"),
        ("h1,me@h1:2", "h1 is there twice"),
        ("me@h1:2,h1", "h1 is there twice"),
        ("n[1-3],n2", "n2 is there twice"),
        ("h1:", "number of slots"),
        ("h1:0", "number of slots"),
        ("h1:four", "number of slots"),
        ("h1:22:4", "no host"),
        ("fd00::1", "no host"),
        ("[fd00::zz]", "no IPv6 address"),
        ("@h1", "no host"),
        ("a b@h1", "no host"),
        ("-oProxyCommand=sh", "no name of a host"),
        ("h1;reboot", "no name of a host"),
        ("n[1-", "a bracket is not closed"),
        ("n]1[", "brackets do not match"),
        ("n[[1]]", "brackets do not match"),
        ("n[]", "no range"),
        ("n[3-1]", "no range"),
        ("n[a-b]", "no range"),
        ("n[0-99999999]", "too many numbers"),
        ("n[1-40000,1-40000]", "too many numbers"),
        ("n[1-999]m[1-999]", "stands for 998001 hosts"),
    ],
)
def test_what_is_wrong_with_a_list_of_hosts_is_said(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hosts(text)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("--hosts")


@pytest.mark.parametrize(
    "text",
    [
        "# Open MPI\nh1 slots=4 max_slots=8\n\nme@h2 max-slots=4 slots=2  # comment\nh3\n",
        "h1:4\nme@h2:2\nh3",
        "h1 slots=4\r\nme@h2 slots=2\r\nh3\r\n",
        "h1:4,me@h2:2\nh3",
    ],
)
def test_a_hostfile_has_the_form_of_open_mpi_mpich_or_deepspeed(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text, newline="")
    assert read_hostfile(tmp_path / "hosts") == (
        Host("h1", "h1", 4),
        Host("h2", "me@h2", 2),
        Host("h3", "h3"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("h1\nh2 slots=many", "hosts:2: 'slots=many' is not known"),
        ("h1 4", "hosts:1: '4' is not known"),
        ("h1:4 slots=2", "hosts:1: h1 has 4 slots and slots=2"),
        ("h1\nh1 slots=4", "h1 is there twice"),
        ("# nothing\n", "names no host"),
        ("h1\n-x", "hosts:2: '-x' is no name of a host"),
    ],
)
def test_what_is_wrong_with_a_hostfile_is_said_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert problem in str(caught.value)


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no text"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-3,07-10],gpu5", "n1 n2 n3 n07 n08 n09 n10 gpu5"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("n[1-2]-ib0", "n1-ib0 n2-ib0"),
        ("login,n[2,4]", "login n2 n4"),
    ],
)
def test_a_node_list_is_expanded_as_by_scontrol_show_hostnames(text: str, names: str) -> None:
    assert expand_nodelist(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("n1 n2 n3", "n[1-3]"),
        ("n1 n2 n4", "n[1-2,4]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n8 n9 n10", "n[8-10]"),
        ("n9 n010", "n[9,010]"),
        ("a n1 b", "a,n1,b"),
    ],
)
def test_names_are_compressed_to_ranges(names: str, text: str) -> None:
    assert compress(names.split()) == text


@given(st.lists(st.one_of(NAMES, NUMBERED, PADDED), min_size=1, max_size=30))
@example(["n9", "n10", "n010", "n11"])
@example(["n99", "n100", "n0"])
def test_compressed_names_expand_to_the_same_in_the_same_order(names: list[str]) -> None:
    assert expand_nodelist(compress(names)) == tuple(names)


@given(
    st.lists(
        st.builds(
            Host,
            st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True),
            st.just(""),
            st.one_of(st.none(), st.integers(1, 999)),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda host: host.name,
    )
)
def test_hosts_are_read_as_they_are_written(hosts: list[Host]) -> None:
    text = ",".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)
    assert [(host.name, host.slots) for host in parse_hosts(text)] == [(h.name, h.slots) for h in hosts]


@given(st.text(alphabet="n1209[]-,:@. \n#=", max_size=24) | st.text(max_size=12))
@example("n[0-99999]")
@example("n[1-2]" * 20)
def test_any_text_is_a_list_of_hosts_or_refused(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert 0 < len(hosts) <= MOST_HOSTS
    assert all(not host.target.startswith("-") and not set(host.target) & set(" \n;'\"$") for host in hosts)
