"""Names of experiments and trials, settings from the command line, and modules that register experiments."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.experiments.sample_configs import ppo
from unirun.errors import EXIT_USAGE, SpecError, UsageError
from unirun.experiments.experiment import (
    EXPERIMENTS,
    Experiment,
    ExperimentConfig,
    check_names,
    import_modules,
    register_experiment,
    resolve,
    with_settings,
)


@dataclass
class Optimizer:
    """Settings within settings."""

    lr: float = 1e-3
    name: str = "adam"


@dataclass
class Settings(Experiment):
    """An experiment with settings of some types."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 10
    fast: bool = False
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    limit: int | None = None
    twice: bool = False

    def initial_setup(self) -> ExperimentConfig:
        """PPO; with `twice` one of its calls is there twice."""
        config = ppo(separate=self.fast)
        if self.twice:
            config.model_rpcs.append(config.model_rpcs[0])
        return config


class Fixed(Experiment):
    """One without settings, which returns no configuration."""

    def initial_setup(self) -> Any:
        """Something else."""
        return {"model_rpcs": []}


class Listed(Experiment):
    """One that returns a list, as AReaL's may."""

    number = 1

    def initial_setup(self) -> list[ExperimentConfig]:
        """So many configurations."""
        return [ppo(separate=False)] * self.number


register_experiment("tests-listed", Listed)
register_experiment("tests-settings", Settings)
register_experiment("tests-fixed", Fixed)


def changed(*overrides: str) -> Settings:
    found = with_settings("tests-settings", overrides)
    assert isinstance(found, Settings)
    return found


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "a",
            "A9",
            "ppo",
            "llama-3.1-8b",
            "0",
            "a" * 100,
            "test20231020",
            "seed_2",
            "lr=1e-4,n=2",
            "a b",
            "ä",
            "a..b",
        ],
    )
    def test_names_that_a_directory_can_have(self, name: str) -> None:
        check_names(name, name)

    @pytest.mark.parametrize(
        "name",
        ["", "a/b", "/a", "..", ".", "-a", ".a", " a", "a ", "a\n", "a\tb", "\udc80", "a" * 101, "ä" * 51],
    )
    def test_others_are_refused(self, name: str) -> None:
        with pytest.raises(UsageError, match="is no name for an experiment; use printable characters"):
            check_names(name, "first")
        with pytest.raises(UsageError, match="is no name for a trial; use printable characters"):
            check_names("ppo", name)

    def test_the_error_is_one_that_the_command_tells_and_no_assertion(self) -> None:
        with pytest.raises(UsageError) as caught:
            check_names("a/b", "first")
        assert not isinstance(caught.value, AssertionError)
        assert caught.value.exit_code == EXIT_USAGE
        assert "'a/b'" in str(caught.value)

    @given(st.text(max_size=70))
    def test_a_name_is_one_part_of_a_path(self, name: str) -> None:
        try:
            check_names(name, "first")
        except UsageError:
            return
        assert Path("/top", name).parts == ("/", "top", name)
        assert Path("/top", name).resolve().parent == Path("/top")


