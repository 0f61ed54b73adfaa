"""An all_reduce over all hosts, with gloo or NCCL. The only module of the doctor with torch."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from unirun.rendezvous.endpoints import hold_endpoint

WITHIN = timedelta(seconds=20)

_SIZE = 1 << 18
_TIMES = 5


def open_store(address: str) -> tuple[TCPStore, int]:
    """A store that listens on `address` only, and its port. It ends when it is no longer referenced."""
    endpoint = hold_endpoint(address)
    port, handle = endpoint.port, endpoint.socket.detach()
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=WITHIN, master_listen_fd=handle
    ), port


def all_reduce(backend: str, rank: int, world: int, address: str, port: int, interface: str) -> float:
    """The median time of an all_reduce of 1 MB in seconds. Raises RuntimeError when it fails or is wrong."""
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = interface
    store = TCPStore(address, port, is_master=False, timeout=WITHIN)
    prefixed = PrefixStore(backend, store)
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=WITHIN)
    try:
        return median(_one(device, rank, world) for _ in range(_TIMES))
    finally:
        dist.destroy_process_group()


def _one(device: torch.device, rank: int, world: int) -> float:
    tensor = torch.full((_SIZE,), float(rank + 1), device=device)
    began = time.perf_counter()
    dist.all_reduce(tensor)
    result = float(tensor[-1].item())  # NCCL works in the background until somebody asks
    seconds = time.perf_counter() - began
    if result != world * (world + 1) / 2:
        raise RuntimeError(f"the sum of 1 … {world} is {result}")
    return seconds
