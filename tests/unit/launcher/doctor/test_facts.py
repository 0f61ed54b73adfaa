"""The facts that a host tells of itself."""

from __future__ import annotations

import socket

from unirun.launcher.doctor.probe import own_address, read_facts


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
