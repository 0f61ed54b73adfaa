"""The facts that `probe.py` finds in its process and its interpreter, whatever it was started as.

The name of a function that is marked `look` is the name of the property, its docstring says how it is looked at.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import locale
import logging
import multiprocessing.spawn
import os
import resource
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import warnings

LOOKS = {}


def look(function):
    """Mark a function as a property that is looked at."""
    LOOKS[function.__name__.replace("_", " ")] = function
    return function


def kind_of(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


@look
def standard_streams():
    """``sys.stdin``, ``stdout`` and ``stderr``: their classes, modes, names, encodings, buffers."""
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        for each in (
            "mode",
            "name",
            "encoding",
            "errors",
            "line_buffering",
            "write_through",
            "closed",
            "newlines",
        ):
            found[f"{name}.{each}"] = repr(getattr(stream, each, "absent"))
        found[f"{name} class"] = [
            io_class(each) for each in (stream, stream.buffer, getattr(stream.buffer, "raw", None))
        ]
        found[f"{name}.buffer"] = repr((stream.buffer.name, stream.buffer.mode))
        found[f"{name}.isatty"] = stream.isatty()
        found[f"{name}.fileno"] = stream.fileno()
        found[f"{name} is __{name}__"] = stream is getattr(sys, f"__{name}__")
    found["stdin at its end"] = sys.stdin.read() == ""
    return found


def io_class(stream):
    """The class of `io` that it has, or extends: the log file of a worker extends FileIO."""
    return next((each.__name__ for each in type(stream).__mro__ if each.__module__ == "_io"), None)


@look
def garbage_collection():
    """``gc``: enabled, thresholds, frozen objects, callbacks."""
    return {
        "enabled": gc.isenabled(),
        "threshold": repr(gc.get_threshold()),
        "much is frozen": gc.get_freeze_count() > 1000,
        "debug": gc.get_debug(),
        "callbacks": len(gc.callbacks),
    }


@look
def fault_handler():
    """``faulthandler.is_enabled()``."""
    return faulthandler.is_enabled()


@look
def locale_and_encodings():
    """Locale, encodings, time zone."""
    return {
        "LC_ALL": locale.setlocale(locale.LC_ALL),
        "preferred": locale.getpreferredencoding(False),
        "file system": f"{sys.getfilesystemencoding()} {sys.getfilesystemencodeerrors()}",
        "time zone": repr(time.tzname),
    }


@look
def logging_configuration():
    """The root logger."""
    root = logging.getLogger()
    return {
        "handlers": [kind_of(each) for each in root.handlers],
        "level": root.level,
        "disabled": logging.root.manager.disable,
    }


@look
def names_of_loggers():
    """Loggers by name."""
    return sorted(logging.root.manager.loggerDict)


@look
def event_loop():
    """The policy of asyncio, and a loop that runs."""
    import asyncio

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "policy": kind_of(asyncio.get_event_loop_policy()),
            "running": repr(asyncio._get_running_loop()),
        }


@look
def multiprocessing_state():
    """The present process, the start method, the next process's name."""
    now = multiprocessing.current_process()
    return {
        "name": now.name,
        "class": kind_of(now),
        "pid": now.pid == os.getpid(),
        "daemon": now.daemon,
        "identity": repr(now._identity),
        "parent": repr(multiprocessing.parent_process()),
        "children": len(multiprocessing.active_children()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "the next one": multiprocessing.Process().name,
        "executable": repr(multiprocessing.spawn.get_executable()),
        "default context": kind_of(multiprocessing.get_context()),
        "folder for children": multiprocessing.process.ORIGINAL_DIR,
    }


@look
def defaults_of_the_library():
    """Default timeout of sockets, folder of temporary files, wakeup descriptor."""
    return {
        "socket timeout": socket.getdefaulttimeout(),
        "temporary files": tempfile.gettempdir(),
        "wakeup descriptor": signal.set_wakeup_fd(-1),
    }


# threads


@look
def threads():
    """``threading.enumerate()``, the tasks of the process, the identity of the main thread."""
    main = threading.main_thread()
    return {
        "known": [f"{each.name} {kind_of(each)} daemon={each.daemon}" for each in threading.enumerate()],
        "tasks": len(os.listdir("/proc/self/task")),
        "current is main": threading.current_thread() is main,
        "ident": main.ident == threading.get_ident(),
        "native id": main.native_id == os.getpid() == threading.get_native_id(),
        "the next one": threading.Thread().name,
    }


# the process


@look
def open_descriptors():
    """Numbers and kinds of ``/proc/self/fd``."""
    found = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            status = os.fstat(number)
        except OSError:
            continue  # it was that of the listing
        kinds = {stat.S_ISREG: "file", stat.S_ISCHR: "device", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
        kind = next((name for is_kind, name in kinds.items() if is_kind(status.st_mode)), "other")
        access = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "rw"}
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
        found[number] = (
            f"{kind} {access[flags & os.O_ACCMODE]} blocking={not flags & os.O_NONBLOCK} inheritable={os.get_inheritable(number)}"
        )
    return found


@look
def signal_handlers():
    """``signal.getsignal`` of each."""
    return {
        each.name: getattr(signal.getsignal(each), "__name__", repr(signal.getsignal(each)))
        for each in signal.valid_signals()
        if isinstance(each, signal.Signals)
    }


def _status(*names):
    with open("/proc/self/status") as lines:
        rows = dict(line.rstrip("\n").split(":\t", 1) for line in lines if ":\t" in line)
    return {name: rows.get(name, "") for name in names}


@look
def signals_in_the_kernel():
    """The sets of blocked, ignored and caught signals in ``/proc/self/status``."""
    return _status("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")


@look
def rights():
    """Users, groups, capabilities, umask, and what ``prctl`` shows."""
    mask = os.umask(0)
    os.umask(mask)
    libc = ctypes.CDLL(None)
    subreaper = ctypes.c_int()
    libc.prctl(37, ctypes.byref(subreaper), 0, 0, 0)
    return {
        **_status("Uid", "Gid", "Groups", "CapEff", "CapInh", "NoNewPrivs", "Seccomp"),
        "umask": oct(mask),
        "dumpable": libc.prctl(3, 0, 0, 0, 0),
        "subreaper": subreaper.value,
        "timer slack": libc.prctl(30, 0, 0, 0, 0),
    }


@look
def death_signal():
    """The signal that the process gets when its parent dies (``PR_GET_PDEATHSIG``)."""
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)
    return found.value


