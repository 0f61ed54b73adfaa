"""One way to end for each rank, in the order of `ENDS`; `test_conformance.py` compares what is left of each.

What a process writes, and how it ends, must be the same under every launcher. ``ends.py FOLDER COUNT``: files go into a
folder of each rank, in FOLDER. A rank waits until COUNT of them are there, so that none is stopped before it has begun
because another has failed. The variable END, where it is set, is another number than the rank.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from io import StringIO
from pathlib import Path

ENDS = {}


def end(function):
    """Mark a function as a way to end."""
    ENDS[function.__name__.replace("_", " ")] = function
    return function


class Told:
    """Says when it is deleted."""

    def __init__(self, name):
        self.name = name

    def __del__(self, write=os.write):
        # The names of this module are gone by then.
        write(1, f"deleted {self.name}\n".encode())


def say(text):
    os.write(1, f"{text}\n".encode())


def started(target, **how):
    thread = threading.Thread(target=target, **how)
    thread.start()
    return thread


@end
def returns():
    print("done")


@end
def sys_exit_3():
    sys.exit(3)


@end
def sys_exit_none():
    sys.exit(None)


@end
def sys_exit_true():
    sys.exit(True)


@end
def sys_exit_text():
    sys.exit("a reason")


@end
def sys_exit_of_an_object():
    sys.exit(3.5)


@end
def sys_exit_above_255():
    sys.exit(259)


@end
def sys_exit_below_0():
    sys.exit(-3)


@end
def os_exit():
    print("lost?", end="")
    os._exit(4)


@end
def uncaught_exception():
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("words of it") from error


@end
def uncaught_group():
    raise ExceptionGroup("several", [ValueError(1), TypeError(2)])


@end
def uncaught_interrupt():
    atexit.register(say, "exit handler")
    raise KeyboardInterrupt


@end
def interrupt_by_signal():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


@end
def recursion():
    sys.setrecursionlimit(200)

    def deeper():
        deeper()

    deeper()


@end
def killed_by_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit.register(say, "exit handler")
    os.kill(os.getpid(), signal.SIGTERM)


@end
def killed_by_sigkill():
    os.kill(os.getpid(), signal.SIGKILL)


@end
def killed_by_sigsegv():
    os.kill(os.getpid(), signal.SIGSEGV)


@end
def exception_with_notes():
    error = ValueError("x")
    error.add_note("a note")
    raise error


@end
def stdout_closed():
    print("before")
    sys.stdout.close()


@end
def both_closed():
    print("before")
    sys.stdout.close()
    sys.stderr.close()


@end
def descriptor_of_stdout_closed():
    print("in the buffer", end="")
    os.close(1)


@end
def stdout_replaced():
    sys.stdout = StringIO()
    print("nobody reads this")


@end
def stdout_is_none():
    sys.stdout = sys.stderr = None
    print("nowhere")


@end
def stdout_cannot_be_written():
    sys.stdout = open("/dev/full", "w")
    print("too much")


@end
def error_in_an_exit_handler():
    atexit.register(say, "the other handler")

    def fails():
        raise ValueError("in the handler")

    atexit.register(fails)


@end
def os_exit_in_an_exit_handler():
    atexit.register(os._exit, 8)


@end
def sys_exit_in_an_exit_handler():
    atexit.register(sys.exit, 5)


@end
def error_in_a_thread():
    def fails():
        raise ValueError("in the thread")

    started(fails, name="worker").join()


@end
def sys_exit_in_a_thread():
    started(sys.exit, args=(5,)).join()


@end
def error_in_excepthook():
    def fails(*_):
        raise TypeError("in the hook")

    sys.excepthook = fails
    raise ValueError("the first")


@end
def own_excepthook():
    sys.excepthook = lambda kind, error, trace: print(
        "hook", kind.__name__, error, trace.tb_frame.f_code.co_name
    )
    raise ValueError("x")


@end
def sys_exit_in_excepthook():
    sys.excepthook = lambda *_: sys.exit(7)
    raise ValueError("x")


@end
def no_excepthook():
    del sys.excepthook
    raise ValueError("x")


@end
def order_of_the_end():
    """Threads, exit handlers from the last to the first, finalizers, globals, files."""
    import tempfile

    global first, second, file, temporary
    first, second = Told("first"), Told("second")
    second.itself = second
    temporary = tempfile.TemporaryDirectory(dir=mine)
    file = open(mine / "file", "w")
    file.write("all of it")
    weakref.finalize(first, say, "finalizer")
    threading._register_atexit(say, "at the end of threads")
    atexit.register(say, "first handler")
    atexit.register(say, f"second handler, alive: {threading.active_count()}")
    atexit.register(lambda: say(f"temporary folder there: {os.path.isdir(temporary.name)}"))

    def slow():
        threading.main_thread().join()
        say("thread")

    started(slow)
    started(time.sleep, args=(60,), daemon=True)
    print("buffered", end="")


@end
def exception_held_by_a_global():
    global kept
    kept = Told("kept")
    sys.stdout.write("buffered")
    raise ValueError("x")


@end
def executor_at_work():
    import concurrent.futures

    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.submit(say, "in the pool")
    executor.submit(print, "printed in the pool")


@end
def child_process_is_joined():
    import multiprocessing

    multiprocessing.get_context("fork").Process(target=say, args=("in the child",)).start()


@end
def forked_child_ends():
    """A child of `os.fork` that falls off the end of the script."""
    atexit.register(say, "exit handler")
    if os.fork() == 0:
        sys.exit(6)
    say(f"status {os.waitstatus_to_exitcode(os.wait()[1])}")


@end
def c_stdio():
    libc = ctypes.CDLL(None)
    libc.printf(b"by printf\n")
    os._exit(0)


@end
def c_exit_handler():
    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p
    text = ctypes.c_void_p(libc.strdup(b"handler of C"))
    libc.__cxa_atexit(ctypes.cast(libc.puts, ctypes.c_void_p), text, None)


@end
def error_in_asyncio():
    import asyncio

    async def fails():
        raise ValueError("in the loop")

    asyncio.run(fails())


@end
def unraisable():
    class Fails:
        def __del__(self):
            raise ValueError("in del")

    Fails()


@end
def main_is_replaced():
    sys.modules["__main__"] = None


@end
def systemexit_subclass():
    class Mine(SystemExit):
        pass

    raise Mine(9)


@end
def text_of_the_source_is_shown():
    compile("x = (", "<string>", "exec")


@end
def hash_with_a_seed():
    """`PYTHONHASHSEED` is set."""
    print(hash("text"), sys.flags.hash_randomization)


def wait_for(count, folder):
    """Wait until so many have come this far; the launcher asks the others to stop when one has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > deadline:
            os._exit(99)
        time.sleep(0.01)


if __name__ == "__main__":
    number = int(os.environ["END"] if "END" in os.environ else os.environ["RANK"])
    mine = Path(sys.argv[1], f"{os.environ['ROLE_NAME']}-{number}")
    mine.mkdir()
    wait_for(int(sys.argv[2]), mine.parent)
    list(ENDS.values())[number]()
