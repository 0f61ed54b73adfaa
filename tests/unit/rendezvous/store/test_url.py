"""Stores by URL: valid forms, and errors for invalid ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.rendezvous.store.protocol import PASSWORD_VARIABLE, EtcdAddress, SqliteAddress, parse_address
from unirun.rendezvous.store.sqlite import SqliteStore
from unirun.rendezvous.store.url import STORE_VARIABLE, anchored, open_store, store_url

hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)
endpoints = st.lists(
    st.builds("{}:{}".format, hosts, st.integers(1, 65535)), min_size=1, max_size=5, unique=True
)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def addresses(draw: st.DrawFn) -> EtcdAddress:
    tls = draw(st.sampled_from(["none", "server", "both"]))
    user = draw(st.none() | texts)
    return EtcdAddress(
        endpoints=tuple(draw(endpoints)),
        prefix=f"{draw(texts).rstrip('/')}/",
        timeout=draw(st.floats(0.001, 3600)),
        cacert=draw(texts) if tls != "none" else None,
        cert=draw(texts) if tls == "both" else None,
        key=draw(texts) if tls == "both" else None,
        user=user,
        password_file=draw(st.none() | texts) if user else None,
    )


@given(addresses())
def test_a_store_address_survives_str_and_parse(address: EtcdAddress) -> None:
    assert parse_address(str(address)) == address


@given(st.text())
def test_any_text_is_a_store_address_or_a_usage_error(text: str) -> None:
    for url in (text, f"etcd://{text}", f"etcd://h?{text}", f"sqlite:{text}"):
        try:
            address = parse_address(url)
        except UsageError as error:
            assert error.exit_code == 2
        else:
            assert isinstance(address, SqliteAddress) or address.prefix.endswith("/")


@given(st.text(st.characters(exclude_characters="@/?", exclude_categories=["Cs"]), min_size=4))
def test_a_password_in_a_store_url_is_refused_and_not_shown(password: str) -> None:
    secret = f"<{password}>"
    for url in (f"etcd://alice:{secret}@host", f"etcd://host?user=alice&password={secret.replace('&', '')}"):
        with pytest.raises(UsageError, match=f"{PASSWORD_VARIABLE}, or into a file") as caught:
            parse_address(url)
        assert secret not in str(caught.value)


def test_store_url_options_have_defaults() -> None:
    assert parse_address("etcd://h1,h2:1/") == EtcdAddress(("h1:2379", "h2:1"), "/unirun/", 5.0)
    assert parse_address("etcd://h?prefix=/x&timeout=1.5&cacert=%2Fetc%2Fca") == EtcdAddress(
        ("h:2379",), "/x/", 1.5, "/etc/ca"
    )
    assert parse_address("etcd://h?timeout=3600") == EtcdAddress(("h:2379",), timeout=3600.0)
    assert parse_address("sqlite:/var/lib/jobs.db") == SqliteAddress("/var/lib/jobs.db")
    assert parse_address("sqlite:///var/lib/jobs.db") == SqliteAddress("///var/lib/jobs.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "begins with sqlite: or etcd://; write sqlite:PATH or etcd://HOST:PORT"),
        ("redis://h", "begins with sqlite: or etcd://"),
        ("/var/lib/jobs.db", "begins with sqlite: or etcd://"),
        ("sqlite", "begins with sqlite: or etcd://"),
        ("etcd", "begins with sqlite: or etcd://"),
        ("sqlite:", "names no file"),
        ("sqlite://host/file", "a file is on no host"),
        ("sqlite:a.db?timeout=3", "sqlite: takes no options"),
        ("sqlite:a\0b", "no NUL"),
        ("etcd:h", "two slashes are missing"),
        ("etcd://", "URL: a host is missing; write HOST:PORT"),
        ("etcd://h1,,h2", "URL: a host is missing; write HOST:PORT"),
        ("etcd://h:0", "'h:0' is no host"),
        ("etcd://h:65536", "'h:65536' is no host"),
        ("etcd://h:x", "'h:x' is no host"),
        ("etcd://http://h:1", "is no host"),
        ("etcd://h,h:2379", "h:2379 is named twice"),
        ("etcd://h/jobs", r"a path /jobs follows the hosts; write \?prefix=/jobs"),
        ("etcd://h?prefix=", "prefix has no value"),
        ("etcd://h?prefix", "prefix has no value"),
        ("etcd://h?ttl=3", "no option 'ttl'; there are prefix, timeout"),
        ("etcd://h?user=a&user=b", "user is given twice"),
        ("etcd://h?timeout=0", "timeout=0 is no time"),
        ("etcd://h?timeout=nan", "timeout=nan is no time"),
        ("etcd://h?timeout=soon", "timeout=soon is no time"),
        ("etcd://h?timeout=3600.5", "timeout=3600.5 is no time"),
        ("etcd://h?password=x", "it has a password; put"),
        ("etcd://h?passwd=x", "it has a password; put"),
        ("etcd://h?pass=x", "it has a password; put"),
        ("etcd://h?prefix=\ud800", "prefix: it is no text; write it in UTF-8"),
        ("etcd://h?cacert=/tmp/\udcff", "cacert: it is no text; write it in UTF-8"),
        ("etcd://h?user=\udcff", "user: it is no text; write it in UTF-8"),
        ("etcd://h?cacert=a&cert=b", "cert is given, and key is not; add key=FILE"),
        ("etcd://h?cacert=a&key=b", "key is given, and cert is not; add cert=FILE"),
        ("etcd://h?cert=a&key=b", "a client certificate without cacert"),
        ("etcd://h?password_file=a", "password_file is given, and user is not"),
    ],
)
def test_an_invalid_store_url_is_refused_with_a_remedy(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_address(url)


def test_all_faults_of_a_store_url_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_address("etcd://h:x/jobs?ttl=3&timeout=0&cert=a")
    assert len(str(caught.value).splitlines()) == 6
    with pytest.raises(UsageError, match="(?s)'h:x' is no host.*a host is missing.*'g:0' is no host"):
        parse_address("etcd://h:x,,g:0,f")


def test_the_store_option_has_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    assert store_url(None) is None
    monkeypatch.setenv(STORE_VARIABLE, "sqlite:a")
    assert store_url(None) == "sqlite:a"
    assert store_url("sqlite:b") == "sqlite:b"


def test_a_sqlite_url_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store("sqlite:~/jobs.db")
    assert isinstance(store, SqliteStore)
    assert store.url == f"sqlite:{tmp_path}/jobs.db"
    store.close()


def test_an_etcd_user_needs_a_password_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    file = tmp_path / "password"
    url = f"etcd://127.0.0.1:1?user=alice&password_file={file}"
    with pytest.raises(UsageError, match=f"alice has no password; set {PASSWORD_VARIABLE}"):
        open_store("etcd://127.0.0.1:1?user=alice")
    with pytest.raises(UsageError, match="No such file or directory; name a file"):
        open_store(url)
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match=f"others may read .*; chmod 600 {file}"):
        open_store(url)
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        open_store(url)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is no text"):
        open_store(url)


@pytest.mark.starts_processes
@pytest.mark.parametrize("package", ["grpc", "google"])
def test_a_missing_store_package_is_named_with_its_extra(package: str) -> None:
    script = f"""
