"""Unusable stores: the command soon reports the cause first, with a remedy."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store.certificates import Authority
from tests.contract.store.etcd_server import EtcdCluster
from tests.waiting import WAIT_TIMEOUT, eventually
from unirun.observe.jobdir import JobDir
from unirun.observe.status import read_status
from unirun.rendezvous.election import job_prefix
from unirun.rendezvous.store.protocol import PASSWORD_VARIABLE, Put
from unirun.rendezvous.store.url import open_store

from .harness import EXEC, Result, Unirun


def refused(
    unirun: Unirun,
    store: str,
    code: int,
    *words: str,
    env: dict[str, str] | None = None,
    ways: tuple[tuple[str, ...], ...] = ((), ("-d",)),
) -> Result:
    """Run a job with this store, in the foreground and detached: both print the same, and nothing else."""
    script = unirun.root / "never.py"
    script.write_text("print('never')")
    for detach in ways:
        result = unirun(*EXEC, *detach, "--store", store, script, env=env)
        assert (result.code, result.out) == (code, ""), result.err
        said = [line for line in result.err.splitlines() if "logs in" not in line]
        for word in words:
            assert word in "\n".join(said)
        assert all(line.startswith("unirun: ") for line in said), result.err
        assert words[0] in said[0], "the cause comes first"
        assert "Traceback" not in result.err
        assert len({*said}) == len(said), "nothing is said twice"
        unirun.assert_nothing_left()
    return result


class TestAUrl:
    """`tests/unit/cli/test_refusals.py` has others."""

    def test_an_invalid_store_url_is_refused_before_anything_is_created(self, unirun: Unirun) -> None:
        refused(
            unirun, "store.db", 2, "begins with sqlite: or etcd://", "write sqlite:PATH or etcd://HOST:PORT"
        )
        assert not (unirun.home / "jobs").exists()


class TestAFile:
    def test_a_store_file_that_is_no_database_is_reported(self, unirun: Unirun) -> None:
        path = unirun.root / "notes.txt"
        path.write_text("Dear diary, " * 1000)
        refused(unirun, f"sqlite:{path}", 4, f"{path} is no SQLite database", "name a new file")
        assert path.read_text().startswith("Dear diary"), "it is left as it was"

    def test_a_missing_directory_of_the_store_is_reported(self, unirun: Unirun) -> None:
        refused(
            unirun, "sqlite:nowhere/store.db", 4, "there is no directory", "make it, or name another file"
        )

    def test_an_unwritable_directory_of_the_store_is_reported(
        self, unirun: Unirun, read_only: Path | None
    ) -> None:
        if read_only is None:
            pytest.skip("nothing can be mounted here")
        refused(
            unirun,
            f"sqlite:{read_only / 'store.db'}",
            4,
            "cannot be opened: Read-only file system",
            "name another file",
        )

    def test_a_full_disk_of_the_store_is_reported(self, unirun: Unirun, full: Path | None) -> None:
        if full is None:
            pytest.skip("nothing can be mounted here")
        refused(unirun, f"sqlite:{full / 'store.db'}", 4, "full", "free some space")

    @pytest.fixture
    def read_only(self, tmp_path: Path) -> Iterator[Path | None]:
        with mounted(tmp_path / "ro", "ro,size=256k") as where:
            yield where

    @pytest.fixture
    def full(self, tmp_path: Path) -> Iterator[Path | None]:
        with mounted(tmp_path / "full", "size=64k") as where:
            if where is not None:
                with contextlib.suppress(OSError):
                    (where / "ballast").write_bytes(b"x" * 65536)
            yield where


@contextlib.contextmanager
def mounted(where: Path, options: str) -> Iterator[Path | None]:
    """A separate file system, None where it cannot be mounted."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "none", str(where)]
    done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield where if done else None
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=WAIT_TIMEOUT)