@look
def limits():
    """``resource.getrlimit`` of each, niceness, processors, pending timers."""
    found = {
        name: repr(resource.getrlimit(getattr(resource, name)))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    with open("/proc/self/oom_score_adj") as oom, open("/proc/self/coredump_filter") as dump:
        found |= {"oom_score_adj": oom.read(), "coredump_filter": dump.read()}
    found |= {
        "nice": os.nice(0),
        "processors": repr(sorted(os.sched_getaffinity(0))),
        "scheduler": os.sched_getscheduler(0),
    }
    return found | {"timer": repr(signal.getitimer(signal.ITIMER_REAL))}


@look
def working_directory():
    """``os.getcwd()``."""
    return os.getcwd()


@look
def session():
    """Note whether the process leads its session and group, and has a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
        terminal = True
    except OSError:
        terminal = False
    pid = os.getpid()
    return {
        "leads its session": os.getsid(0) == pid,
        "leads its group": os.getpgrp() == pid,
        "terminal": terminal,
    }


@look
def title():
    """``/proc/self/comm``."""
    with open("/proc/self/comm") as file:
        return file.read().strip()


@look
def command_line():
    """``/proc/self/cmdline``."""
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().decode().replace("\0", " ").strip()


def _pairs(items):
    pairs = (item.partition("=") for item in items if item)
    return {name: value for name, _, value in pairs}


@look
def environment():
    """``os.environ``."""
    return dict(os.environ)


@look
def environment_of_c():
    """The ``environ`` of C, where it is not the same as ``os.environ``."""
    pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    items = []
    while pointer[len(items)] is not None:
        items.append(pointer[len(items)].decode())
    found = _pairs(items)
    return sorted({*found.items()} ^ {*os.environ.items()})


@look
def environment_in_proc():
    """``/proc/self/environ``, where it is not the same as ``os.environ``."""
    with open("/proc/self/environ", "rb") as file:
        found = _pairs(file.read().decode().split("\0"))
    return sorted(name for name, _ in {*found.items()} ^ {*os.environ.items()})


@look
def exit_handlers():
    """The number of functions that ``atexit`` has before the script registers one, this file's imports included."""
    return atexit._ncallbacks()


# what has to differ between processes


@look
def random_numbers():
    """The first numbers of ``random``, and of numpy and torch where they are loaded already."""
    import random

    found = [random.random()]
    if "torch" in sys.modules:
        import numpy
        import torch

        found += [numpy.random.random(), torch.initial_seed(), torch.rand(1).item()]
    return found


@look
def key_of_multiprocessing():
    """The key with which a process and its children know each other."""
    return [int.from_bytes(multiprocessing.current_process().authkey)]


@look
def hash_of_a_text():
    """``hash`` of a string, which each process salts."""
    return [hash("text")]


def state_of_torch():
    """Torch's state, for who asks with ``--torch``."""
    import torch
    import torch.distributed

    return {
        "threads": torch.get_num_threads(),
        "threads between operations": torch.get_num_interop_threads(),
        "default type": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "initialized": f"{torch.cuda.is_initialized()} {torch.distributed.is_initialized()}",
    }
