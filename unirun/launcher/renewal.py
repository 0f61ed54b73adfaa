"""State that a forked worker reinitialises: stdin, multiprocessing keys, random generators, torch settings."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from unirun.launcher.environment import counts_at_import
from unirun.wire.reporting import report


def renew() -> None:
    """Reinitialise the fork, once it has the worker's descriptors, directory and environment."""
    _renew_stdin()
    _renew_multiprocessing()
    # `random` reseeds itself after a fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    main: Any = threading.main_thread()
    main._set_native_id()


def _renew_stdin() -> None:
    """Create ``sys.stdin`` as the interpreter does: the spawner's was created for another descriptor 0."""
    old = sys.__stdin__
    if not isinstance(old, io.TextIOWrapper):
        return
    raw = io.FileIO(0, closefd=False)
    raw.name = "<stdin>"
    fresh = io.TextIOWrapper(
        io.BufferedReader(raw),
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        write_through=old.write_through,
    )
    fresh.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = fresh  # type: ignore[misc]


def _renew_multiprocessing() -> None:
    """Reset the values that `multiprocessing` computes at import."""
    multiprocessing.current_process().authkey = os.urandom(32)
    process: Any = multiprocessing.process
    process.ORIGINAL_DIR = os.getcwd()


def renew_torch(start: Mapping[str, str]) -> None:
    """Apply the environment variables that torch read at import, in the spawner.

    `start` is the worker's initial environment. Variables that its code has set since, before it imported torch, are
    applied where possible; the others are reported.
    """
    import torch

    env = os.environ
    threads = (env.get("MKL_NUM_THREADS") or env.get("OMP_NUM_THREADS", "")).split(",")[0]
    if threads.isdigit() and int(threads) > 0:
        # MKL uses at most as many threads as there are processors.
        torch.set_num_threads(min(int(threads), len(os.sched_getaffinity(0))))
    if "TORCH_LOGS" in env:
        importlib.import_module("torch._logging")._init_logs()
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    late = sorted(
        name
        for name in {*env, *start}
        if env.get(name) != start.get(name) and counts_at_import(name) and name not in _TAKEN
    )
    if late:
        names = ", ".join(late)
        report(
            f"unirun: {names}: set after this process had loaded torch, so without effect; "
            "start with --env NAME=VALUE, or with --start-method exec"
        )


_TAKEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables read at import that `renew_torch` applies."""