class TestAnEtcd:
    def test_an_unreachable_etcd_is_reported(self, unirun: Unirun) -> None:
        url = "etcd://127.0.0.1:1?timeout=1"
        said = "etcd at 127.0.0.1:1 has not answered for 1 s"
        refused(unirun, url, 4, said, "127.0.0.1:1: unavailable: connection refused; see", "etcdctl endpoint")
        for each in (unirun.home / "jobs").iterdir():
            status = read_status(JobDir(each))
            assert (status.phase, status.code, status.reason) == ("failed", 4, said)

    def test_a_foreign_prefix_in_etcd_is_reported(self, unirun: Unirun, etcd: EtcdCluster) -> None:
        store = open_store(etcd.url(prefix="/other/"))
        store.txn([], [Put(f"{job_prefix('mine')}lead/epoch", "tomorrow")])
        store.close()
        script = unirun.root / "never.py"
        script.write_text("print('never')")
        result = unirun(*EXEC, "--rdzv-id", "mine", "--store", etcd.url(prefix="/other/"), script)
        assert (result.code, result.out) == (4, ""), result.err
        assert "epoch holds 'tomorrow', which no unirun has written" in result.err
        assert "choose another one" in result.err

    def test_an_etcd_that_refuses_the_certificate_is_reported(self, unirun: Unirun, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.sign("server")
        flags = ("--client-cert-auth", "--cert-file", str(cert), "--key-file", str(key))
        servers = EtcdCluster(
            tmp_path, flags=(*flags, "--trusted-ca-file", str(authority.cert)), scheme="https"
        )
        try:
            mine, my_key = authority.sign("expired", days=0)
            eventually(lambda: is_over(mine))
            url = servers.url(cacert=authority.cert, cert=mine, key=my_key, timeout=5)
            refused(unirun, url, 4, "refuses the client certificate", "openssl x509", str(mine))
            url = servers.url(cacert=authority.cert, timeout=5)
            refused(unirun, url, 4, "wants a client certificate", "cert=FILE&key=FILE", ways=((),))
        finally:
            servers.stop()

    def test_an_etcd_that_refuses_the_password_is_reported(self, unirun: Unirun, tmp_path: Path) -> None:
        servers = EtcdCluster(tmp_path)
        try:
            open_store(servers.url()).close()
            servers.ctl("user", "add", "root:right")
            servers.ctl("user", "grant-role", "root", "root")
            servers.ctl("auth", "enable")
            url = servers.url(user="root", timeout=5)
            wrong = {PASSWORD_VARIABLE: "hunter2"}
            result = refused(
                unirun,
                url,
                4,
                "does not know the user root with this password",
                "etcdctl user list",
                env=wrong,
            )
            assert "hunter2" not in result.err
            refused(unirun, url, 2, "the store's user root has no password", PASSWORD_VARIABLE, ways=((),))
            refused(unirun, servers.url(timeout=5), 4, "wants a user", "user=NAME", ways=((),))
        finally:
            servers.stop()


def is_over(cert: Path) -> bool:
    check = ["openssl", "x509", "-checkend", "0", "-noout", "-in", str(cert)]
    return subprocess.run(check, capture_output=True, check=False).returncode != 0


class TestAnotherJobOfTheSameId:
    @pytest.fixture
    def other(self, unirun: Unirun) -> Unirun:
        """Another user, with their own home."""
        (unirun.root / "other").mkdir()
        return Unirun(unirun.root / "other")

    def test_a_second_job_on_the_same_store_runs(self, unirun: Unirun, other: Unirun) -> None:
        script = unirun.root / "wait.py"
        script.write_text("import signal; print('up', flush=True); signal.pause()")
        options = (*EXEC, "--rdzv-id", "mine", "--store", f"sqlite:{unirun.root / 'shared.db'}")
        job = unirun.start(*options, script)
        job.lines("up$")
        for detach in ((), ("-d",)):
            result = other(*options, *detach, script)
            assert result.code == 2, result.err
            assert (
                "unirun: job mine is running; stop it with unirun stop, or choose another --rdzv-id"
                in result.err
            )
        other.assert_nothing_left()
        assert unirun.status()["phase"] == "running"
        assert unirun("stop").code == 0
        eventually(lambda: job.popen.poll() is not None, "it ends")
        replaced = unirun.root / "short.py"
        replaced.write_text("")
        assert other(*options, replaced).code == 0, "one that has ended is replaced"
