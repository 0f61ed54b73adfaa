"""Channels of weights: from which role they go to which, as values and as people write them.

::

    channels:
      policy: {publisher: actor, receivers: [rollout, reference]}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unirun.spec.read import Section, nearest
from unirun.values import Value

KEYS = ("publisher", "receivers")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ChannelSpec(Value):
    """Weights go from the ranks of the role `publisher` to those of `receivers`."""

    name: str
    publisher: str
    receivers: tuple[str, ...]


def read_channels(job: Section, roles: Sequence[str]) -> tuple[ChannelSpec, ...]:
    """The ``channels`` of a job file with these roles. The faults are added to those of `job`."""
    channels = job.section("channels")
    found = []
    for name in channels.fields:
        if not _NAME.fullmatch(name):
            channels.fault(name, f"{name!r} is no name of a channel", "begin with a letter: policy")
        about = channels.section(name)
        about.known(KEYS)
        channel = ChannelSpec(name, about.text("publisher"), about.texts("receivers"))
        for key, named in (("publisher", (channel.publisher,)), ("receivers", channel.receivers)):
            if not named or named == ("",):
                about.fault(
                    key, "it names no role", f"write {key}: {'ROLE' if key == 'publisher' else '[ROLE]'}"
                )
                continue
            for role in named:
                if role not in roles:
                    about.fault(key, f"no role is called {role!r}", nearest(role, [*roles]))
        if len({channel.publisher, *channel.receivers}) <= len(channel.receivers):
            about.fault("receivers", "a role is named twice", "name each role once")
        found.append(channel)
    return tuple(found)
