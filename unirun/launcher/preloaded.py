"""The modules that a spawner has imported: what they leave in its process, and how its forks keep them.

A fork shares them page by page with the spawner. It must look as if it had not imported torch yet, and must not take
the modules apart at its end: either would copy those pages.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LATER = "torch"
"""The package that a fork seems not to have imported, as scripts set variables before they do."""

_NEVER = ("sys", "builtins", "__main__", "__mp_main__")


class PreloadedModules:
    """What one spawner imports. Make it before anything else registers an exit handler."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        """By module: how many threads its import has left that a fork would not have."""
        self._own = {"sitecustomize", "usercustomize"}
        """Modules of the user's, with which a fork ends as a fresh process does: their files are written and closed."""
        self._stand_ins: dict[str, tuple[ModuleType, _StandIn]] = {}
        self._end = ModuleType("unirun.launcher.end")
        self._forked = False
        self._frozen = 0
        # Exit handlers run in reverse order, so this one is the last.
        atexit.register(self._at_exit)
        self._count("sitecustomize", 1)

    def load(self, name: str) -> None:
        """Import a module, and notice the threads that it starts."""
        if name.partition(".")[0] not in ("torch", "unirun"):
            self._own.add(name)
        before = _threads()
        importlib.import_module(name)
        self._count(name, before)

    def _count(self, name: str, before: int) -> None:
        if _threads() > before and (left := _threads_after_fork() - before) > 0:
            self.threads[name] = left

    def freeze(self) -> None:
        """All modules are there: arrange them so that forks copy as few pages as can be. Twice is as once."""
        if len(sys.modules) == self._frozen:
            return
        self._frozen = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and name not in _NEVER and name not in self._own:
                self._stand_ins[name] = module, _StandIn(module)
        # References that nothing takes back, so that none of these modules ever dies.
        for kept in (self._stand_ins, self._end):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        gc.collect()
        gc.freeze()

    def in_fork(self, imported: Callable[[], None]) -> None:
        """In a fork: `imported` is called when its code imports torch."""
        self._forked = True
        leave_files()
        if LATER in sys.modules:
            sys.meta_path.insert(0, _Later(sys.modules.pop(LATER), imported))
        _skip_static_destructors()

    def _at_exit(self) -> None:
        """In a fork, after its other exit handlers: hide the modules from the interpreter's clean-up.

        It takes apart what is a module in ``sys.modules``. For torch's that would take a quarter of a second, and is
        where a script without ``destroy_process_group`` aborts.
        """
        if not self._forked:
            return
        for name, (module, stand_in) in self._stand_ins.items():
            if sys.modules.get(name) is module:
                sys.modules[name] = stand_in  # type: ignore[assignment]
        self._end.__dict__["sweeper"] = _Sweeper()
        sys.modules[self._end.__name__] = self._end
        _flush_cpp()


class _Witness:
    """Lives as long as the names of ``__main__``."""


class _Sweeper:
    """The only thing in a module that the interpreter clears after ``__main__`` should have died.

    When a module that is hidden refers to a function of the script, the names of ``__main__`` are still there. In a
    fresh process they would die with that module.
    """

    def __init__(self) -> None:
        witness = _Witness()
        self._alive = weakref.ref(witness)
        main = sys.modules.get("__main__")
        if main is not None:
            main.__dict__["__unirun__"] = witness

    def __del__(self) -> None:
        witness = self._alive()
        for names in gc.get_referrers(witness) if witness is not None else ():
            if isinstance(names, dict) and names.get("__unirun__") is witness:
                names.clear()


class _StandIn:
    """Not a module, so it is not taken apart; ``import`` in a ``__del__`` at the end finds the module's names."""

    def __init__(self, module: ModuleType) -> None:
        self.__dict__["__wrapped__"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__wrapped__"], name)


class _Later(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads a module that is there already; `imported` is called after that."""

    def __init__(self, module: ModuleType, imported: Callable[[], None]) -> None:
        self._module, self._imported, self._spec = module, imported, module.__spec__

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's, for its name."""
        if name != self._module.__name__ or self._spec is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=self._spec.origin, is_package=True)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed. Undo what the import system has written into it."""
        module.__spec__ = self._spec
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._imported()


def leave_files() -> None:
    """In a fork: files that the process before it has created and will remove are that process's."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _threads_after_fork() -> int:
    """How many threads are left after a fork: OpenBLAS's know of forks and end before."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _threads()


def _skip_static_destructors() -> None:
    """End the process before C++ takes torch's global objects apart, but after C's exit handlers of this fork.

    Such handlers run in reverse order: those that libraries register from now on, then these two.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


def _flush_cpp() -> None:
    """``std::cout`` and ``std::clog`` may have buffers of their own, which a static destructor would write."""
    try:
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        # No C++ in this process.
        return
    for stream in ("_ZSt4cout", "_ZSt4clog"):
        library._ZNSo5flushEv(ctypes.byref(ctypes.c_char.in_dll(library, stream)))
