"""The modules that a spawner has imported, and how its forks share them.

A fork shares their memory pages with the spawner. In a fork torch appears as not imported yet, so that scripts can set
variables first; and the interpreter's clean-up at exit must skip the modules, as it would copy their pages.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

LATER = "torch"
"""The package that appears as not imported in a fork."""

_NEVER = ("sys", "builtins", "__main__", "__mp_main__")


class PreloadedModules:
    """The modules that one spawner imports. Create it before anything else registers an exit handler."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        """Number of threads, by module, that its import has started and that a fork would lack."""
        self._own = {"sitecustomize", "usercustomize"}
        """User modules, which are cleaned up at exit as in a fresh process: their files are flushed and closed."""
        self._stand_ins: dict[str, tuple[ModuleType, _StandIn]] = {}
        self._end = ModuleType("unirun.launcher.end")
        self._forked = False
        self._frozen = 0
        # Exit handlers run in reverse order, so this one is the last.
        atexit.register(self._at_exit)
        self._count("sitecustomize", 1)

    def load(self, name: str) -> None:
        """Import a module and count the threads that it starts."""
        theirs = name.partition(".")[0] not in ("torch", "unirun")
        if theirs:
            self._own.add(name)
        before = _threads()
        with nullcontext() if theirs else _kept_from_collections():
            importlib.import_module(name)
        self._count(name, before)

    def _count(self, name: str, before: int) -> None:
        if _threads() > before and (left := _threads_after_fork() - before) > 0:
            self.threads[name] = left

    def freeze(self) -> None:
        """After all imports: arrange the modules so that forks copy few pages. Idempotent."""
        if len(sys.modules) == self._frozen:
            return
        self._frozen = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and name not in _NEVER and name not in self._own:
                self._stand_ins[name] = module, _StandIn(module)
        # Leaked references, so that these modules are never deallocated.
        for kept in (self._stand_ins, self._end):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        gc.collect()
        gc.freeze()

    def in_fork(self, imported: Callable[[], None]) -> None:
        """Set up a fork; `imported` is called when its code imports torch."""
        self._forked = True
        leave_files()
        if LATER in sys.modules:
            sys.meta_path.insert(0, _Later(sys.modules.pop(LATER), imported))
        _skip_static_destructors()

    def _at_exit(self) -> None:
        """In a fork, after all other exit handlers: hide the modules from the interpreter's clean-up.

        The clean-up clears all modules in ``sys.modules``. For torch's this takes a quarter of a second, and aborts a
        script that has not called ``destroy_process_group``.
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
    """An object that lives as long as the namespace of ``__main__``."""


class _Sweeper:
    """Clears the namespace of ``__main__`` if it is still alive after the clean-up.

    It is when a hidden module refers to a function of the script. In a fresh process it would be deallocated with that
    module.
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
    """A proxy that is not a module, so it is not cleared; an ``import`` in a late ``__del__`` still finds its names."""

    def __init__(self, module: ModuleType) -> None:
        self.__dict__["__wrapped__"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__wrapped__"], name)


class _Later(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module that is already loaded, then calls `imported`."""

    def __init__(self, module: ModuleType, imported: Callable[[], None]) -> None:
        self._module, self._imported, self._spec = module, imported, module.__spec__

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the module, when `name` is its name."""
        if name != self._module.__name__ or self._spec is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=self._spec.origin, is_package=True)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the attribute that the import system has replaced; the module was executed before."""
        module.__spec__ = self._spec
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._imported()


@contextmanager
def _kept_from_collections() -> Iterator[None]:
    """A context without garbage collections, whose objects later ones leave out. A collection of torch's 250 000
    objects takes a tenth of the time that its import takes, and frees 3 % of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Before `enable`, as the next allocation would begin one.
        gc.freeze()
        if enabled:
            gc.enable()


def leave_files() -> None:
    """In a fork: leave temporary files of the parent process, which removes them itself."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _threads_after_fork() -> int:
    """Number of threads of this process after a fork: OpenBLAS ends its threads before one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _threads()


def _skip_static_destructors() -> None:
    """Make the process exit before the static destructors of C++, but after exit handlers registered in this fork.

    C runs them in reverse order: those that libraries register from now on, then these two.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


def _flush_cpp() -> None:
    """Flush ``std::cout`` and ``std::clog``, as their static destructors are skipped."""
    try:
        library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        # No C++ in this process.
        return
    for stream in ("_ZSt4cout", "_ZSt4clog"):
        library._ZNSo5flushEv(ctypes.byref(ctypes.c_char.in_dll(library, stream)))
