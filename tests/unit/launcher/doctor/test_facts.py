"""The facts that a host tells of itself."""

from __future__ import annotations

import resource
import socket

import pytest

from unirun.launcher.doctor.probe import (
    ImportTorch,
    Inspect,
    Inspected,
    PortOpened,
    ProbeServer,
    own_address,
    read_facts,
)


def test_the_address_is_that_of_the_named_interface() -> None:
    assert own_address("lo", None) == "127.0.0.1"


def test_the_address_is_the_one_from_which_the_head_is_reached() -> None:
    assert own_address(None, "127.0.0.1") == "127.0.0.1"


def test_the_facts_of_this_host() -> None:
    facts = read_facts("lo", None)
    assert facts.hostname == socket.gethostname()
    assert (facts.address, facts.interface) == ("127.0.0.1", "lo")
    assert facts.python.count(".") == 1
    assert facts.torch
    assert facts.memory >= facts.shm > 0


def test_the_limit_of_open_files_is_the_one_that_processes_get() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert read_facts("lo", None).open_files == soft - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_probe_looks_at_its_host_again_when_it_learns_how_the_head_is_reached() -> None:
    probe = ProbeServer()
    first = probe.answer(Inspect("lo", None))
    again = probe.answer(Inspect(None, None))
    assert isinstance(first, Inspected)
    assert isinstance(again, Inspected)
    assert again.facts is first.facts
    assert again.now >= first.now
    other = probe.answer(Inspect(None, "127.0.0.2"))
    assert isinstance(other, Inspected)
    assert (other.facts is first.facts, other.facts.address) == (False, own_address(None, "127.0.0.2"))


@pytest.mark.leaves
def test_a_probe_keeps_the_store_of_its_latest_job_only() -> None:
    """Another host may be the first of the next one."""
    probe = ProbeServer()
    probe.answer(Inspect("lo", None))
    opened = probe.answer(ImportTorch(store=True))
    assert isinstance(opened, PortOpened)
    socket.create_connection(("127.0.0.1", opened.port)).close()
    assert probe.answer(ImportTorch(store=False)) == PortOpened(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", opened.port))
