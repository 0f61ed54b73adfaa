"""The ``channels`` of a job file."""

from __future__ import annotations

from typing import Any

import pytest

from unirun.spec.job import ChannelSpec, read_channels
from unirun.spec.read import Section

ROLES = ("actor", "rollout", "critic")


def read(channels: Any) -> tuple[tuple[ChannelSpec, ...], list[str]]:
    """The channels, and the faults."""
    job = Section({"channels": channels})
    found = read_channels(job, ROLES)
    return found, [str(fault) for fault in job.faults]


def test_a_channel_goes_from_one_role_to_others() -> None:
    found, faults = read({"policy": {"publisher": "actor", "receivers": ["rollout", "critic"]}})
    assert found == (ChannelSpec("policy", "actor", ("rollout", "critic")),)
    assert faults == []


def test_without_channels_there_are_none() -> None:
    assert read(None) == ((), [])


@pytest.mark.parametrize(
    ("about", "fault"),
    [
        ({}, "channels.policy.publisher: it names no role; write publisher: ROLE"),
        ({"publisher": "actor"}, "channels.policy.receivers: it names no role; write receivers: [ROLE]"),
        (
            {"publisher": "actr", "receivers": ["rollout"]},
            "channels.policy.publisher: no role is called 'actr'",
        ),
        (
            {"publisher": "actor", "receivers": ["rolout"]},
            "channels.policy.receivers: no role is called 'rolout'",
        ),
        ({"publisher": "actor", "receivers": ["actor"]}, "channels.policy.receivers: a role is named twice"),
        ({"publisher": "actor", "receivers": ["rollout"], "to": 1}, "channels.policy.to: unknown key"),
    ],
)
def test_faults_have_their_place_and_a_remedy(about: dict[str, Any], fault: str) -> None:
    assert [text for text in read({"policy": about})[1] if text.startswith(fault)]


def test_a_name_begins_with_a_letter() -> None:
    assert "channels.9 lives: '9 lives' is no name of a channel" in read({"9 lives": {}})[1][0]
