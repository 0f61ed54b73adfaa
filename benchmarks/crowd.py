"""Agents without workers, COUNT of them in one process: ``python -m benchmarks.crowd JOB_DIR COUNT``.

Each has a stream of its own to the master and joins as a node. Prints how many seconds passed until all had been told
to start their workers, then goes on saying how its workers are, as agents do, until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from unirun.observe.jobdir import JobDir
from unirun.rendezvous.masters import Masters
from unirun.wire.aio import frame_of
from unirun.wire.frames import FrameReader
from unirun.wire.handshake import HELLO_SIZE, PROOF_SIZE, Handshake, Token, load_token
from unirun.wire.reports import Join, Sample

SAMPLES = 5.0
"""Seconds between two samples of an agent, as by default."""


async def agent(path: str, token: Token, number: int) -> asyncio.StreamWriter:
    """Join, and wait for the order to start workers.

    What the master says is not checked as an agent does: a thousand of them have a thousand hosts for that.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    handshake = Handshake(token)
    writer.write(handshake.answer(await reader.readexactly(HELLO_SIZE)))
    handshake.check(await reader.readexactly(PROOF_SIZE))
    writer.write(frame_of(Join(f"n{number}", 1, f"host{number}", {"actor": f"10.0.0.1:{number}"})))
    frames = FrameReader()
    while not any(frame["type"] == "StartRole" for frame in frames.feed(await reader.read(1 << 20))):
        continue
    return writer


async def chatter(writer: asyncio.StreamWriter, number: int) -> None:
    """Send the messages of an agent while its workers run."""
    while True:
        await asyncio.sleep(SAMPLES)
        writer.write(frame_of(Sample(f"n{number}", {f"actor:{number}": 1 << 30}, {f"actor:{number}": 1.0})))


async def main(folder: str, count: int) -> None:
    """Let all agents join at once."""
    job = JobDir(Path(folder))
    token = load_token(job.token)
    masters = Masters(job)
    while (leader := masters.seat.leader) is None:
        await masters.news(1.0)
    masters.close()
    path = str(leader.address)
    began = time.monotonic()
    writers = await asyncio.gather(*(agent(path, token, number) for number in range(count)))
    print(time.monotonic() - began, flush=True)
    await asyncio.gather(*(chatter(writer, number) for number, writer in enumerate(writers)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