class TestSettings:
    def test_without_changes_they_are_the_defaults(self) -> None:
        assert changed() == Settings()

    def test_they_are_changed_by_their_names(self) -> None:
        found = changed("optimizer.lr=1e-4", "steps=3", "fast=true", "sizes=[4]", "limit=7")
        assert found == Settings(Optimizer(1e-4), 3, fast=True, sizes=[4], limit=7)
        assert isinstance(found.optimizer, Optimizer)

    def test_one_change_does_not_change_the_next_start(self) -> None:
        changed("optimizer.lr=9", "sizes=[]")
        assert changed() == Settings()

    def test_the_last_of_two_changes_counts(self) -> None:
        assert changed("steps=3", "steps=4").steps == 4

    @pytest.mark.parametrize("override", ["step=3", "optimizer.rate=1", "optimizer.lr.x=1", "=3", ""])
    def test_a_setting_that_is_not_there_is_told_with_those_that_are(self, override: str) -> None:
        with pytest.raises(UsageError) as caught:
            changed(override)
        assert caught.value.remedy == (
            "the settings of tests-settings are: optimizer, steps, fast, sizes, limit, twice"
        )

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
            ("steps=1.5", "Value '1.5' of type 'float' could not be converted to Integer"),
            ("steps=null", "Incompatible value 'None'"),
            ("fast=3.5", "could not be converted to Boolean|is not a valid bool"),
            ("sizes=[a]", "Value 'a' of type 'str' could not be converted to Integer"),
            ("sizes=3", "is not a"),
            ("sizes.a=3", "Cannot merge incompatible container types"),
            ("optimizer=3", "int is not a subclass of Optimizer"),
            ("optimizer.name=${nothing}", "'nothing' not found"),
            ("optimizer.name=${", "no viable alternative"),
            ("steps=[1", "while parsing"),
            ("optimizer.name=a: b: c", "mapping values are not allowed"),
            ("optimizer.name=!!python/name:os.system", "could not determine a constructor"),
        ],
    )
    def test_a_value_of_another_type_is_told(self, override: str, problem: str) -> None:
        with pytest.raises(UsageError, match=problem) as caught:
            changed(override)
        assert caught.value.exit_code == EXIT_USAGE

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("steps=many", "steps=many: Value 'many' of type 'str' could not be converted to Integer"),
            ("optimizer.lr=x", "optimizer.lr=x: Value 'x' of type 'str' could not be converted to Float"),
            ("sizes=[a]", "sizes[0]: Value 'a' of type 'str'"),
            ("optimizer=3", "optimizer=3: "),
            ("steps=[1", "steps=[1: while parsing"),
            ("optimizer.name=${nothing}", "optimizer.name=${nothing}: Interpolation key 'nothing' not found"),
            ("[=1", "[=1: this names no setting"),
        ],
    )
    def test_the_setting_with_the_error_is_named_among_others(self, override: str, told: str) -> None:
        with pytest.raises(UsageError, match=f"^{re.escape(told)}"):
            changed("limit=3", override)

    @pytest.mark.parametrize("name", ["limit", "steps", "no_such"])
    def test_a_setting_without_a_value_is_told_and_is_not_none(self, name: str) -> None:
        """``limit 3``, for example."""
        with pytest.raises(UsageError, match=f"^{name}: a setting is written as key=value"):
            changed(name)

    def test_an_interpolation_that_another_setting_follows_is_named_too(self) -> None:
        with pytest.raises(UsageError, match="^optimizer.name: Interpolation key 'nothing' not found"):
            changed("optimizer.name=${nothing}", "limit=3")

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("optimizer.name=null", "null is YAML's None; for the text write optimizer.name=\"'null'\""),
            ("optimizer.name=", "an empty value is YAML's None; for the text write optimizer.name=\"''\""),
        ],
    )
    def test_how_a_text_is_written_that_yaml_takes_for_none(self, override: str, told: str) -> None:
        with pytest.raises(UsageError, match=re.escape(told)):
            changed(override)
        assert changed("optimizer.name='null'").optimizer.name == "null"
        with pytest.raises(UsageError) as caught:
            changed("steps=null")
        assert "YAML" not in str(caught.value)

    @given(st.text(max_size=20), st.text(max_size=20))
    def test_whatever_is_given_it_is_a_setting_or_told(self, name: str, value: str) -> None:
        for override in (f"{name}={value}", f"optimizer.name={value}", name):
            try:
                changed(override)
            except UsageError as error:
                assert "tests-settings" in error.remedy

    def test_an_experiment_that_is_no_dataclass_has_none(self) -> None:
        assert isinstance(with_settings("tests-fixed", ()), Fixed)
        with pytest.raises(UsageError, match="'tests-fixed' has no settings; make Fixed a dataclass"):
            with_settings("tests-fixed", ["steps=3"])


class TestResolving:
    def test_the_whole_configuration_follows_from_the_settings(self) -> None:
        assert len(resolve("tests-settings", ()).model_worker) == 2
        config = resolve("tests-settings", ["fast=true"])
        assert len(config.model_worker) == 8
        assert config.resolved is not None

    def test_one_that_is_wrong_is_told(self) -> None:
        with pytest.raises(SpecError, match="2 calls have the name 'actorGen'"):
            resolve("tests-settings", ["twice=true"])

    def test_something_else_than_a_configuration_is_told(self) -> None:
        with pytest.raises(UsageError, match=r"initial_setup\(\) of 'tests-fixed' returns a dict"):
            resolve("tests-fixed", ())

    def test_what_an_experiment_does_not_define_is_named(self) -> None:
        with pytest.raises(NotImplementedError, match=r"Experiment must define initial_setup\(\)"):
            Experiment().initial_setup()
        with pytest.raises(NotImplementedError, match=r"Experiment must define scheduling_setup\(\)"):
            Experiment().scheduling_setup()


REGISTERS = """
from unirun.experiments import Experiment, register_experiment
register_experiment({!r}, Experiment)
"""