import sys
sys.modules[{package!r}] = None
from unirun.errors import UsageError
from unirun.rendezvous.store.url import open_store
try:
    open_store("etcd://127.0.0.1:1")
except UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "needs the package" in done.stdout
    assert "pip install 'torch-unirun[etcd]'" in done.stdout


@pytest.mark.starts_processes
def test_sqlite3_and_grpc_are_imported_when_a_store_is_opened() -> None:
    script = "import sys, unirun.rendezvous.store.url; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"sqlite3", "grpc", "google.protobuf", "torch"} & set(done.stdout.split())


class Etcd(ModuleType):
    """Replaces the module with the etcd store by one that lacks the package `missing` or returns its arguments."""

    def __init__(self, missing: str | None = None) -> None:
        super().__init__("unirun.rendezvous.store.etcd")
        self.missing = missing

    def __getattr__(self, name: str) -> object:
        if name == "EtcdStore" and self.missing is None:
            return lambda *arguments: arguments
        if name == "EtcdStore":
            raise ModuleNotFoundError(f"No module named {self.missing!r}", name=self.missing)
        raise AttributeError(name)


@pytest.mark.parametrize("missing", ["grpc", "grpc.aio", "google.protobuf", "zoneinfo", ""])
def test_a_missing_module_outside_the_etcd_extra_is_not_explained_away(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, "unirun.rendezvous.store.etcd", Etcd(missing))
    if missing.startswith("g"):
        with pytest.raises(UsageError, match=f"a store in etcd needs the package {missing}; pip install"):
            open_store("etcd://h")
    else:
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{missing}'"):
            open_store("etcd://h")


def given_to_etcd(address: EtcdAddress) -> object:
    """The arguments of the store, which `Etcd` has in its place."""
    return open_store(str(address))


def test_an_etcd_store_is_waited_for_as_long_as_the_caller_says_or_else_the_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "unirun.rendezvous.store.etcd", Etcd())
    for timeout in (None, 3.0):
        found: Any = open_store("etcd://h?timeout=7", timeout=timeout)
        assert found == (EtcdAddress(("h:2379",), timeout=timeout or 7.0), None)


@pytest.mark.parametrize(
    ("content", "password"), [("pass\n", "pass"), (" pass \n", " pass "), ("passX\n", "passX"), ("p", "p")]
)
def test_an_etcd_store_gets_the_password_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, password: str
) -> None:
    monkeypatch.setitem(sys.modules, "unirun.rendezvous.store.etcd", Etcd())
    file = tmp_path / "password"
    file.touch(0o600)
    file.write_text(content)
    monkeypatch.setenv(PASSWORD_VARIABLE, "from the environment")
    nobody = EtcdAddress(("h:2379",))
    alice = EtcdAddress(("h:2379",), user="alice")
    written = EtcdAddress(("h:2379",), user="alice", password_file=str(file))
    assert given_to_etcd(nobody) == (nobody, None)
    assert given_to_etcd(alice) == (alice, "from the environment")
    assert given_to_etcd(written) == (written, password)


class TestAnchored:
    def test_anchored_makes_paths_in_a_url_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/me")
        assert anchored("sqlite:jobs.db") == f"sqlite:{tmp_path}/jobs.db"
        assert anchored("sqlite:~/jobs.db") == "sqlite:/home/me/jobs.db"
        found = anchored("etcd://h?cacert=ca.pem&user=u&password_file=~/pw&prefix=/x")
        assert f"cacert={tmp_path}/ca.pem" in found
        assert "password_file=/home/me/pw" in found
        assert "prefix=/x/" in found

    @pytest.mark.parametrize("url", ["sqlite:/a/jobs.db", "etcd://h", "etcd://h:1,g?prefix=/x&timeout=3"])
    def test_anchored_keeps_a_url_without_relative_paths(self, url: str) -> None:
        assert anchored(url) == url

    def test_anchored_refuses_an_invalid_url(self) -> None:
        with pytest.raises(UsageError, match="begins with sqlite: or etcd://"):
            anchored("jobs.db")
