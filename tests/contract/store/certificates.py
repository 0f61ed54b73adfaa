"""A certificate authority for one test run, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.contract.store.etcd_server import program

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs certificates; all files are in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self.cert = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        openssl(
            *("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", str(self._key), "-out", str(self.cert)),
        )

    def sign(self, name: str, *, host: str = "127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        """The certificate `name` for a server at `host` or for a client, and its key."""
        cert, key, request, rules = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
        rules.write_text(f"subjectAltName=IP:{host}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", str(days), "-extfile", str(rules), "-out", str(cert)),
        )
        return cert, key


def openssl(*arguments: str) -> None:
    done = subprocess.run(
        [program("openssl"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
