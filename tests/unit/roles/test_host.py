"""How a workload or a trainer is made of what a spec names."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from unirun.errors import UsageError
from unirun.roles import BaseTrainer, BaseWorkload
from unirun.roles.host import _keep, load_class, make


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a class that is derived, one that is not, and a function."""
    (tmp_path / "play_of_hosts.py").write_text(
        "import unirun\nclass Actor(unirun.BaseWorkload): ...\nclass Other: ...\ndef made(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "play_of_hosts"


class TestAClass:
    def test_is_found_by_its_name(self, module: str) -> None:
        assert load_class(f"{module}:Actor", BaseWorkload).__name__ == "Actor"

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("Actr", "play_of_hosts has no 'Actr'; name a class that is there"),
            ("Other", "is not derived from BaseWorkload; write class Other"),
            ("made", "is not derived from BaseWorkload"),
        ],
    )
    def test_that_is_none_is_a_wrong_use(self, module: str, name: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            load_class(f"{module}:{name}", BaseWorkload)


class Bare(BaseWorkload):
    """Takes nothing."""

    def __init__(self) -> None:
        pass


class Wrong(BaseWorkload):
    """Takes the right things, and fails."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        len(config)


class TestMaking:
    def test_a_class_that_takes_other_arguments_is_a_wrong_use(self) -> None:
        with pytest.raises(UsageError) as caught:
            make(Bare, BaseWorkload, master_handle=1, config=2)
        text = str(caught.value)
        assert "Bare.__init__() takes 1 positional argument but 3 were given" in text
        assert text.endswith("write def __init__(self, master_handle, config), or leave it out")
        assert caught.value.__suppress_context__, "it says all that there is to say"

    def test_a_type_error_of_its_own_stays_one(self) -> None:
        with pytest.raises(TypeError, match="has no len"):
            make(Wrong, BaseWorkload, master_handle=1, config=2)

    def test_a_class_gets_its_arguments_in_order(self) -> None:
        made = make(BaseTrainer, BaseTrainer, actor_handles={}, actor_classes={}, config=3)
        assert made.config == 3


def test_a_result_that_cannot_be_kept_fails_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _keep(tmp_path / "result", threading.Lock())
    assert capsys.readouterr().err.startswith(
        "unirun: what fit() returned cannot be kept as the job's result: "
    )
    assert not (tmp_path / "result").exists()
