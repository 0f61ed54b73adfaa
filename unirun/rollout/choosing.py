"""The choice of an engine for a request, and what follows when it has not answered. Pure: nothing here does anything.

The engine with the fewest requests in flight gets the next one, unless the `Policy` is another one. An engine that has
failed is doubted for a while, as it would always have the fewest. A request that an engine had not finished is sent
again, to another one if there is one. It is given up when the server says that the request is wrong, or when engines
have failed on it `attempts` times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any, Literal, get_args

import msgspec

from unirun.values import Engine, Value, WorkerId

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 2.0
"""Seconds for which an engine is doubted after its first failure in a row, and at most."""

PREFIX_LOAD = 1.1
"""Requests in flight to the engine that equal prompts are sent to, divided by those to the engine with the fewest, up
to which it gets another one. Those of one client count: with less than ten of these to each engine, all of them are
spread evenly, whatever other clients send."""

Policy = Literal["round_robin", "least_requests", "least_token_usage"]
"""The rule by which the engine for a request is chosen: the one whose turn is longest ago, the one with the fewest
requests in flight, or with the fewest tokens of these."""

POLICIES: tuple[Policy, ...] = get_args(Policy)


class Load(Value):
    """The requests of one client to `engine`: the number of those `in_flight`, that of their `tokens` as far as it is
    known, and the number of the latest one (`turn`).

    The engine has failed `failures` times in a row, and is doubted until the time `doubted`.
    """

    engine: Engine
    in_flight: int = 0
    turn: int = 0
    failures: int = 0
    doubted: float = 0.0
    tokens: int = 0


Kind = Literal["refused", "lost", "unready", "aborted", "status"]


class RequestFailure(Value):
    """An engine did not answer a request. `words` are those of the server or of the operating system.

    ``refused``: it never got the request. ``lost``: its connection ended. ``unready``: it was no longer ready, so that
    it was not waited for. ``aborted``: it has ended the request before its end. ``status``: it answered with `status`,
    which is no success, or what nobody can read.
    """

    engine: Engine
    kind: Kind
    words: str
    status: int = 0

    @property
    def was_tried(self) -> bool:
        """True if the engine may have failed because of this request."""
        return self.kind in ("lost", "unready") or (self.kind == "status" and self.status not in (502, 503))

    @property
    def is_final(self) -> bool:
        """True if another engine would say the same: the request is wrong, or the server does not know it."""
        return self.kind == "status" and (self.status < 500 or self.status == 501)


def choose(
    loads: Iterable[Load],
    avoid: Collection[Engine],
    now: float,
    policy: Policy = "least_requests",
    stay: WorkerId | None = None,
    prompt: int | None = None,
) -> Engine | float:
    """The engine for a request that those to `avoid` have failed on; they get it only when there is no other. It is the
    one that the request shall `stay` on, if that can have it, or else that of the `policy`.

    With ``least_requests``, those with the same number of a `prompt` go to the same engine unless that has many more
    than another one (`PREFIX_LOAD`): it has the keys and values of the prompt, if it shares them, as vLLM does.

    If none can have it now, the seconds after which to look again; inf: only when the engines have changed.
    """
    best: Load | None = None
    order: tuple[bool, int, int] | None = None
    next_look = inf
    free: list[Load] = []
    for load in loads:
        if not load.engine.ready:
            continue
        if load.doubted > now:
            next_look = min(next_look, load.doubted)
            continue
        if policy == "least_requests":
            its = (load.engine in avoid, load.in_flight, load.turn)
        else:
            its = (load.engine in avoid, load.tokens if policy == "least_token_usage" else 0, load.turn)
        if stay is not None and not its[0] and stay[1:] == (load.engine.rank, load.engine.incarnation):
            return load.engine
        if not its[0]:
            free.append(load)
        if order is None or its < order:
            best, order = load, its
    if best is None:
        return next_look - now
    if free and prompt is not None and policy == "least_requests":
        home = free[prompt % len(free)]
        if home.in_flight <= best.in_flight * PREFIX_LOAD:
            return home.engine
    return best.engine


def begun(load: Load, turn: int, tokens: int = 0) -> Load:
    """`load` with one more request, which has the number `turn`, and so many tokens."""
    return msgspec.structs.replace(load, in_flight=load.in_flight + 1, turn=turn, tokens=load.tokens + tokens)


def cut(load: Load, tokens: int = 0) -> Load:
    """`load` with one request less, of which nobody waits for the answer."""
    return msgspec.structs.replace(load, in_flight=load.in_flight - 1, tokens=load.tokens - tokens)


def ended(load: Load, failure: RequestFailure | None, now: float, tokens: int = 0) -> Load:
    """`load` with one request less; it has failed with `failure`, or was answered."""
    load = cut(load, tokens)
    if failure is None or failure.is_final:
        if not load.failures and not load.doubted:
            return load
        return msgspec.structs.replace(load, failures=0, doubted=0.0)
    if load.doubted > now:
        # The requests that an engine takes with it when it dies are one failure.
        return load
    doubt = min(MIN_PAUSE_SECONDS * 2 ** min(load.failures, 8), MAX_PAUSE_SECONDS)
    return msgspec.structs.replace(load, failures=load.failures + 1, doubted=now + doubt)


def has_failed(failures: tuple[RequestFailure, ...], attempts: int) -> bool:
    """True if a request with these `failures` is given up; False when it is sent again."""
    return failures[-1].is_final or sum(each.was_tried for each in failures) >= attempts


# `Answer`: the answer to one request. It is read from the JSON of vLLM, and of servers compatible with OpenAI's.

MAX_SHOWN = 2000
"""Characters of a server's words that an error repeats."""


