"""`Answer`: the answer to one request. It is read from the JSON of vLLM, and of servers compatible with OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from unirun.values import Value, WorkerId

__all__ = ["Answer", "Span", "answered", "fault", "is_aborted"]

LONGEST = 2000
"""Characters of a server's words that an error repeats."""


class Span(Value, forbid_unknown_fields=False):
    """Tokens `start` to `end` (exclusive) of an output were made by the weights that are labelled `version`."""

    version: str
    start: int
    end: int


class Answer(Value):
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
        return words[:LONGEST]
    while isinstance(found, dict):
        found = next((found[key] for key in ("detail", "error", "message") if found.get(key)), None)
    return (found if isinstance(found, str) else words)[:LONGEST]


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = body.get("choices")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
