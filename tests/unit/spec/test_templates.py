"""Names in braces become what is known when a process starts; all other braces are text, and stay."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from unirun.spec.job import Entry, Probe, RoleSpec
from unirun.spec.programs import (
    NOBODY,
    OWN_NAMES,
    Own,
    Places,
    faults_of,
    fill,
    fill_roles,
    names_in,
    texts_of,
)
from unirun.values import RankAddress


def program(
    name: str, count: int = 2, *, ports: tuple[str, ...] = ("http",), group: int | None = None
) -> RoleSpec:
    entry = Entry("program", "serve", ("--port", "{port}") if ports else ())
    return RoleSpec(name, count, entry, contract="none", ports=ports, group=group, service=True)


ENGINE = program("engine", 4, ports=("http", "dist"), group=2)
PLAIN = program("plain", 1, ports=())
SCRIPT = RoleSpec("train", 2, Entry("script", "train.py"))
ROLES = {role.name: role for role in (ENGINE, PLAIN, SCRIPT)}
PLACES: Places = {"engine": tuple(RankAddress(f"10.0.0.{n}", (20000 + n, 21000 + n)) for n in range(4))}


def filled(text: str, role: str = "engine", rank: int = 0, places: Places = PLACES) -> str:
    own = Own(role, rank, ROLES[role].count, "10.9.9.9", node_rank=rank, nodes=7)
    return fill(text, own, ROLES, places)


def faults(text: str, role: RoleSpec = ENGINE) -> list[str]:
    role = replace(role, entry=replace(role.entry, args=(text,)))
    found = [*faults_of(role, {**ROLES, role.name: role})]
    assert all(fault.where == f"roles.{role.name}.args" for fault in found)
    return [f"{fault.problem}; {fault.remedy}" for fault in found]


class TestNames:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("{rank} of {count}", "3 of 4"),
            ("{node_rank}/{nodes}", "3/7"),
            ("{host}", "10.0.0.3"),
            ("{port}", "20003"),
            ("{addr}", "10.0.0.3:20003"),
            ("{ports.http} {ports.dist}", "20003 21003"),
            ("{head} {group.head}", "10.0.0.2 10.0.0.2:20002"),
            ("http://{addr}/v1?rank={rank}", "http://10.0.0.3:20003/v1?rank=3"),
        ],
    )
    def test_names_of_a_program_are_its_own_rank_and_place(self, text: str, value: str) -> None:
        assert filled(text, rank=3) == value
        assert faults(text) == []

    @pytest.mark.parametrize("role", ["plain", "train"])
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("{roles.engine.host}", "10.0.0.0"),
            ("{roles.engine.port}", "20000"),
            ("{roles.engine.addr}", "10.0.0.0:20000"),
            ("{roles.engine.ports.dist}", "21000"),
            ("{roles.engine.hosts}", "10.0.0.0,10.0.0.2"),
            ("{roles.engine.addrs}", "10.0.0.0:20000,10.0.0.2:20002"),
        ],
    )
    def test_names_of_another_role_are_the_first_ranks_of_its_groups(
        self, role: str, text: str, value: str
    ) -> None:
        assert filled(text, role) == value
        assert faults(text, ROLES[role]) == []

    def test_names_of_a_program_are_text_in_a_script(self) -> None:
        text = "{rank} {port} {prot} {ports.http} {group.head}"
        assert filled(text, "train") == text
        assert faults(text, SCRIPT) == []

    def test_names_of_a_program_without_ports_are_its_rank_and_its_host(self) -> None:
        assert filled("{rank}/{count} on {host}, {head}", "plain") == "0/1 on 10.9.9.9, 10.9.9.9"

    def test_names_without_groups_have_rank_0_as_head(self) -> None:
        roles = {"engine": replace(ENGINE, group=None)}
        own = Own("engine", 3, 4)
        assert fill("{group.head} {head}", own, roles, PLACES) == "10.0.0.0:20000 10.0.0.0"
        assert fill("{roles.engine.hosts}", own, roles, PLACES).count(",") == 3

    def test_names_of_addresses_of_ipv6_have_brackets_and_hosts_have_none(self) -> None:
        places = {"engine": (RankAddress("fd00::1", (80, 81)), RankAddress("fd00::2", (82, 83)))}
        assert filled("{addr} {host}", places=places) == "[fd00::1]:80 fd00::1"
        assert filled("{group.head} {head}", rank=1, places=places) == "[fd00::1]:80 fd00::1"
        assert filled("{roles.engine.addrs}", "train", places=places) == "[fd00::1]:80"
        assert filled("{roles.engine.hosts}", "train", places=places) == "fd00::1"


class TestBraces:
    def test_braces_twice_are_the_text_of_a_name(self) -> None:
        assert filled("{{port}} {{roles.engine.addr}}") == "{port} {roles.engine.addr}"
        assert faults("{{port}} {{prot}} {{roles.nobody.addr}}") == []

    @given(st.sampled_from([*OWN_NAMES, "ports.dist", "roles.engine.addrs"]))
    def test_braces_twice_are_the_text_of_any_name(self, name: str) -> None:
        assert filled(f"{{{{{name}}}}}") == f"{{{name}}}"

    def test_braces_around_other_words_stay(self) -> None:
        text = "{} { port } {{other}} {a: 1} {x.y} {0} {$port} ${port} ${env:HOME} {roles}"
        assert filled(text) == text
        assert faults(text) == []

    def test_braces_of_json_around_a_name_stay(self) -> None:
        assert filled('{"a": {"port":{port}}}', rank=1) == '{"a": {"port":20001}}'
        assert filled('{"addrs":["{addr}"]}', rank=1) == '{"addrs":["10.0.0.1:20001"]}'
        assert filled("{{port}", rank=1) == "{20001"

    json_texts = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("ab {}:,\"'$.\\port", max_size=6),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text("p{}", max_size=3), inner, max_size=2)
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value, separators=(",", ":")))

    @given(json_texts)
    @example('{"tensor":{"size":{}}}')
    @example("{port:1}")
    def test_braces_of_json_without_a_known_name_stay_as_they_are(self, text: str) -> None:
        if not any(f"{{{name}}}" in text for name in OWN_NAMES):
            assert filled(text) == text
            assert faults(text) == []

    pieces = st.sampled_from(
        [*(f"{{{name}}}" for name in (*OWN_NAMES, "ports.dist", "roles.engine.addr")), "x", "{}", " "]
    )

    @given(st.lists(pieces, max_size=6))
    def test_braces_of_known_names_are_all_replaced(self, texts: list[str]) -> None:
        text = filled("".join(texts))
        assert not [*names_in([text])]
        assert text.count("{") == texts.count("{}")

    @given(st.text("{}. portsank$", max_size=20))
    def test_braces_of_any_text_are_filled_or_refused(self, text: str) -> None:
        assert faults(text) or isinstance(filled(text), str)


class TestFaults:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("{prot}", "{prot}: there is no such name; did you mean {port}? Write {{prot}} for the text itself"),
            ("{ports.htpt}", "{ports.htpt}: engine has no port of that name; did you mean 'http'?"),
            ("{ports.http.x}", "{ports.http.x}: engine has no port of that name; did you mean 'http'?"),
            ("{roles.engin.addr}", "{roles.engin.addr}: no role is called 'engin'; did you mean 'engine'?"),
            ("{roles.train.addr}", "{roles.train.addr}: train has no port, and so no address; write ports: [http] in train"),
            ("{roles.engine.adrs}", "{roles.engine.adrs}: there is no such name; did you mean 'addrs'?"),
            ("{roles.engine.ports.dst}", "{roles.engine.ports.dst}: engine has no port of that name; did you mean 'dist'?"),
            ("{roles.engine.ports}", "{roles.engine.ports}: there is no such name; did you mean 'port'?"),
            ("{roles.engine.addr.x}", "{roles.engine.addr.x}: there is no such name; did you mean 'addr'?"),
        ],
    )  # fmt: skip
    def test_faults_say_which_name_was_meant(self, text: str, problem: str) -> None:
        assert faults(text) == [problem]

    @pytest.mark.parametrize("name", ["port", "addr", "ports.http", "group.head"])
    def test_faults_are_names_of_ports_in_a_program_without_any(self, name: str) -> None:
        assert faults(f"{{{name}}}", PLAIN) == [f"{{{name}}}: plain has no port; write ports: [http]"]

    def test_faults_are_the_heads_of_several_ranks_without_ports_as_nobody_tells_their_hosts(self) -> None:
        assert faults("{head}", PLAIN) == []
        assert faults("{head}", replace(PLAIN, count=2)) == ["{head}: plain has no port; write ports: [http]"]

    def test_faults_have_the_key_in_which_they_are(self) -> None:
        role = replace(
            ENGINE,
            env={"A": "{prot}"},
            ready=Probe("http", ("http://{adr}/",)),
            alive=Probe("command", ("curl", "{hots}")),
        )
        where = [fault.where for fault in faults_of(role, ROLES)]
        assert where == ["roles.engine.env.A", "roles.engine.ready", "roles.engine.alive"]
        assert [key for key, _ in texts_of(role)] == ["args", "args", "env.A", "ready", "alive", "alive"]


def test_addresses_of_roles_stand_in_the_environment_of_the_job_too() -> None:
    engine = RoleSpec("engine", 1, Entry("program", "serve"), contract="none", ports=("http",))
    roles = {"engine": engine}
    places = {"engine": (RankAddress("h", (1,)),)}
    assert fill_roles("http://{roles.engine.addr}/{port}", roles, places) == "http://h:1/{port}"
    everybody = replace(NOBODY, env={"A": "{roles.engin.addr}", "B": "{port}"})
    assert [fault.where for fault in faults_of(everybody, roles)] == ["env.A"]


def test_ranks_of_a_script_with_ports_are_told_theirs() -> None:
    """Arguments of other scripts stay as they are: a torchrun script may have its own use of braces."""
    script = RoleSpec("a", 1, Entry("script", "a.py", ("{port}", "{rank}")))
    served = replace(script, ports=("http",))
    for role, expected in ((script, ["{port}", "{rank}"]), (served, ["7", "0"])):
        places = {"a": (RankAddress("h", (7,)),)} if role.ports else {}
        assert [fill(text, Own("a", 0, 1, "h"), {"a": role}, places) for text in role.entry.args] == expected
