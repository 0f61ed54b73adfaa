"""Values in files of the kernel: ``/proc``, ``/sys`` and control groups."""

from __future__ import annotations

import re
from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file without blanks around it; empty when it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def number(text: str | None) -> int | None:
    """A number over 0; None for anything else (``max``, ``-1``, nothing)."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,20}", text) and int(text) else None


def read_number(path: Path) -> int | None:
    """The `number` in a file."""
    return number(read_text(path))


def read_integer(path: Path, default: int) -> int:
    """The whole number in a file, which may be negative; `default` when there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return default


def memory_field(path: Path, name: str) -> int:
    """The bytes of a line ``MemTotal: 16 kB`` (``Node 0 MemTotal: 16 kB`` in sysfs); 0 when there is none."""
    for line in read_text(path).splitlines():
        words = line.split()
        if f"{name}:" in words:
            return int(words[words.index(f"{name}:") + 1]) * 1024
    return 0


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` as (0, 1, 2, 3, 8). Raises ValueError."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)
