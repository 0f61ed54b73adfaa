"""Certificates, users and passwords: access, and the errors without it."""

from __future__ import annotations

import subprocess
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.store.backends import read
from tests.contract.store.certificates import Authority, openssl
from tests.contract.store.etcd_server import EtcdCluster
from tests.waiting import eventually
from unirun.errors import StoreError, StoreRefused
from unirun.rendezvous.store.protocol import PASSWORD_VARIABLE, Put
from unirun.rendezvous.store.url import open_store

PASSWORD = "correct horse battery staple"


@dataclass(frozen=True)
class Secure:
    """An etcd that requires a client certificate of `authority`."""

    servers: EtcdCluster
    authority: Authority

    def url(self, **options: Any) -> str:
        return self.servers.url(**{"cacert": self.authority.cert, "timeout": 5, **options})


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    cert, key = authority.sign("server")
    flags = ("--client-cert-auth", "--cert-file", str(cert), "--key-file", str(key))
    servers = EtcdCluster(folder, flags=(*flags, "--trusted-ca-file", str(authority.cert)), scheme="https")
    yield Secure(servers, authority)
    servers.stop()


def test_a_client_with_a_certificate_is_admitted_by_etcd(secure: Secure) -> None:
    cert, key = secure.authority.sign("client")
    store = open_store(secure.url(cert=cert, key=key))
    watch = store.watch("", store.get_prefix("").revision + 1)
    store.txn([], [Put("a", "1")])
    assert len(read(watch, lambda seen: len(seen) == 1)) == 1
    store.close()


def test_a_client_without_a_certificate_is_told_to_add_one(secure: Secure) -> None:
    with pytest.raises(StoreRefused, match=r"wants a client certificate.*cert=FILE&key=FILE"):
        open_store(secure.url())


def test_an_expired_or_foreign_client_certificate_is_refused_by_etcd(secure: Secure, tmp_path: Path) -> None:
    expired = secure.authority.sign("expired", days=0)
    eventually(lambda: is_over(expired[0]))
    for cert, key in (expired, Authority(tmp_path).sign("foreign")):
        with pytest.raises(StoreRefused, match=rf"refuses the client certificate.*openssl x509.*{cert.name}"):
            open_store(secure.url(cert=cert, key=key))


def is_over(cert: Path) -> bool:
    check = ["openssl", "x509", "-checkend", "0", "-noout", "-in", str(cert)]
    return subprocess.run(check, capture_output=True, check=False).returncode != 0


def test_an_etcd_server_of_another_authority_is_not_trusted(secure: Secure, tmp_path: Path) -> None:
    cert, key = secure.authority.sign("client")
    with pytest.raises(StoreRefused, match=r"is not trusted.*cacert=… has to be who signed it"):
        open_store(secure.url(cacert=Authority(tmp_path).cert, cert=cert, key=key))


def test_an_etcd_certificate_for_another_host_is_not_trusted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("elsewhere", host="10.11.12.13")
    servers = EtcdCluster(tmp_path, flags=("--cert-file", str(cert), "--key-file", str(key)), scheme="https")
    try:
        with pytest.raises(StoreRefused, match=r"not valid for '127.0.0.1'.*name the host"):
            open_store(servers.url(cacert=authority.cert))
    finally:
        servers.stop()


def test_a_mismatch_of_tls_and_plaintext_is_reported(secure: Secure, etcd: EtcdCluster) -> None:
    with pytest.raises(StoreRefused, match=r"speaks TLS, and the store's URL does not.*add cacert=FILE"):
        open_store(secure.servers.url())
    with pytest.raises(StoreRefused, match=r"does not speak TLS.*leave cacert=… out"):
        open_store(etcd.url(cacert=secure.authority.cert))


