"""The values of PYTHONPATH that a fork can take over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unirun.launcher.warm.files import folders_of, found_elsewhere, take_over

IMPORTED = {"torch": "/venv/torch/__init__.py", "random": "/usr/lib/random.py", "time": ""}


def why_not(folder: Path) -> str:
    """Compare for a job with one more folder than the warm process."""
    return found_elsewhere(("/lib",), (str(folder), "/lib"), IMPORTED)


class TestAnotherFolder:
    def test_another_folder_with_modules_not_imported_yet_fits(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        assert why_not(tmp_path) == ""

    def test_another_folder_with_the_imported_modules_fits(self, tmp_path: Path) -> None:
        (tmp_path / "random.py").touch()
        (tmp_path / "link").symlink_to(tmp_path)
        imported = {"random": str(tmp_path / "random.py")}
        assert found_elsewhere((), (str(tmp_path / "link"),), imported) == ""

    def test_another_folder_that_does_not_exist_fits(self, tmp_path: Path) -> None:
        assert why_not(tmp_path / "nowhere") == ""

    def test_another_folder_with_a_data_folder_named_as_a_module_fits(self, tmp_path: Path) -> None:
        (tmp_path / "random").mkdir()
        assert why_not(tmp_path) == ""

    @pytest.mark.parametrize("file", ["random.py", "torch/__init__.py", "sitecustomize.py"])
    def test_another_folder_with_another_version_of_an_imported_module_does_not_fit(
        self, tmp_path: Path, file: str
    ) -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
        name = Path(file).parts[0].removesuffix(".py")
        assert why_not(tmp_path) == f"PYTHONPATH has {tmp_path}, where there is another {name}"

    @pytest.mark.parametrize(
        ("group", "fits"),
        [("torch.backends", False), ("console_scripts", True), ("vllm.general_plugins", True)],
    )
    def test_another_folder_with_a_distribution_that_imports_look_for_does_not_fit(
        self, tmp_path: Path, group: str, fits: bool
    ) -> None:
        info = tmp_path / "mine.egg-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(f"[{group}]\nmine = mine:main\n")
        assert (why_not(tmp_path) == "") == fits

    def test_another_folder_with_an_unreadable_distribution_does_not_fit(self, tmp_path: Path) -> None:
        (tmp_path / "mine.egg-info" / "entry_points.txt").mkdir(parents=True)
        assert "mine.egg-info may be for what is imported" in why_not(tmp_path)


class TestTheSameFolders:
    def test_the_same_folders_fit_whatever_their_contents(self, tmp_path: Path) -> None:
        (tmp_path / "random.py").touch()
        assert found_elsewhere((str(tmp_path),), (str(tmp_path),), IMPORTED) == ""

    @pytest.mark.parametrize("wanted", [(), ("/a",), ("/b", "/a")])
    def test_all_folders_of_the_warm_process_must_be_present_in_order(self, wanted: tuple[str, ...]) -> None:
        assert found_elsewhere(("/a", "/b"), wanted, {}).startswith("PYTHONPATH is ")


@pytest.mark.starts_processes
@pytest.mark.parametrize("value", ["", "lib", "lib:", "/a:lib:/a:/b/../c", ":/a"])
def test_take_over_gives_the_search_path_of_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    def path_of(value: str) -> list[str]:
        show = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep=chr(10))"]
        done = subprocess.run(show, env={"PYTHONPATH": value}, cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.splitlines()

    monkeypatch.setattr(sys, "path", path_of("/z"))
    take_over(("/z",), folders_of(value, str(tmp_path)))
    assert sys.path == path_of(value)
