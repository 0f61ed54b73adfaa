"""A script that is run by unirun does the same at its end, with processes, files and variables, as under
``python -u script.py``.

All of a start method's scripts run in one job, each as a role of its own.
"""

from __future__ import annotations

import py_compile
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.effort import variants

from .harness import Unirun, command_in

SCRIPTS = {
    "child": """
        import os
        import unirun
        unirun.init()
        if os.fork() == 0:
            links = []
            for number in map(int, os.listdir("/proc/self/fd")):
                if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
                    links.append(os.readlink(f"/proc/self/fd/{number}"))
            # A thread may have a file of a module open at the moment of the fork.
            print([link for link in links if ":[" in link])
            raise ValueError("of a child")
        os.wait()
        """,
    "objects": """
        import atexit, functools, shelve, tempfile, weakref, zipfile
        archive = zipfile.ZipFile("archive.zip", "w")
        archive.writestr("a", "b")
        shelf = shelve.open("shelf", writeback=True)
        shelf["key"] = [1]
        shelf["key"].append(2)
        temporary, folder = tempfile.NamedTemporaryFile(), tempfile.TemporaryDirectory()
        with open("names", "w") as names:
            names.write(f"{temporary.name} {folder.name}")
        class Object:
            def __init__(self, name): self.name = name
            def __del__(self): print("deleted", self.name, functools.reduce(max, [1, 2]))
        one, two = Object("one"), Object("two")
        weakref.finalize(one, print, "finalized")
        atexit.register(print, "at exit 1")
        atexit.register(print, "at exit 2")
        text = open("text", "w")
        text.write("buffered")
        """,
    "native": """
        import ctypes, os
        ctypes.CDLL(None).printf(b"of C")
        os._exit(0)
        """,
    "pools": """
        import multiprocessing
        class Mine:
            def __init__(self, value): self.value = value
        if __name__ == "__main__":
            for method in ("spawn", "forkserver", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map_async(Mine, [7]).get(60)[0].value)
        """,
    "closed": "import sys; sys.stdout.close()",
    "replaced": "import io, sys; sys.stdout = io.StringIO(); sys.stdout.close()",
    "again": """
        import os, sys
        if "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, sys.orig_argv)
        print(sys.argv[1:])
        """,
    "closing": """
        import os, unirun
        context = unirun.init()
        os.closerange(3, 65)
        print(context.peers.ask("version", "none", timeout=30))
        """,
    "preloaded": """
        import journal
        journal.FILE.write("of the journal")
        mine = open("mine", "w")
        mine.write("of the script")
        print(mine.fileno() == journal.FILE.fileno())
        """,
    "options": """
        import os, sys
        print(sys.stdout.encoding, sys.stdout.errors, sys.stdin.encoding)
        print(sys.flags.safe_path, sys.path.count(os.path.dirname(__file__)))
        """,
    "variables": """
        import os, sys
        print("torch" in sys.modules)
        for name, value in {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTORCH_JIT": "0"}.items():
            os.environ[name] = value
        import torch
        print(torch.get_num_threads(), torch.distributed.get_debug_level().name, torch.jit._state._enabled.enabled)
        print(torch.__spec__.name)

        import ctypes
        cpp = ctypes.CDLL("libstdc++.so.6")
        cpp._ZNSt8ios_base15sync_with_stdioEb(False)
        cpp._ZNSo5writeEPKcl(ctypes.byref(ctypes.c_char.in_dll(cpp, "_ZSt4cout")), b"of C++", 6)
        """,
}


@dataclass(frozen=True)
class Ran:
    """A job in which every script was a role."""

    unirun: Unirun
    method: str

    def out(self, role: str) -> list[str]:
        return self.unirun.log(role, 0).decode().splitlines()

    def err(self, role: str) -> str:
        return self.unirun.log(role, 0, stream="stderr").decode()