class Span(Value, forbid_unknown_fields=False):
    """Tokens `start` to `end` (exclusive) of an output were made by the weights that are labelled `version`."""

    version: str
    start: int
    end: int


class Answer(Value, gc=True):
    """The answer to one request: the server's own JSON (`body`), and the `engine` that gave it.

    `engine` is printed ``engine:0``, and has an ``incarnation``. `version` is the label of the weights that made the
    first token, and `spans` has it for all tokens of the first output; None and empty if the server does not say.
    """

    body: dict[str, Any]
    engine: WorkerId
    version: str | None
    spans: tuple[Span, ...] = ()

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The outputs, of which there are ``n``."""
        return _choices(self.body)

    @property
    def text(self) -> str:
        """The text of the first output; empty when the server was asked for tokens only."""
        first = self.choices[0]
        return str((first["message"]["content"] if "message" in first else first.get("text")) or "")

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first output; after ``complete`` and ``chat`` only with ``return_token_ids=True``."""
        return list(self.choices[0].get("token_ids") or ())

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length``; ``abort`` when the server has ended the request, which a client may ask for."""
        found = self.choices[0].get("finish_reason")
        return None if found is None else str(found)


def answered(body: dict[str, Any], engine: WorkerId) -> Answer:
    """The answer `body` of `engine`. vLLM has the versions in each output, SGLang has one in the ``metadata``.

    Raises `msgspec.ValidationError` when the server has them in another form.
    """
    choices, metadata = _choices(body), body.get("metadata")
    if choices and choices[0].get("weight_versions"):
        spans = msgspec.convert(choices[0]["weight_versions"], type=tuple[Span, ...])
        return Answer(body, engine, spans[0].version, spans)
    version = metadata.get("weight_version") if isinstance(metadata, dict) else None
    return Answer(body, engine, None if version is None else str(version))


def is_aborted(body: Mapping[str, Any]) -> bool:
    """True if the server has ended an output before its end, as vLLM does when it is told to end itself (SIGTERM)."""
    return any(choice.get("finish_reason") == "abort" for choice in _choices(body))


def fault(words: str) -> str:
    """The server's words about a fault, out of its JSON if that is what they are."""
    try:
        found: Any = msgspec.json.decode(words.encode())
    except msgspec.DecodeError:
        return words[:MAX_SHOWN]
    while isinstance(found, dict):
        found = next((found[key] for key in ("detail", "error", "message") if found.get(key)), None)
    return (found if isinstance(found, str) else words)[:MAX_SHOWN]


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = body.get("choices")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
