"""The facts that a process finds in itself: a line of JSON on stdout, with a key for each function that is
marked `look`.

It runs as a script, a module, a directory and a zip, under several launchers; `test_conformance.py` compares the lines. The
name of a function is the name of the property, its docstring says how it is looked at.
"""

# ruff: noqa: E402
import sys

AT_FIRST = {"names": sorted(globals()), "modules": sorted(sys.modules), "path": list(sys.path)}

import builtins
import concurrent.futures
import inspect
import json
import multiprocessing
import os
import pickle
import threading
import warnings

import probe_process
from probe_process import kind_of

LOOKS = {}


def look(function):
    """Mark a function as a property that is looked at."""
    LOOKS[function.__name__.replace("_", " ")] = function
    return function


class Thing:
    """A class of the script, whose instances travel between processes."""

    def __init__(self, value):
        self.value = value


def make_thing(value):
    """Runs in another process."""
    return Thing(value)


# __main__


@look
def names_in_main():
    """The names in ``__main__`` at its first line."""
    return AT_FIRST["names"]


@look
def attributes_of_main():
    """The attributes of ``__main__``, by name."""
    main = sys.modules["__main__"]
    found = {name: repr(main.__dict__.get(name, "absent")) for name in ("__name__", "__file__", "__cached__")}
    for name in ("__annotations__", "__package__", "__path__"):
        found[name] = repr(main.__dict__.get(name, "absent"))
    found["__doc__"] = repr((main.__doc__ or "")[:20])
    found["__builtins__"] = kind_of(main.__dict__.get("__builtins__"))
    loader = main.__dict__.get("__loader__")
    found["__loader__"] = getattr(loader, "__qualname__", None) or kind_of(loader)
    for name in ("name", "path", "archive"):
        found[f"__loader__.{name}"] = repr(getattr(loader, name, "absent"))
    spec = main.__spec__
    found["__spec__"] = kind_of(spec)
    for name in ("name", "origin", "cached", "parent", "submodule_search_locations", "has_location"):
        found[f"__spec__.{name}"] = repr(getattr(spec, name, "absent"))
    return found


@look
def identity_of_main():
    """Note whether ``sys.modules["__main__"]`` is the script, and the identity of ``__mp_main__``."""
    mp_main = sys.modules.get("__mp_main__")
    return {
        "__main__ is the script": sys.modules["__main__"].__dict__ is globals(),
        "__mp_main__": "absent" if mp_main is None else str(mp_main is sys.modules["__main__"]),
    }


@look
def call_stack():
    """The functions that run below the script's own."""
    frames = [(os.path.basename(f.filename), f.function) for f in inspect.stack(context=0)]
    return [f"{name}: {function}" for name, function in frames[2:]]


@look
def source_of_a_function():
    """`inspect.getsource` of a function of the script."""
    try:
        return inspect.getsource(make_thing)
    except OSError as error:
        return repr(error)


@look
def pickle_of_an_instance():
    """A class of the script, there and back."""
    return pickle.loads(pickle.dumps(Thing(5))).value  # noqa: S301 - it has just been written


@look
def module_beside_the_script():
    """The file of a module that lies where the script lies."""
    return probe_process.__file__


# the interpreter


@look
def loaded_modules():
    """``sys.modules`` at the first line."""
    return AT_FIRST["modules"]


@look
def module_search_path():
    """``sys.path`` at the first line."""
    return AT_FIRST["path"]


@look
def arguments():
    """``sys.argv``."""
    return repr(sys.argv)


@look
def original_arguments():
    """``sys.orig_argv``."""
    return repr(sys.orig_argv)


@look
def interpreter():
    """Its file, prefixes and flags."""
    found = {
        name: getattr(sys, name)
        for name in ("executable", "_base_executable", "prefix", "base_prefix", "exec_prefix")
    }
    found |= {
        f"flags.{name}": repr(getattr(sys.flags, name))
        for name in dir(sys.flags)
        if name[0] != "_" and name not in ("count", "index")
    }
    return found


@look
def settings_of_the_interpreter():
    """The settings of ``sys``."""
    return {
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "dont_write_bytecode": sys.dont_write_bytecode,
        "pycache_prefix": sys.pycache_prefix,
        "warnoptions": sys.warnoptions,
        "_xoptions": sys._xoptions,
        "int_max_str_digits": sys.get_int_max_str_digits(),
        "dlopenflags": sys.getdlopenflags(),
        "asyncgen_hooks": repr(tuple(sys.get_asyncgen_hooks())),
        "coroutine_origin_tracking_depth": sys.get_coroutine_origin_tracking_depth(),
        "others": sorted({"ps1", "ps2", "last_type", "last_exc", "tracebacklimit"} & set(dir(sys))),
        "meta_path": [getattr(each, "__qualname__", kind_of(each)) for each in sys.meta_path],
        "path_hooks": len(sys.path_hooks),
    }


@look
def hooks():
    """The hooks of ``sys`` and ``threading`` are the interpreter's own."""
    pairs = [(sys, name) for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")]
    found = {name: getattr(owner, name) is getattr(owner, f"__{name}__") for owner, name in pairs}
    found["threading.excepthook"] = threading.excepthook is threading.__excepthook__
    found["trace"], found["profile"] = repr(sys.gettrace()), repr(sys.getprofile())
    found["import"] = kind_of(builtins.__import__)
    return found


@look
def warning_filters():
    """``warnings.filters``."""
    return [repr(each) for each in warnings.filters]


@look
def names_of_builtins():
    """``dir(builtins)``."""
    return sorted(vars(builtins))


# other processes


def _in_pool(method):
    context = multiprocessing.get_context(method)
    try:
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            thing = pool.submit(make_thing, 7).result(timeout=60)
            return f"{type(thing) is Thing} {thing.value}"
    except Exception as error:  # noqa: BLE001 - whatever there is instead of an instance is what is compared
        return repr(error)


def pool_by_fork():
    """An instance of a class of the script, made in a process of another pool."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _in_pool("fork")


def pool_by_spawn():
    """The same with ``spawn``."""
    return _in_pool("spawn")


def pool_by_forkserver():
    """The same with ``forkserver``."""
    return _in_pool("forkserver")


OTHERS = {
    "pool by fork": pool_by_fork,
    "pool by spawn": pool_by_spawn,
    "pool by forkserver": pool_by_forkserver,
}


def main():
    """Look at everything: at the script, at the process, then at others, which leave a tracker and a server behind."""
    looks = {**LOOKS, **probe_process.LOOKS, **OTHERS}
    if "--torch" in sys.argv:
        looks["state of torch"] = probe_process.state_of_torch
    print("\n" + json.dumps({name: function() for name, function in looks.items()}), flush=True)


if __name__ == "__main__":
    main()
