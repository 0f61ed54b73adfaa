"""As Python 3.12 and later: ``os.fork`` warns in a process of several threads, also of those that C libraries start.

They are counted after the fork: OpenBLAS, which numpy loads, ends its threads before one.
"""

import os
import warnings
from pathlib import Path

_fork = os.fork


def _warning_fork() -> int:
    pid = _fork()
    if pid:
        threads = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[17])
        if threads > 1:
            words = f"This process (pid={os.getpid()}) is multi-threaded, use of fork() may lead to deadlocks"
            warnings.warn(words, DeprecationWarning, stacklevel=2)
    return pid


os.fork = _warning_fork
