"""A probe is one question to a program, in few words; each fault of it says what to write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import Fault
from unirun.spec.job import Probe, read_probe
from unirun.spec.read import Section


def read(value: Any, key: str = "ready") -> tuple[Probe | None, list[Fault]]:
    role = Section({key: value}, "roles.engine")
    return read_probe(role, key), role.faults


def faults(value: Any, key: str = "ready") -> list[str]:
    return [f"{fault.where}: {fault.problem}; {fault.remedy}" for fault in read(value, key)[1]]


REMEDY = "write http://{addr}/health, tcp, {log: REGEX}, {file: PATH} or {command: [WORD, …]}"


class TestQuestions:
    @pytest.mark.parametrize(
        ("value", "probe"),
        [
            ("http://{addr}/health", Probe("http", ("http://{addr}/health",))),
            ({"http": "http://{addr}/health"}, Probe("http", ("http://{addr}/health",))),
            ("tcp", Probe("tcp")),
            ("tcp://{host}:{ports.dist}", Probe("tcp", ("{host}:{ports.dist}",))),
            ({"tcp": True}, Probe("tcp")),
            ({"tcp": ""}, Probe("tcp")),
            ({"tcp": "{addr}"}, Probe("tcp", ("{addr}",))),
            ({"tcp": "tcp://{addr}"}, Probe("tcp", ("{addr}",))),
            ({"log": "startup (is )?complete"}, Probe("log", ("startup (is )?complete",))),
            ({"file": "/tmp/ready-{rank}"}, Probe("file", ("/tmp/ready-{rank}",))),
            ({"command": ["curl", "-m", 3, "{addr}"]}, Probe("command", ("curl", "-m", "3", "{addr}"))),
            ({"command": "true"}, Probe("command", ("true",))),
        ],
    )
    def test_questions_have_a_kind_and_words(self, value: Any, probe: Probe) -> None:
        assert read(value) == (probe, [])

    def test_questions_are_left_out_with_null(self) -> None:
        assert read(None) == (None, [])

    def test_questions_are_shown_in_words(self) -> None:
        assert str(Probe("tcp")) == "tcp"
        assert str(Probe("command", ("curl", "-sf"))) == "command curl -sf"

    def test_questions_of_alive_have_times(self) -> None:
        value = {"http": "http://{addr}/", "every": 2, "misses": "5", "timeout": 0.5}
        assert read(value, "alive") == (Probe("http", ("http://{addr}/",), 2.0, 5, 0.5), [])
        assert read("http://{addr}/", "alive") == (Probe("http", ("http://{addr}/",)), [])
        usual = Probe("http")
        assert (usual.every, usual.misses, usual.timeout) == (10.0, 3, 5.0)


class TestFaults:
    @pytest.mark.parametrize("value", ["https://{addr}/", "{addr}", "", "http", "ready"])
    def test_faults_are_other_texts(self, value: str) -> None:
        assert faults(value) == [f"roles.engine.ready: {value!r} is no probe; {REMEDY}"]

    @pytest.mark.parametrize("value", [3, ["tcp"], False])
    def test_faults_are_other_values(self, value: Any) -> None:
        assert faults(value) == [f"roles.engine.ready: expected a probe, found {value!r}; {REMEDY}"]

    def test_faults_are_no_question_and_two(self) -> None:
        assert faults({}) == [f"roles.engine.ready: it asks nothing; {REMEDY}"]
        assert faults({"log": "x", "file": "y"}) == [f"roles.engine.ready: log and file are given; {REMEDY}"]

    def test_faults_are_unknown_keys_and_times_of_ready(self) -> None:
        assert faults({"tcp": True, "port": 3})[0].startswith("roles.engine.ready.port: unknown key")
        (fault,) = faults({"tcp": True, "every": 3})
        assert fault.startswith("roles.engine.ready.every: unknown key")

    @pytest.mark.parametrize("kind", ["http", "log", "file", "command"])
    def test_faults_are_empty_questions(self, kind: str) -> None:
        assert f"roles.engine.ready.{kind}: it is empty; " in faults({kind: ""})
        assert f"roles.engine.ready.{kind}: it is empty; " in faults({kind: []})

    @pytest.mark.parametrize("kind", ["http", "tcp", "log", "file"])
    def test_faults_are_several_words_but_for_a_command(self, kind: str) -> None:
        words = ["http://a:1", "b:1"] if kind == "http" else ["a:1", "b:1"]
        assert faults({kind: words}) == [f"roles.engine.ready.{kind}: expected one text, found 2; "]

    def test_faults_are_urls_of_other_protocols(self) -> None:
        assert faults({"http": "https://{addr}/"}) == [
            "roles.engine.ready.http: 'https://{addr}/' is no URL of plain HTTP; "
            "write http://{addr}/health; for other protocols name a command"
        ]

    @pytest.mark.parametrize(
        "url", ["http://localhost:99999/", "http://[::1/", "http://{host}:http/", "http:///x"]
    )
    def test_faults_are_urls_without_a_host_or_with_no_port_of_tcp(self, url: str) -> None:
        remedy = "write http://{addr}/health, or http://{host}:8000/health"
        assert faults(url) == [f"roles.engine.ready: {url!r} names no host and port; {remedy}"]
        assert faults({"http": url}) == [f"roles.engine.ready.http: {url!r} names no host and port; {remedy}"]

    @pytest.mark.parametrize(
        "addr", ["localhost", "8000", "localhost:http", "localhost:70000", "localhost:0", ":80"]
    )
    def test_faults_are_addresses_without_a_host_or_with_no_port_of_tcp(self, addr: str) -> None:
        remedy = "write tcp, or tcp://{host}:{ports.NAME}"
        assert faults(f"tcp://{addr}") == [f"roles.engine.ready: {addr!r} names no host and port; {remedy}"]
        assert faults({"tcp": addr}) == [f"roles.engine.ready.tcp: {addr!r} names no host and port; {remedy}"]

    def test_faults_are_no_regular_expressions(self) -> None:
        (fault,) = faults({"log": "(x"})
        assert fault.startswith("roles.engine.ready.log: '(x' is no regular expression: ")

    def test_faults_of_alive_are_logs_and_times_that_are_too_short(self) -> None:
        assert faults({"log": "x"}, "alive") == [
            "roles.engine.alive.log: a line of output does not say that a program still answers; ask over http or tcp"
        ]
        found = faults({"tcp": True, "every": 0, "misses": 0, "timeout": -1}, "alive")
        assert [fault.partition(":")[0] for fault in found] == [
            "roles.engine.alive.every",
            "roles.engine.alive.misses",
            "roles.engine.alive.timeout",
        ]

    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("htp:/{}[]0a.", max_size=12),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from(["http", "tcp", "log", "every", "x"]), inner, max_size=2)
        ),
        max_leaves=4,
    )

    @given(values, st.sampled_from(["ready", "alive"]))
    def test_faults_or_a_probe_come_of_any_value(self, value: Any, key: str) -> None:
        probe, found = read(value, key)
        assert (probe is None) <= (bool(found) or value is None)
