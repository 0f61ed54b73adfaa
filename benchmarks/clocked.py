"""The master of a job, with a clock on its event loop: ``python -m benchmarks.clocked JOB_DIR``.

For each line on stdin it prints a JSON object: the processor seconds of the process since it began to lead, and the
processor seconds of the longest step since the line before. A step is one callback of the event loop: the handling of
an event up to its frames, which the same callback gives to the kernel.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

from unirun.launcher.master.lead import lead
from unirun.observe.jobdir import JobDir
from unirun.wire.credentials import load_credentials
from unirun.wire.sockets import listen_tcp


class Clock:
    """Measures each callback of the event loops of this process in processor time of its thread."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._run = asyncio.Handle._run

    def install(self) -> None:
        """Measure from now on."""
        clock = self

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            clock._run(handle)
            clock.longest = max(clock.longest, time.thread_time() - began)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]

    def tell(self) -> None:
        """Answer each line on stdin."""
        for _ in sys.stdin:
            longest, self.longest = self.longest, 0.0
            print(json.dumps({"processor": time.process_time(), "longest": longest}), flush=True)


def main(folder: str) -> None:
    """Lead until the job ends or the process is killed."""
    job = JobDir(Path(folder))
    clock = Clock()
    clock.install()
    threading.Thread(target=clock.tell, daemon=True).start()
    with listen_tcp("127.0.0.1") as tcp:
        several = load_credentials(job.path).tls is not None
        lead(job, tcp=tcp if several else None)


if __name__ == "__main__":
    main(sys.argv[1])
