"""The time of calls between two nodes, over TCP with TLS and without, between processes of this machine."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from tests.contract.cluster import Cluster

LARGE = 64 << 20
"""Bytes of the large argument."""

SMALL_CALLS, LARGE_CALLS = 2000, 9
WARM_UP = 3


def small_call(kind: str) -> float:
    """The median time of a call without arguments, in µs; `kind` is ``tls`` or ``insecure``."""
    return _median_time(kind, None, SMALL_CALLS)


def large_call(kind: str) -> float:
    """The median time of a call with an argument of `LARGE` bytes, in µs."""
    return _median_time(kind, torch.ones(LARGE // 4), LARGE_CALLS)


def _median_time(kind: str, tensor: torch.Tensor | None, times: int) -> float:
    folder = Path(tempfile.mkdtemp(prefix="unirun-bench-"))
    cluster = Cluster(kind, folder / "calls")
    try:
        worker = cluster.role(1).group[0]
        found = []
        for _ in range(WARM_UP + times):
            began = time.perf_counter()
            worker.number() if tensor is None else worker.size_of_storage(tensor)
            found.append(time.perf_counter() - began)
        return median(found[WARM_UP:]) * 1e6
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