@pytest.fixture(scope="module", params=variants("fork", "exec"))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One job for all tests, which only read what it has left."""
    root = tmp_path_factory.mktemp("fresh")
    run_all(root, request.param)
    return Ran(Unirun(root), request.param)


def run_all(root: Path, method: str) -> None:
    # Roles with different variables have different spawners, and each imports it.
    (root / "journal.py").write_text("FILE = open('journal', 'a')\n")
    paths = {}
    for name, text in SCRIPTS.items():
        paths[name] = root / f"{name}.py"
        paths[name].write_text(textwrap.dedent(text))
    (root / "plain.py").write_text("import sys; print(__file__, sys.path[0])")
    py_compile.compile(str(root / "plain.py"), str(root / "compiled.pyc"))
    paths["compiled"] = root / "compiled.pyc"
    paths["archive"] = root / "an archive"
    with zipfile.ZipFile(paths["archive"], "w") as archive:
        archive.write(root / "plain.py", "__main__.py")
    (root / "folder").mkdir()
    (root / "folder" / "__main__.py").write_text((root / "plain.py").read_text())
    paths["folder"] = Path("folder")
    options: list[object] = ["--roles", ",".join(f"{name}=1" for name in paths)]
    for name, path in paths.items():
        options += ["--script", f"{name}={path}"]
    for variable in ("PYTHONIOENCODING=latin-1:replace", "PYTHONSAFEPATH=1"):
        options += ["--env", f"options:{variable}"]
    with command_in(root) as unirun:
        result = unirun(
            *("--start-method", method, "--preload", "journal", *options),
            env={"PYTHONPATH": str(root)},
            within=180.0,
        )
        assert result.code == 0, result.err


class TestAScript:
    def test_a_script_may_fork_and_its_child_may_fail(self, ran: Ran) -> None:
        assert ran.out("child") == ["[]"]
        assert "ValueError: of a child" in ran.err("child")
        assert not (ran.unirun.job_dir() / "logs" / "child" / "0" / "0" / "error.json").exists()
        assert ran.unirun.status()["failures"] == []

    def test_objects_of_a_script_are_finalised_at_the_interpreters_end(self, ran: Ran) -> None:
        root = ran.unirun.root
        with zipfile.ZipFile(root / "archive.zip") as archive:
            assert archive.read("a") == b"b"
        shelf = __import__("shelve").open(str(root / "shelf"))
        assert dict(shelf) == {"key": [1, 2]}
        assert (root / "text").read_text() == "buffered"
        assert not [name for name in (root / "names").read_text().split() if Path(name).exists()]
        assert ran.out("objects") == [
            *("at exit 2", "at exit 1", "finalized"),
            *("deleted one 2", "deleted two 2"),
        ]

    def test_a_script_has_unbuffered_c_streams(self, ran: Ran) -> None:
        assert ran.out("native") == ["of C"]

    def test_a_script_gets_objects_of_its_classes_from_its_child_processes(self, ran: Ran) -> None:
        assert ran.out("pools") == ["spawn 7", "forkserver 7", "fork 7"]

    @pytest.mark.parametrize("role", ["closed", "replaced"])
    def test_a_script_may_close_its_stdout(self, ran: Ran, role: str) -> None:
        assert (ran.out(role), ran.err(role)) == ([], "")

    def test_a_script_may_execute_itself_again(self, ran: Ran) -> None:
        assert ran.out("again") == ["[]"]

    def test_a_script_may_close_descriptors_that_it_has_not_opened(self, ran: Ran) -> None:
        assert ran.out("closing") == ["None"]

    def test_a_script_shares_no_descriptor_with_a_preloaded_module(self, ran: Ran) -> None:
        root = ran.unirun.root
        assert ran.out("preloaded") == ["False"]
        assert ((root / "journal").read_text(), (root / "mine").read_text()) == (
            "of the journal",
            "of the script",
        )

    def test_a_script_may_set_variables_before_it_imports_torch(self, ran: Ran) -> None:
        forked = ran.method == "fork"
        assert ran.out("variables")[:3] == ["False", f"1 DETAIL {forked}", "torch"]
        told = [line for line in ran.err("variables").splitlines() if line.startswith("unirun: ")]
        assert [line.partition(" set ")[0] for line in told] == ["unirun: PYTORCH_JIT:"] * forked

    def test_a_script_obeys_the_interpreters_variables(self, ran: Ran) -> None:
        assert ran.out("options") == ["iso8859-1 replace iso8859-1", "True 1"]

    def test_cpp_buffers_of_a_script_are_flushed_at_its_end(self, ran: Ran) -> None:
        assert ran.out("variables")[3:] == ["of C++"]

    def test_a_script_may_be_compiled_an_archive_or_a_directory(self, ran: Ran) -> None:
        root = ran.unirun.root
        assert ran.out("compiled") == [f"{root}/compiled.pyc {root}"]
        assert ran.out("archive") == [f"{root}/an archive/__main__.py {root}/an archive"]
        assert ran.out("folder") == [f"{root}/folder/__main__.py {root}/folder"]
