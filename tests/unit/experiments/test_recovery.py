"""From where a trial goes on: which checkpoints count, and which are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import CheckpointDamaged, UsageError
from unirun.experiments.control import Frequencies, Since
from unirun.experiments.layout import topology
from unirun.experiments.recovery import FILE, ModelSettings, RecoverInfo, Recovery, Settings

from .setups import ppo

MODELS = ["actor@0", "critic@0"]
TWO = ModelSettings(topology(data=2), "ddp")
SETTINGS = Settings(8, {"actor@0": TWO, "critic@0": TWO})
INFO = RecoverInfo(
    12,
    2,
    3,
    ("7", "id of a row", "ü"),
    Frequencies(Since(1, 2, 3.5), eval=Since(0, 4)),
    {"actor@0": 12},
    SETTINGS,
)


@pytest.fixture
def recovery(tmp_path: Path) -> Recovery:
    return Recovery(tmp_path)


def write(recovery: Recovery, *steps: int) -> None:
    """Checkpoints after these steps, all of them whole."""
    for step in steps:
        recovery.prepare(step, MODELS)
        for model in MODELS:
            (recovery.folder(step, model) / "00000.pt").write_bytes(b"weights")
        recovery.commit(RecoverInfo(step))


def damage(recovery: Recovery, step: int, data: bytes = b"{") -> None:
    (recovery.path(step) / FILE).write_bytes(data)


class TestWhenOneCounts:
    def test_without_any_a_trial_begins(self, recovery: Recovery) -> None:
        assert (recovery.latest(), recovery.steps()) == (None, [])

    def test_what_was_committed_is_read(self, recovery: Recovery) -> None:
        recovery.prepare(12, MODELS)
        recovery.commit(INFO)
        assert recovery.latest() == INFO
        assert recovery.read(12) == INFO

    def test_it_counts_when_it_is_committed_and_not_before(self, recovery: Recovery) -> None:
        write(recovery, 1)
        recovery.prepare(2, MODELS)
        assert recovery.steps() == [1]
        recovery.commit(RecoverInfo(2))
        assert recovery.steps() == [1, 2]

    def test_it_counts_by_one_rename_of_a_file_that_is_whole(
        self, recovery: Recovery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recovery.prepare(12, MODELS)
        rename, seen = Path.rename, []

        def watched(source: Path, target: Path) -> Path:
            seen.append((recovery.steps(), source.read_bytes(), target))
            return rename(source, target)

        monkeypatch.setattr(Path, "rename", watched)
        recovery.commit(INFO)
        ((before, whole, target),) = seen
        assert before == []
        assert target == recovery.path(12) / FILE
        assert target.read_bytes() == whole
        assert recovery.steps() == [12]

    def test_one_whose_writer_was_killed_before_the_rename_does_not_count(
        self, recovery: Recovery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(source: Path, target: Path) -> None:
            raise KeyboardInterrupt

        write(recovery, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                write(recovery, 2)
        assert recovery.latest() == RecoverInfo(1)

    def test_what_an_attempt_has_left_of_one_is_dropped_when_it_is_written_again(
        self, recovery: Recovery
    ) -> None:
        recovery.prepare(3, [*MODELS, "gone@0"])
        (recovery.folder(3, "actor@0") / "00007.pt").write_bytes(b"old")
        recovery.prepare(3, MODELS)
        assert sorted(path.name for path in recovery.path(3).rglob("*")) == MODELS


class TestDamage:
    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"step": "x"}', b'{"versions": {"\xff": 1}}'])
    def test_the_last_one_is_damaged_and_an_earlier_one_is_used(
        self, recovery: Recovery, data: bytes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(recovery, 1, 2)
        damage(recovery, 2, data)
        assert recovery.latest() == RecoverInfo(1)
        told = capsys.readouterr().err
        assert f"{recovery.path(2) / FILE} cannot be read" in told
        assert "an earlier one is used" in told

    def test_all_are_damaged(self, recovery: Recovery) -> None:
        write(recovery, 1, 2)
        damage(recovery, 1)
        damage(recovery, 2)
        assert recovery.latest() is None

    def test_one_that_is_not_there_is_told(self, recovery: Recovery) -> None:
        with pytest.raises(CheckpointDamaged, match="000009"):
            recovery.read(9)

    @given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def test_whatever_is_in_the_file_it_is_read_or_told(self, tmp_path: Path, data: bytes) -> None:
        recovery = Recovery(tmp_path)
        recovery.prepare(1, MODELS)
        damage(recovery, 1, data)
        try:
            found = recovery.read(1)
        except CheckpointDamaged:
            assert recovery.latest() is None
        else:
            assert isinstance(found, RecoverInfo)


class TestSettings:
    def test_they_name_the_models_that_have_files_in_a_checkpoint(self) -> None:
        config = ppo(separate=True)
        config.lazy_init()
        found = Settings.of(config)
        assert found.n_seqs == 8
        # The replica that generates gets its parameters from the other one.
        assert sorted(found.models) == ["actor@0", "critic@0", "ref@0", "reward@0"]
        assert found.models["critic@0"] == ModelSettings(topology(pipe=2), "tests-backend")

    def test_the_same_are_right_and_an_old_file_has_none(self, recovery: Recovery) -> None:
        recovery.check(INFO, Settings(8, {"critic@0": TWO, "actor@0": TWO}))
        recovery.check(RecoverInfo(12), SETTINGS)

    def test_all_that_is_different_is_told_at_once(self, recovery: Recovery) -> None:
        now = Settings(4, {"actor@0": ModelSettings(topology(tensor=2), "fsdp2"), "ref@0": TWO})
        with pytest.raises(UsageError) as caught:
            recovery.check(INFO, now)
        assert caught.value.problem == (
            f"{recovery.path(12)} was written with other settings: n_seqs was 8 and is 4; "
            "actor@0 was ddp with pipe 1 × data 2 × tensor 1 and is fsdp2 with pipe 1 × data 1 × tensor 2; "
            "critic@0 was ddp with pipe 1 × data 2 × tensor 1 and is not there; "
            "ref@0 was not there and is ddp with pipe 1 × data 2 × tensor 1"
        )
        assert "--recover-mode disabled" in caught.value.remedy


class TestKeeping:
    def test_two_are_kept(self, recovery: Recovery) -> None:
        write(recovery, 5, 10, 15, 20)
        assert recovery.steps() == [15, 20]
        assert not recovery.path(10).exists()

    def test_one_that_was_begun_and_never_finished_goes_with_the_next(self, recovery: Recovery) -> None:
        recovery.prepare(7, ["actor@0"])
        write(recovery, 9)
        assert not recovery.path(7).exists()

    def test_models_of_those_that_are_kept_stay(self, recovery: Recovery) -> None:
        write(recovery, 1, 2, 3)
        for step in (2, 3):
            assert (recovery.folder(step, "critic@0") / "00000.pt").read_bytes() == b"weights"

    def test_one_that_goes_on_from_an_earlier_one_leaves_a_later_one(self, recovery: Recovery) -> None:
        # The later checkpoint may be damaged; it will be overwritten when the trial reaches its step.
        write(recovery, 10, 20)
        damage(recovery, 20)
        write(recovery, 15)
        assert recovery.latest() == RecoverInfo(15)
        write(recovery, 20)
        assert recovery.latest() == RecoverInfo(20)

    @given(st.lists(st.integers(0, 10**7), min_size=1, max_size=6, unique=True))
    def test_of_ascending_steps_the_last_two_are_kept(self, tmp_path: Path, steps: list[int]) -> None:
        recovery = Recovery(tmp_path)
        recovery.clear()
        for step in sorted(steps):
            recovery.prepare(step, MODELS)
            recovery.commit(RecoverInfo(step))
        assert recovery.steps() == sorted(steps)[-2:]

    def test_other_files_are_no_checkpoints(self, recovery: Recovery) -> None:
        write(recovery, 1)
        for name in ("latest", "12", "0000x1"):
            (recovery.path(1).parent / name).mkdir()
            (recovery.path(1).parent / name / FILE).write_bytes(b"{}")
        assert recovery.steps() == [1]

    def test_a_trial_that_begins_anew_has_none(self, recovery: Recovery) -> None:
        write(recovery, 1, 2)
        recovery.clear()
        recovery.clear()
        assert recovery.latest() is None
