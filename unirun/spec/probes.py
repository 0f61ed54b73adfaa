"""Probes: the questions that tell whether a program is ready, and whether it still answers.

::

    ready: "http://{addr}/health"             # answered with a status of 2xx
    ready: tcp                                # its first port is listened on; tcp://{host}:{ports.dist} names another
    ready: {log: "startup complete"}          # a regular expression that a line of its output matches
    ready: {file: /tmp/ready-{rank}}          # the file exists
    ready: {command: [curl, -sf, "http://{addr}/"]}   # a command that ends with 0
    alive: {http: "http://{addr}/health", every: 10, misses: 3, timeout: 5}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from unirun.spec.read import Section, shown
from unirun.values import Value

ProbeKind = Literal["http", "tcp", "log", "file", "command"]
KINDS: tuple[ProbeKind, ...] = ("http", "tcp", "log", "file", "command")
TIMING = ("every", "misses", "timeout")
_REMEDY = "write http://{addr}/health, tcp, {log: REGEX}, {file: PATH} or {command: [WORD, …]}"

_NAMES = re.compile(r"\{([\w.-]+)\}")

READY_TIMEOUT = 1800.0
"""Default of ``ready_timeout`` in seconds: large models take a quarter of an hour to load from a network."""


class Probe(Value):
    """One question to a program. `words` is the URL, the address (empty: the first port), the regular expression or the
    path, alone; or a command and its arguments. They may have templates (`unirun.spec.templates`).

    Once the program is ready, the question of `alive` comes `every` so many seconds; after `misses` without an answer
    in a row the program is stopped. One answer may take `timeout` seconds.
    """

    kind: ProbeKind
    words: tuple[str, ...] = ()
    every: float = 10.0
    misses: int = 3
    timeout: float = 5.0

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.words)}".rstrip()


def read_probe(role: Section, key: str) -> Probe | None:
    """The probe at `key`; None without one. The faults are added to those of `role`."""
    value = role.fields.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return _from_text(role, key, value)
    if not isinstance(value, Mapping):
        role.fault(key, f"expected a probe, found {shown(value)}", _REMEDY)
        return None
    probe = role.section(key)
    probe.known((*KINDS, *(TIMING if key == "alive" else ())))
    given = [kind for kind in KINDS if probe.given(kind)]
    if len(given) != 1:
        problem = f"{' and '.join(given)} are given" if given else "it asks nothing"
        role.fault(key, problem, _REMEDY)
        return None
    return _timed(probe, _of_kind(probe, given[0]), key)


def _from_text(role: Section, key: str, text: str) -> Probe | None:
    if text == "tcp":
        return Probe("tcp")
    kind, _, rest = text.partition("://")
    if kind == "http" and rest:
        return _addressed(role, key, Probe("http", (text,)))
    if kind == "tcp" and rest:
        return _addressed(role, key, Probe("tcp", (rest,)))
    role.fault(key, f"{shown(text)} is no probe", _REMEDY)
    return None


def _addressed(section: Section, key: str, probe: Probe) -> Probe:
    """`probe`, of which the address has a host and, where it has a port, one that there is."""
    text = probe.words[0]
    # Any port, and any host with one, may stand where a name does.
    example = _NAMES.sub(
        lambda name: "h:1" if name[1].endswith("addr") or name[1] == "group.head" else "1", text
    )
    try:
        parts = urlsplit(example if probe.kind == "http" else f"//{example}")
        fits = bool(parts.hostname) and parts.port != 0 and (probe.kind == "http" or parts.port is not None)
    except ValueError:
        fits = False
    if not fits:
        remedy = "write http://{addr}/health, or http://{host}:8000/health"
        remedy = remedy if probe.kind == "http" else "write tcp, or tcp://{host}:{ports.NAME}"
        section.fault(key, f"{shown(text)} names no host and port", remedy)
    return probe


def _of_kind(probe: Section, kind: ProbeKind) -> Probe:
    words = () if probe.fields[kind] is True and kind == "tcp" else probe.texts(kind)
    if kind == "tcp":
        words = tuple(word.removeprefix("tcp://") for word in words if word not in ("true", ""))
    if kind != "command" and len(words) > 1:
        probe.fault(kind, f"expected one text, found {len(words)}")
    if kind != "tcp" and not any(words):
        probe.fault(kind, "it is empty")
    if kind == "http" and words and not words[0].startswith("http://"):
        remedy = "write http://{addr}/health; for other protocols name a command"
        probe.fault(kind, f"{shown(words[0])} is no URL of plain HTTP", remedy)
    elif kind in ("http", "tcp") and len(words) == 1 and words[0]:
        _addressed(probe, kind, Probe(kind, words))
    if kind == "log" and words:
        try:
            re.compile(words[0])
        except re.error as error:
            probe.fault(kind, f"{shown(words[0])} is no regular expression: {error}")
    return Probe(kind, words)


def _timed(probe: Section, found: Probe, key: str) -> Probe:
    if key != "alive":
        return found
    if found.kind == "log":
        probe.fault(
            "log", "a line of output does not say that a program still answers", "ask over http or tcp"
        )
    return Probe(
        found.kind,
        found.words,
        every=probe.seconds("every", found.every, 0.01),
        misses=probe.integer("misses", found.misses, 1),
        timeout=probe.seconds("timeout", found.timeout, 0.01),
    )