class TestModules:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Forget the modules that a test has imported when it ends."""
        before = {**sys.modules}
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in [name for name in before if name.partition(".")[0] == "experiments"]:
            del sys.modules[name]
        yield
        for name in sys.modules.keys() - before.keys():
            del sys.modules[name]
        sys.modules.update(before)

    def test_a_module_is_imported_as_seen_from_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "tests_given.py").write_text(REGISTERS.format("tests-given"))
        import_modules(["tests_given"], str(tmp_path))
        assert "tests-given" in EXPERIMENTS
        assert sys.path[0] == str(tmp_path), "before what is installed under the same names"

    def test_without_names_all_modules_of_the_package_are_imported(self, tmp_path: Path) -> None:
        package = tmp_path / "experiments"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "one.py").write_text(REGISTERS.format("tests-one"))
        (package / "two.py").write_text(REGISTERS.format("tests-two"))
        import_modules((), str(tmp_path))
        assert {"tests-one", "tests-two"} <= {*EXPERIMENTS.names()}

    def test_hidden_files_of_the_package_are_no_modules(self, tmp_path: Path) -> None:
        package = tmp_path / "experiments"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "seen.py").write_text(REGISTERS.format("tests-seen"))
        # Those of an editor in which the file is open, and of a system that keeps attributes so.
        (package / ".#seen.py").symlink_to("someone@somewhere.17")
        (package / "._seen.py").write_bytes(b"\0\5\26\7")
        import_modules((), str(tmp_path))
        assert "tests-seen" in EXPERIMENTS

    def test_without_names_and_without_the_package_there_is_nothing_to_import(self, tmp_path: Path) -> None:
        before = EXPERIMENTS.names()
        import_modules((), str(tmp_path))
        assert EXPERIMENTS.names() == before

    @pytest.mark.parametrize("name", ["tests_nowhere", "tests_nowhere.deep", "json.tests_nowhere"])
    def test_a_module_that_is_not_there_is_told(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UsageError, match=f"there is no module '{name}'; give --module"):
            import_modules([name], str(tmp_path))

    def test_one_that_lacks_another_is_told_with_the_place(self, tmp_path: Path) -> None:
        (tmp_path / "tests_lacking.py").write_text("\nimport tests_something_else")
        with pytest.raises(UsageError, match="module 'tests_lacking' cannot be imported") as caught:
            import_modules(["tests_lacking"], str(tmp_path))
        cause = caught.value.__cause__
        assert isinstance(cause, ModuleNotFoundError)
        assert cause.name == "tests_something_else"
        trace = cause.__traceback__
        # What the import system does is left out.
        assert trace is not None
        assert trace.tb_frame.f_code.co_filename == str(tmp_path / "tests_lacking.py")

    @pytest.mark.parametrize(
        "form", ["{0}/tests_file.py", "./tests_file.py", "tests_file.py", "x/../tests_file.py"]
    )
    def test_a_file_is_given_by_any_path(self, tmp_path: Path, form: str) -> None:
        (tmp_path / "tests_file.py").write_text(REGISTERS.format(f"tests-file-{len(form)}"))
        import_modules([form.format(tmp_path)], str(tmp_path))
        assert f"tests-file-{len(form)}" in EXPERIMENTS
        assert "tests_file" in sys.modules

    @pytest.mark.parametrize("form", ["../tests_above.py", "{0}/tests_above.py"])
    def test_a_file_outside_the_folder_may_import_those_beside_it(self, tmp_path: Path, form: str) -> None:
        (tmp_path / "tests_beside.py").write_text("NAME = 'tests-above'")
        (tmp_path / "tests_above.py").write_text("from tests_beside import NAME")
        (tmp_path / "folder").mkdir()
        import_modules([form.format(tmp_path)], str(tmp_path / "folder"))
        assert "tests_beside" in sys.modules

    def test_a_file_in_a_package_has_the_name_by_which_others_import_it(self, tmp_path: Path) -> None:
        package = tmp_path / "tests_package"
        package.mkdir()
        (package / "three.py").write_text(REGISTERS.format("tests-three"))
        import_modules(
            ["./tests_package/three.py", "tests_package.three", "tests_package/three"], str(tmp_path)
        )
        assert "tests_package.three" in sys.modules
        assert "three" not in sys.modules

    def test_a_file_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=f"there is no file {tmp_path}/nowhere.py; give --module"):
            import_modules(["./nowhere.py"], str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [("def f(:", "SyntaxError: invalid syntax"), ("1 / 0", "ZeroDivisionError: division")],
    )
    def test_a_file_that_cannot_be_imported_is_named_and_has_its_error_as_the_cause(
        self, tmp_path: Path, text: str, problem: str
    ) -> None:
        (tmp_path / "tests_bad.py").write_text(text)
        with pytest.raises(
            UsageError, match=f"{tmp_path}/tests_bad.py cannot be imported: {problem}"
        ) as caught:
            import_modules(["tests_bad.py"], str(tmp_path))
        assert type(caught.value.__cause__).__name__ == problem.partition(":")[0]

    def test_a_file_with_the_name_of_another_module_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text(REGISTERS.format("tests-json"))
        with pytest.raises(UsageError, match="there is another module json, .*; rename one of them"):
            import_modules(["json.py"], str(tmp_path))


def test_initial_setup_may_return_a_list_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("tests-listed", []).resolved is not None
    monkeypatch.setattr(Listed, "number", 2)
    with pytest.raises(
        UsageError, match="returns 2 configurations, and a trial has one; return one, and start"
    ):
        resolve("tests-listed", [])
