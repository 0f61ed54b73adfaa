from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unirun.cli import run
from unirun.cli.commandline import parse
from unirun.cli.compose import job_spec, node_count, several_nodes
from unirun.cli.run import hosts_of, invite_of, last_call, run_on_hosts, with_token
from unirun.collocation import Inventory, Node
from unirun.errors import JobError, UsageError
from unirun.spec.job import JobSpec
from unirun.wire.address import TcpAddress
from unirun.wire.messages import Invite

HERE = Inventory((Node("n0", (0, 1)),))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNIRUN_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    return tmp_path


def spec_of(*argv: str) -> JobSpec:
    line = parse([*argv, "train.py"])
    return job_spec(line, HERE, {}, nodes=node_count(line.options))


def invite(*argv: str) -> Invite:
    options = parse([*argv, "train.py"]).options
    spec = spec_of(*argv)
    return with_token(options, spec, invite_of(options, spec, node_count(options)[1]))


@pytest.mark.parametrize(
    ("argv", "several"),
    [
        ([], False),
        (["--nnodes", "1"], False),
        (["--nnodes", "1:4"], False),
        (["--nnodes", "1:4", "--rdzv-endpoint", "h:1"], True),
        (["--nnodes", "2"], True),
        (["--nnodes", "2", "--standalone"], False),
        (["--nnodes", "2", "--inventory", "fake:nodes=2"], False),
        (["--hosts", "h1"], True),
        (["--hostfile", "f"], True),
    ],
)
def test_several_nodes_are_named_or_counted(argv: list[str], several: bool) -> None:
    assert several_nodes(parse([*argv, "train.py"]).options) is several


class TestRanksOnEachNode:
    def test_a_role_without_a_number_has_its_ranks_on_each_node_as_under_torchrun(self) -> None:
        (role,) = spec_of("--nnodes", "3", "--nproc-per-node", "4", "--rdzv-endpoint", "h").roles
        assert (role.count, role.least, role.per_node) == (12, 12, 4)

    def test_the_least_number_of_nodes_gives_the_least_number_of_ranks(self) -> None:
        (role,) = spec_of("--nnodes", "2:4", "--nproc-per-node", "cpu", "--rdzv-endpoint", "h").roles
        assert (role.count, role.least, role.per_node) == (8, 4, 2)

    def test_a_number_is_that_of_all_nodes(self) -> None:
        (role,) = spec_of("--nnodes", "3", "--roles", "actor=6", "--rdzv-endpoint", "h").roles
        assert (role.count, role.least, role.per_node) == (6, None, None)

    def test_where_nodes_meet_is_no_address_of_a_store(self) -> None:
        spec = spec_of("--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:29400", "--master-port", "29500")
        assert (spec.master_addr, spec.master_port) == ("127.0.0.1", 0)


