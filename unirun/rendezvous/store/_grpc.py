"""gRPC, which says what it has to say in its errors, and not on stderr in the middle of a job's output."""

from __future__ import annotations

import os

# Read when grpc starts, and again by its threads, so it cannot be taken back. Who wants to see it sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

__all__ = ["grpc"]
