"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    **{prefix: 1000 ** (power + 1) for power, prefix in enumerate("kmgtp")},
    **{f"{prefix}i": 1024 ** (power + 1) for power, prefix in enumerate("kmgtp")},
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgtp]i?)?b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """``64MB`` as 64 000 000, ``1.5GiB`` as 1 610 612 736, ``12`` as 12. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes; write 64MB, 1.5GiB or 4096")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def show_size(size: float) -> str:
    """``512 B``, ``12.3 kB``, ``4.0 MB``, ``1.2 GB``: powers of 1000."""
    if size < 999.5:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} PB"
