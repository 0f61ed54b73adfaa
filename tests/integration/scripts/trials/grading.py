"""A reward function that takes its time, for processes of its own."""

import time
import zlib


def grade(text: str) -> float:
    """A number that says nothing about the text but that it is this one."""
    time.sleep(0.2)
    return zlib.crc32(text.encode()) % 8 / 8