class TestWhereNodesMeet:
    @pytest.mark.parametrize(
        ("argv", "place"),
        [
            (["--rdzv-endpoint", "127.0.0.1:4000"], ("127.0.0.1", 4000)),
            (["--rdzv-endpoint", "127.0.0.1"], ("127.0.0.1", 29400)),
            (["--rdzv-endpoint", "[::1]:4000"], ("::1", 4000)),
            (["--rdzv-endpoint", "[::1]"], ("::1", 29400)),
            (["--master-addr", "127.0.0.1", "--master-port", "4001"], ("127.0.0.1", 4001)),
            (["--master-addr", "127.0.0.1"], ("127.0.0.1", 29500)),
        ],
    )
    def test_the_head_is_named_as_under_torchrun(self, argv: list[str], place: tuple[str, int]) -> None:
        found = invite("--nnodes", "2", *argv)
        assert found.head == TcpAddress(*place, "")
        assert found.leads

    def test_node_rank_0_is_the_head_wherever_the_endpoint_is(self) -> None:
        assert invite("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "198.51.100.1:1").leads

    def test_another_rank_is_no_head_though_it_is_on_its_host(self) -> None:
        argv = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:1")
        assert not invite_of(parse([*argv, "train.py"]).options, spec_of(*argv), 2).leads

    def test_the_times_to_come_are_those_of_the_options(self) -> None:
        conf = ("--rdzv-conf", "join_timeout=7,last_call_timeout=3")
        argv = ("--nnodes", "1:2", "--rdzv-endpoint", "127.0.0.1", *conf)
        options = parse([*argv, "train.py"]).options
        assert (node_count(options), spec_of(*argv).join_timeout, last_call(options)) == ((1, 2), 7.0, 3.0)

    def test_a_local_address_is_the_interface_of_this_node(self) -> None:
        found = invite("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", "--local-addr", "[::1]")
        assert found.interface == "::1"

    def test_jobs_that_meet_elsewhere_have_other_tokens_of_one_secret(self, folder: Path) -> None:
        ports = [invite("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}").token for port in (1, 2, 1)]
        assert ports[0] == ports[2] != ports[1]
        assert (folder / "home" / "token").stat().st_mode & 0o777 == 0o600

    def test_a_secret_that_others_can_read_is_refused(self, folder: Path) -> None:
        (folder / "secret").write_text("ab" * 32)
        (folder / "secret").chmod(0o644)
        with pytest.raises(JobError, match="can be read by others"):
            invite("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", "--token-file", "secret")

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (
                [],
                "nothing says where the nodes meet; name the head on each of them: --rdzv-endpoint HOST:PORT",
            ),
            (["--rdzv-endpoint", "127.0.0.1:none"], "'none' is no port"),
            (["--rdzv-endpoint", "127.0.0.1:0"], "'0' is no port"),
            (["--rdzv-endpoint", ":29400"], "':29400' names no host; write --rdzv-endpoint HOST:PORT"),
            (["--rdzv-endpoint", "fd00::1"], "'fd00::1' names no host"),
            (["--rdzv-endpoint", "[]:29400"], "'[]:29400' names no host"),
            (["--rdzv-endpoint", "127.0.0.1", "--node-rank", "2"], "--node-rank 2: expected 0 to 1"),
            (["--rdzv-endpoint", "127.0.0.1", "--rdzv-backend", "etcd-v2"], "only static and c10d apply"),
            (["--rdzv-endpoint", "127.0.0.1", "--node-name", "a/b"], "'a/b' is no name of a node"),
        ],
    )
    def test_what_cannot_be_is_refused(self, argv: list[str], says: str) -> None:
        with pytest.raises(UsageError) as caught:
            invite("--nnodes", "2", *argv)
        assert says in str(caught.value)


class TestHosts:
    def test_hosts_are_named_or_in_a_file(self, folder: Path) -> None:
        (folder / "hosts").write_text("h1 slots=2\nuser@h2\n")
        named: dict[str, Any] = {"hosts": "h1:2,user@h2"}
        assert hosts_of(named) == hosts_of({"hostfile": "hosts"})

    def test_hosts_exclude_each_other_and_a_command_on_each(self) -> None:
        with pytest.raises(UsageError, match="--hosts and --hostfile exclude each other"):
            hosts_of({"hosts": "h1", "hostfile": "f"})
        with pytest.raises(UsageError, match="--rdzv-endpoint is for a command on each node"):
            hosts_of({"hosts": "h1", "rdzv_endpoint": "h1:1"})

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"hosts": "h1", "stdin": "a:0"}, "--stdin: a worker on another host has no terminal"),
            ({"hosts": "h1", "inventory": "fake:nodes=2"}, "--inventory: the nodes of this job are real"),
        ],
    )
    def test_what_hosts_cannot_have_is_refused(self, options: dict[str, Any], says: str) -> None:
        with pytest.raises(UsageError) as caught:
            run_on_hosts(parse(["train.py"]), options)
        assert says in str(caught.value)

    @pytest.mark.parametrize("more", [(), ("--nnodes", "2")])
    @pytest.mark.parametrize("option", ["--sync", "--pre-check"])
    def test_an_option_for_hosts_that_ssh_reaches_is_refused_without_them(
        self, option: str, more: tuple[str, ...]
    ) -> None:
        with pytest.raises(
            UsageError, match=f"{option} is for hosts that are reached by ssh; name them: --hosts"
        ):
            run.main([option, *more, "train.py"])
