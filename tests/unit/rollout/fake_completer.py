"""`FakeCompleter`: an engine in memory, which answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from unirun.rollout.completing import Completion


def made(*tokens: int, version: int = 0, finish_reason: str = "stop") -> Completion:
    """A completion with these tokens."""
    return Completion(tokens, (-0.5,) * len(tokens), (version,) * len(tokens), finish_reason)


class FakeCompleter:
    """Answers with `answer(prompt)` of the weights `version`, by default with the last token plus one. While it is
    `held`, requests wait."""

    def __init__(self, answer: Callable[[Sequence[int]], Sequence[int]] | None = None) -> None:
        self.version = 0
        self.requests: list[tuple[tuple[int, ...], str, dict[str, Any]]] = []
        self._answer = answer or (lambda prompt: [prompt[-1] + 1])
        self._open = asyncio.Event()
        self._open.set()
        self.waiting = 0

    def hold(self) -> None:
        """Let requests wait from now on."""
        self._open.clear()

    def release(self) -> None:
        """Answer those that wait, and all others."""
        self._open.set()

    async def complete(
        self, token_ids: Sequence[int], *, conversation: str = "", **sampling: Any
    ) -> Completion:
        """See `Completer`."""
        self.requests.append((tuple(token_ids), conversation, sampling))
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1
        return made(*self._answer(token_ids), version=self.version)
