"""One node of a rendezvous: ``python -m benchmarks.meeting BACKEND ENDPOINT RUN``.

It imports torch's rendezvous, prints that, and waits for a line. Then it makes its handler and
meets one other node. It prints when it had its rank, and the workers' store and the agents' could be used, in seconds
of the machine's monotonic clock; and leaves at the next line.
"""

from __future__ import annotations

import sys
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


def main(backend: str, endpoint: str, run: str) -> None:
    """Run one node of two."""
    print("ready", flush=True)
    sys.stdin.readline()
    params = RendezvousParameters(backend, endpoint, run, 2, 2, local_addr="127.0.0.1")
    handler = get_rendezvous_handler(params)
    info = handler.next_rendezvous()
    info.store.set(f"rank{info.rank}", "here")
    info.store.multi_get(["rank0", "rank1"])
    where = info.bootstrap_store_info
    assert where is not None
    TCPStore(where.master_addr, where.master_port, is_master=False).set("key", "value")
    print(time.monotonic(), flush=True)
    sys.stdin.readline()
    handler.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