def test_invalid_tls_files_are_named(secure: Secure, tmp_path: Path) -> None:
    cert, key = secure.authority.sign("client")
    _, another = secure.authority.sign("another")
    with pytest.raises(StoreRefused, match="nowhere.pem.*cannot be read"):
        open_store(secure.url(cacert=tmp_path / "nowhere.pem"))
    with pytest.raises(StoreRefused, match=r"another.key: .*not a certificate with its key"):
        open_store(secure.url(cert=cert, key=another))
    with pytest.raises(StoreRefused, match=r"client.key: not a certificate authority"):
        open_store(secure.url(cacert=key))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd with the users root (all permissions) and alice (/alice/ only); tokens last 2 s."""
    folder = tmp_path_factory.mktemp("auth")
    openssl("genrsa", "-out", str(folder / "jwt.key"), "2048")
    openssl("rsa", "-in", str(folder / "jwt.key"), "-pubout", "-out", str(folder / "jwt.pub"))
    token = f"jwt,pub-key={folder / 'jwt.pub'},priv-key={folder / 'jwt.key'},sign-method=RS256,ttl=2s"
    servers = EtcdCluster(folder, flags=("--auth-token", token))
    open_store(servers.url()).close()
    servers.ctl("user", "add", f"root:{PASSWORD}")
    servers.ctl("user", "add", f"alice:{PASSWORD}")
    servers.ctl("user", "grant-role", "root", "root")
    servers.ctl("role", "add", "hers")
    servers.ctl("role", "grant-permission", "--prefix=true", "hers", "readwrite", "/alice/")
    servers.ctl("user", "grant-role", "alice", "hers")
    servers.ctl("auth", "enable")
    yield servers
    servers.stop()


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)


def alice(servers: EtcdCluster, **options: Any) -> str:
    return servers.url(**{"prefix": "/alice/", "user": "alice", "timeout": 5, **options})


@pytest.mark.usefixtures("password")
def test_an_etcd_user_continues_when_its_token_expires(guarded: EtcdCluster) -> None:
    store = open_store(alice(guarded))
    watch = store.watch("", store.get_prefix("").revision + 1)
    lease = store.grant(30)
    end = time.monotonic() + 3.5
    count = 0
    while time.monotonic() < end:  # longer than a token lasts
        store.txn([], [Put("a", str(count), lease)])
        store.keep_alive(lease)
        count += 1
        time.sleep(0.05)
    assert len(read(watch, lambda seen: len(seen) == count)) == count
    late = store.watch("", store.get_prefix("").revision + 1)
    store.revoke(lease)
    assert len(read(late, lambda seen: len(seen) == 1)) == 1
    store.close()


@pytest.mark.usefixtures("password")
def test_an_etcd_user_continues_after_a_restart_of_the_server(guarded: EtcdCluster) -> None:
    store = open_store(alice(guarded, timeout=20))
    watch = store.watch("", store.get_prefix("").revision + 1)
    [member] = guarded.members
    member.kill()
    guarded.start(member)
    # A read is repeated over a new connection; a write that is lost with the old one would be of unknown outcome.
    assert store.get("b") is None
    assert store.txn([], [Put("b", "1")]).succeeded
    assert len(read(watch, lambda seen: len(seen) == 1)) == 1
    store.close()


@pytest.mark.usefixtures("password")
def test_a_missing_etcd_permission_is_reported_with_the_grant_command(guarded: EtcdCluster) -> None:
    with pytest.raises(
        StoreRefused, match=r"does not let alice.*grant-permission ROLE readwrite --prefix=true /bob/"
    ):
        open_store(alice(guarded, prefix="/bob/"))


def test_a_wrong_etcd_password_is_refused_and_never_shown(
    guarded: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "hunter2")
    with pytest.raises(StoreRefused, match="does not know the user alice with this password") as caught:
        open_store(alice(guarded))
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.usefixtures("password")
def test_the_repr_of_an_open_etcd_store_has_no_password(guarded: EtcdCluster) -> None:
    store = open_store(alice(guarded))
    cluster = vars(store)["_cluster"]
    assert PASSWORD not in store.url + repr(vars(store)) + repr(vars(cluster))
    store.close()


def test_an_etcd_server_with_auth_requires_a_user(guarded: EtcdCluster) -> None:
    with pytest.raises(StoreRefused, match="wants a user.*add user=NAME"):
        open_store(guarded.url(timeout=5))


@pytest.mark.usefixtures("password")
def test_an_etcd_server_without_auth_refuses_a_user(etcd: EtcdCluster) -> None:
    with pytest.raises(StoreRefused, match="knows no users.*leave user=… out"):
        open_store(etcd.url(user="alice", timeout=5))


@pytest.mark.usefixtures("password")
def test_a_watch_reports_a_revoked_etcd_permission(guarded: EtcdCluster) -> None:
    store = open_store(alice(guarded))
    guarded.ctl("--user", f"root:{PASSWORD}", "role", "revoke-permission", "--prefix=true", "hers", "/alice/")
    try:
        with pytest.raises(StoreRefused, match="grant-permission"):
            store.get("a")
        watch = store.watch("", 1)
        with pytest.raises(StoreError, match="grant-permission"):
            watch.changes(10)
    finally:
        guarded.ctl(
            "--user",
            f"root:{PASSWORD}",
            "role",
            "grant-permission",
            "--prefix=true",
            "hers",
            "readwrite",
            "/alice/",
        )
        store.close()
