"""The script that measures requests to servers, with tokens in requests and answers, many at a time.

    asking.py unirun URL…    by `unirun.EngineClient`
    asking.py httpx URL…     by a client of httpx as its documentation has it, to one URL after the other

It prints the microseconds of processor time of this process for each request.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

REQUESTS, WARM_UP, AT_A_TIME = 2000, 200, 32

PROMPT = list(range(256))
SAMPLING: dict[str, Any] = {"max_tokens": 64, "temperature": 1.0}

Ask = Callable[[], Awaitable[list[int]]]
"""Send one request. Returns the tokens of the answer."""


async def asked(ask: Ask, requests: int) -> None:
    """Send this number of requests, `AT_A_TIME` at a time."""
    left = iter(range(requests))

    async def some() -> None:
        for _ in left:
            assert len(await ask()) == SAMPLING["max_tokens"]

    await asyncio.gather(*(some() for _ in range(AT_A_TIME)))


async def measured(ask: Ask) -> float:
    """Seconds of processor time for each request."""
    await asked(ask, WARM_UP)
    began = time.process_time()
    await asked(ask, REQUESTS)
    return (time.process_time() - began) / REQUESTS


async def by_unirun(urls: list[str]) -> float:
    """Measure requests of `unirun.EngineClient`."""
    from unirun.rollout import EngineClient, EngineList

    async with EngineClient("engine", engines=EngineList.at(*urls)) as client:

        async def ask() -> list[int]:
            return (await client.generate(PROMPT, **SAMPLING)).token_ids

        return await measured(ask)


async def by_httpx(urls: list[str]) -> float:
    """Measure requests of httpx alone."""
    import httpx2

    turns = itertools.cycle(f"{url}/inference/v1/generate" for url in urls)
    async with httpx2.AsyncClient() as client:

        async def ask() -> list[int]:
            body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
            answer = await client.post(next(turns), json=body)
            answer.raise_for_status()
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        return await measured(ask)


if __name__ == "__main__":
    sides = {"unirun": by_unirun, "httpx": by_httpx}
    print(1e6 * asyncio.run(sides[sys.argv[1]](sys.argv[2:])))
