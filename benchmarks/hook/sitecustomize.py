"""Records the files of a package that a process enters; Python imports this module at its start from PYTHONPATH.

`benchmarks.entered` sets the variable below: a folder, and the package. While the first byte of the file ``mark`` in
the folder is 1, each file whose functions are called is appended once for each process to the file ``entered``. A fork
goes on recording. The code of a module at its import is no call.
"""

import mmap
import os
import sys
import threading
from types import FrameType

VARIABLE = "BENCHMARK_ENTERED"


def install(folder: str, package: str) -> None:
    """Record in this thread, and in all that it starts."""
    with open(f"{folder}/mark", "rb") as file:
        mark = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    record, prefix = f"{folder}/entered", f"{package}{os.sep}"
    seen: set[str] = set()
    os.register_at_fork(after_in_child=seen.clear)

    def enter(frame: FrameType, event: str, _: object) -> None:
        if not mark[0] or event != "call":
            return
        code = frame.f_code
        path = code.co_filename
        if path in seen or not path.startswith(prefix) or code.co_name == "<module>":
            return
        seen.add(path)
        # Opened each time: a job closes descriptors that it does not know.
        descriptor = os.open(record, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{os.getpid()} {path.removeprefix(prefix)}\n".encode())
        os.close(descriptor)

    threading.setprofile(enter)
    sys.setprofile(enter)


if VARIABLE in os.environ:
    install(*os.environ[VARIABLE].split(os.pathsep))
