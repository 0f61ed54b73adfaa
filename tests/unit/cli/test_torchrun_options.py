"""Every torchrun option lands where it should in the spec, or is refused with the reason."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters, static_tcp_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.run import get_args_parser

from tests.unit.cli.conftest import GPUS, Compose, same
from tests.unit.cli.torchrun_parsers import NEWEST, options_of
from unirun.cli.commandline import parse
from unirun.cli.compose import BETWEEN_NODES, ONE_NODE_OPTIONS, warnings
from unirun.errors import SpecError, UsageError

LANDS: dict[str, tuple[str | None, Callable[[Any], bool]]] = {
    "nnodes": ("1:1", lambda s: True),
    "nproc_per_node": ("2", lambda s: s.roles[0].count == 2),
    "rdzv_backend": ("c10d", lambda s: True),
    "rdzv_endpoint": ("127.0.0.2:29501", lambda s: (s.master_addr, s.master_port) == ("127.0.0.2", 29501)),
    "rdzv_id": ("run7", lambda s: s.run_id == "run7"),
    "rdzv_conf": ("join_timeout=7", lambda s: s.join_timeout == 7.0),
    "standalone": (None, lambda s: s.master_port == 0),
    "max_restarts": ("3", lambda s: s.roles[0].max_restarts == 3),
    "monitor_interval": ("0.5", lambda s: s.sample_interval == 0.5),
    "start_method": ("spawn", lambda s: s.roles[0].start_method == "exec"),
    "event_log_handler": ("console", lambda s: s.event_log == "console"),
    "role": ("trainer", lambda s: s.roles[0].name == "trainer"),
    "module": (None, lambda s: s.roles[0].entry.kind == "module"),
    "no_python": (None, lambda s: s.roles[0].entry.kind == "program"),
    "run_path": (None, lambda s: s.roles[0].entry.kind == "script" and s.roles[0].start_method == "fork"),
    "log_dir": ("some/logs", lambda s: s.log.dir == "some/logs"),
    "redirects": ("0:1,1:3", lambda s: s.log.redirects == "0:1,1:3"),
    "tee": ("3", lambda s: s.log.tee == "3"),
    "local_ranks_filter": ("0,2", lambda s: s.log.local_ranks_filter == (0, 2)),
    "duplicate_stdout_filters": ("loss,a,,b", lambda s: s.log.duplicate_stdout_filters == ("loss", "a,b")),
    "duplicate_stderr_filters": ("warn", lambda s: s.log.duplicate_stderr_filters == ("warn",)),
    "node_rank": ("0", lambda s: True),
    "master_addr": ("127.0.0.3", lambda s: s.master_addr == "127.0.0.3"),
    "master_port": ("29502", lambda s: s.master_port == 29502),
    "local_addr": ("127.0.0.4", lambda s: s.master_addr == "127.0.0.4"),
    "signals_to_handle": ("SIGTERM,SIGUSR1", lambda s: s.signals == ("SIGTERM", "SIGUSR1")),
    "shutdown_timeout": ("9", lambda s: s.shutdown_timeout == 9.0),
    "virtual_local_rank": (None, lambda s: s.virtual_local_rank),
    "log_line_prefix_template": ("${rank}: ", lambda s: s.log.line_prefix_template == "${rank}: "),
}
NOT_HERE = {"logs_specs", "numa_binding", "print_completion"}
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


class TestEveryTorchrunOption:
    def test_every_torchrun_option_of_every_version_has_a_case_here(self) -> None:
        assert options_of(NEWEST) == LANDS.keys() | NOT_HERE

    def test_the_record_of_the_installed_version_is_true(self) -> None:
        dests = {action.dest for action in get_args_parser()._actions if action.option_strings} - {"help"}
        assert dests == options_of((MAJOR, MINOR))

    @pytest.mark.parametrize("dest", LANDS)
    def test_a_torchrun_option_sets_its_field_of_the_spec(
        self, dest: str, compose: Compose, scripts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value, landed = LANDS[dest]
        (scripts / "tool").touch(0o755)
        monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
        argv = [f"--{dest.replace('_', '-')}", *([value] if value else [])]
        assert landed(compose(*argv, "tool"))

    @pytest.mark.parametrize("dest", LANDS)
    def test_a_torchrun_option_may_come_from_its_pet_variable(
        self, dest: str, compose: Compose, scripts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value, landed = LANDS[dest]
        (scripts / "tool").touch(0o755)
        monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
        assert landed(compose("tool", environ={f"PET_{dest.upper()}": value or "1"}))

    @pytest.mark.parametrize("option", ["--master-addr", "--local-addr"])
    def test_an_ipv6_address_may_stand_in_brackets(self, compose: Compose, option: str) -> None:
        for text in ("::1", "[::1]"):
            assert compose(option, text, "train.py").master_addr == "::1"

    @pytest.mark.parametrize("value", ["1", "1:1", "1:2", "1:64"])
    def test_one_node_is_enough_where_the_least_is_one(self, compose: Compose, value: str) -> None:
        assert same(compose("--nnodes", value, "train.py"), compose("train.py"))

    @pytest.mark.parametrize(
        "value",
        [
            "last_call_timeout=5",
            "close_timeout=1,read_timeout=3",
            "cas_backoff_max_seconds=0.5",
            "is_host=True",
            "store_type=TCP",
            "rank=0",
        ],
    )
    def test_settings_between_nodes_change_nothing_on_one(self, compose: Compose, value: str) -> None:
        plain = compose("train.py")
        assert same(compose("--rdzv-backend", "c10d", "--rdzv-conf", value, "train.py"), plain)
        mixed = compose("--rdzv-conf", f" {value} , join_timeout = 7 ", "train.py")
        assert mixed.join_timeout == 7.0

    @pytest.mark.parametrize(
        ("value", "ignored"),
        [
            ("'join_timeout=5,last_call_timeout=1,timeout=5'", "'join_timeout=5 and timeout=5' are ignored"),
            ('"join_timeout=5"', '"join_timeout=5" is ignored'),
        ],
    )
    def test_settings_with_quotes_that_no_shell_has_removed_are_ignored_with_a_warning(
        self, compose: Compose, value: str, ignored: str
    ) -> None:
        plain = compose("train.py")
        assert same(compose("--rdzv-conf", value, "train.py"), plain)
        (warning,) = warnings(parse(["--rdzv-conf", value, "train.py"]), plain, {})
        assert ignored in warning

    @pytest.mark.leaves
    def test_every_setting_that_torch_asks_for_is_known(self) -> None:
        """Of the backends that apply on one node. torch asks by name; whatever it asks for is in this record."""
        asked: set[str] = set()

        class Recorder(RendezvousParameters):
            def get(self, key: str, default: Any = None) -> Any:
                asked.add(key)
                return super().get(key, default)

        params = Recorder("c10d", "localhost:0", "run", 1, 1)
        backend, store = create_backend(params)
        create_handler(store, backend, params)
        asked |= set(
            re.findall(r'params\.config(?:\.get\(|\[)"(\w+)"', inspect.getsource(static_tcp_rendezvous))
        )
        assert asked >= {"join_timeout", "is_host", "timeout", "rank"}
        assert asked <= {"join_timeout", "timeout", *BETWEEN_NODES, *ONE_NODE_OPTIONS}

    def test_filters_are_split_as_torchrun_does(self, compose: Compose) -> None:
        for text in ("a", "a,b", "a,,b", ",,", "a,,,b", "a b,c"):
            theirs = get_args_parser().parse_args(["--duplicate-stdout-filters", text, "train.py"])
            ours = compose("--duplicate-stdout-filters", text, "train.py").log.duplicate_stdout_filters
            assert [*ours] == theirs.duplicate_stdout_filters

    def test_the_default_of_logs_specs_may_be_written(self, compose: Compose) -> None:
        assert same(compose("--logs-specs", "default", "train.py"), compose("train.py"))

    def test_an_empty_template_is_none(self, compose: Compose) -> None:
        """An empty template is the default of torchrun."""
        assert compose("--log-line-prefix-template=", "train.py").log.line_prefix_template is None

    def test_numa_binding_lands_on_a_host_with_devices(self, compose: Compose) -> None:
        assert compose("--numa-binding", "node", "train.py", inventory=GPUS).numa_binding == "node"


class TestWhatCannotApplyIsRefused:
    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--nnodes", "2:1"], "no more than MAX"),
            (["--nnodes", "0:1"], "at least 1"),
            (["--nnodes", "1:2:3"], "expected N or MIN:MAX"),
            (["--nnodes", "one"], "expected N or MIN:MAX"),
            (["--node-rank", "1"], "the rank of the node is 0"),
            (["--rdzv-backend", "etcd-v2"], "only static and c10d apply"),
            (["--rdzv-conf", "is_host=0"], "on one node only 1 applies"),
            (["--rdzv-conf", "store_type=file"], "on one node only tcp applies"),
            (["--rdzv-conf", "rank=1"], "on one node only 0 applies"),
            (["--rdzv-conf", "last_cal_timeout=1"], "did you mean 'last_call_timeout'"),
            (["--rdzv-conf", "last_call_timeout=soon"], "expected a whole number"),
            (["--rdzv-conf", "last_call_timeout"], "write key=value"),
            (["--rdzv-conf", "join_timeout="], "write key=value"),
            (["--logs-specs", "mine"], "has nothing to decide"),
            (["--numa-binding", "node"], "there are none"),
            (["-m", "--no-python"], "exclude each other"),
            (["-m", "--run-path"], "--run-path runs a file"),
        ],
    )
    def test_an_option_that_cannot_apply_is_refused_with_a_reason(
        self, compose: Compose, argv: list[str], says: str
    ) -> None:
        with pytest.raises(UsageError, match=says) as caught:
            compose(*argv, "train.py")
        assert caught.value.remedy
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--max-restarts", "many"], "roles.default.max_restarts: expected a whole number, found 'many'"),
            (["--max-restarts", "-1"], "from 0 to"),
            (["--nproc-per-node", "0"], "roles.default.count: expected a number from 1"),
            (["--nproc-per-node=-2"], "roles.default.count: expected a number from 1"),
            (["--redirects", "4"], "log.redirects: expected 0, 1, 2, 3 or RANK:N"),
            (["--local-ranks-filter", "a"], "log.local_ranks_filter: expected a whole number"),
            (["--signals-to-handle", "SIGFOO"], "'SIGFOO' is no signal"),
            (["--signals-to-handle", "SIGKILL"], "SIGKILL cannot be handled"),
            (["--shutdown-timeout", "-1"], "shutdown_timeout: expected a number of seconds"),
            (["--master-port", "70000"], "from 0 to 65535"),
            (["--rdzv-id", "../x"], "is no job id"),
            (["--primary", "other"], "no role is called 'other'"),
        ],
    )
    def test_a_wrong_value_of_an_option_is_refused_with_its_place(
        self, compose: Compose, argv: list[str], says: str
    ) -> None:
        with pytest.raises(SpecError, match=says):
            compose(*argv, "train.py")
