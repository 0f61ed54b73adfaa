"""The guard of the page: a link whose token counts once, the cookie that it becomes, requests of this page alone. Pure.

Other users of the host, pages of other sites in the same browser, and names of other sites that point to this host (DNS
rebinding) get nothing.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from unirun.values import Value, natural

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a browser on this host may call the server. The port may be that of a tunnel."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer. The page runs no script but its own files, and asks no other host for anything."""


class Refusal(Value):
    """The answer to a request that is not let in."""

    code: int
    why: str


class Guard:
    """The secrets of one server. `scrape` is the token of programs that read metrics, which have no cookies."""

    def __init__(self, scrape: str) -> None:
        self._scrape = scrape
        self._session = secrets.token_urlsafe(32)
        self._link = ""

    def new_link(self) -> str:
        """A token that lets in the first that brings it. The one before does not count any more."""
        self._link = secrets.token_urlsafe(32)
        return self._link

    def takes(self, token: str) -> bool:
        """Return True if this is the token of the last link, and nobody has brought it before."""
        if not self._link or not _same(token, self._link):
            return False
        self._link = ""
        return True

    def cookie(self, port: int) -> str:
        """The header that makes a browser one that is let in."""
        return f"{_name(port)}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def refusal(self, method: str, headers: Mapping[str, str], port: int, *, metrics: bool) -> Refusal | None:
        """The reason why a request is not let in, None if it is. `headers` have lower-case names; `metrics`: it is one
        for metrics, which programs make."""
        if (refused := foreign(method, headers)) is not None:
            return refused
        kind, _, token = headers.get("authorization", "").partition(" ")
        if metrics and kind.lower() == "bearer" and _same(token, self._scrape):
            return None
        if _same(_cookie(headers.get("cookie", ""), _name(port)), self._session):
            return None
        return Refusal(401, "open the link that unirun dashboard has printed last: each link counts once")


def foreign(method: str, headers: Mapping[str, str], *, link: bool = False) -> Refusal | None:
    """The reason why a request may come from another site; None if it does not. A `link` may be followed from
    anywhere, as its token is what counts."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if natural(host.rpartition(":")[2]) is not None else host
    if name.lower() not in HOSTS:
        return Refusal(421, "this server has no such name: open it as 127.0.0.1 or localhost")
    if method not in ("GET", "HEAD"):
        return Refusal(405, "nothing can be changed here")
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return Refusal(403, "the request comes from another site")
    if not link and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return Refusal(403, "the request comes from another site")
    return None


def _name(port: int) -> str:
    # Cookies of one host are shared by all of its ports.
    return f"unirun-{port}"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(given: str, wanted: str) -> bool:
    """Compare two tokens in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
