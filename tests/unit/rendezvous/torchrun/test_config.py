"""Parsing of ``--rdzv-conf`` and ``--rdzv-endpoint``."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirun.errors import UsageError
from unirun.rendezvous.store.protocol import parse_address
from unirun.rendezvous.torchrun.handler import Config, parse_config, store_address


def test_an_empty_rdzv_conf_has_torchs_defaults() -> None:
    # torchrun adds "timeout" by itself, for its static backend.
    assert parse_config({"timeout": 900}) == Config()
    assert parse_config({"timeout": 900, "read_timeout": "7"}) == Config(read_timeout=7)
    assert (Config().join_timeout, Config().last_call_timeout, Config().close_timeout) == (600, 30, 30)
    assert Config().silence == 15


def test_rdzv_conf_times_may_have_fractions() -> None:
    config = parse_config(
        {"last_call_timeout": "0.5", "keep_alive_interval": "1", "keep_alive_max_attempt": "2"}
    )
    assert config.last_call_timeout == 0.5
    assert config.silence == 2


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
def test_an_invalid_rdzv_conf_time_is_named(value: str) -> None:
    with pytest.raises(UsageError, match=f"join_timeout={value} is no number of seconds"):
        parse_config({"join_timeout": value})


@pytest.mark.parametrize("value", ["0", "1", "2.5", "many"])
def test_an_invalid_rdzv_conf_count_is_named(value: str) -> None:
    with pytest.raises(UsageError, match=f"keep_alive_max_attempt={value} is no whole number"):
        parse_config({"keep_alive_max_attempt": value})


def test_an_unknown_rdzv_conf_key_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no key 'ssl_cert'.*there are join_timeout, .*cacert, cert, key"):
        parse_config({"ssl_cert": "x"})


def test_a_missing_rdzv_conf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cacert={tmp_path / 'ca.pem'}: there is no such file"):
        parse_config({"cacert": str(tmp_path / "ca.pem")})


@pytest.mark.parametrize(
    ("given", "missing"),
    [("cert", "key"), ("key", "cert"), ("cert key", "cacert"), ("password_file", "user")],
)
def test_rdzv_conf_refuses_half_of_a_pair_of_options(tmp_path: Path, given: str, missing: str) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UsageError, match=f"and {missing} is not; add {missing}="):
        parse_config(dict.fromkeys(given.split(), str(file)))


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        ("", ["localhost:2379"]),
        ("h", ["h:2379"]),
        ("h1:1,h2", ["h1:1", "h2:2379"]),
        ("nodeX", ["nodeX:2379"]),
        ("[::1]:4001", ["[::1]:4001"]),
    ],
)
def test_an_rdzv_endpoint_has_one_member_or_several(endpoint: str, members: list[str]) -> None:
    assert list(store_address(endpoint, Config()).endpoints) == members


@pytest.mark.parametrize(
    "endpoint", ["http://h:2379", "h:x", "h:0", "h:99999", "a,,b", "h/p", "me:secret@h", "h?timeout=1"]
)
def test_an_invalid_rdzv_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint.*HOST:PORT"):
        store_address(endpoint, Config())


def test_rdzv_conf_options_are_in_the_store_address(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key", "pw"):
        (tmp_path / name).write_text("x")
    given = {
        "cacert": str(tmp_path / "ca"),
        "cert": str(tmp_path / "cert"),
        "key": str(tmp_path / "key"),
        "user": "me",
        "password_file": str(tmp_path / "pw"),
        "prefix": "/jobs",
        "heartbeat_timeout": "2",
    }
    address = store_address("h", parse_config(given))
    assert {**given, "prefix": "/jobs/", "heartbeat_timeout": 2.0} == {
        "heartbeat_timeout": address.timeout,
        **{name: getattr(address, name) for name in given if name != "heartbeat_timeout"},
    }
    assert parse_address(str(address)) == address


def test_an_rdzv_conf_prefix_ends_with_one_slash() -> None:
    for given in ("/jobs", "/jobs/", "/jobs//"):
        assert parse_config({"prefix": given}).prefix == "/jobs/"
    assert parse_config({"prefix": "/X"}).prefix == "/X/"
    assert parse_config({"prefix": "/a "}).prefix == "/a /"
