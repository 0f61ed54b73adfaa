"""Import gRPC with its log on stderr turned off: its errors have the same information."""

from __future__ import annotations

import os

# gRPC reads the variable at start and again in its threads, so it stays set. A user's own value is kept.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

__all__ = ["grpc"]
