"""From where a trial goes on: which checkpoints count, and which are kept."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.effort import examples
from unirun.errors import CheckpointDamaged, UsageError
from unirun.experiments.config import (
    AgentAbstraction,
    Allocation,
    DatasetAbstraction,
    EnvServiceAbstraction,
    ExperimentSaveEvalControl,
    GserverManager,
    ModelBackendAbstraction,
    RolloutWorker,
    model_workers,
)
from unirun.experiments.graph import MicroBatchSpec, topology
from unirun.experiments.recovery import (
    DATA,
    FILE,
    KEPT,
    RecoverInfo,
    Recovery,
    Settings,
    _flat,
    changes,
    settings_of,
)

from .sample_configs import ACTOR, NETWORK, PROMPTS, TRAIN, call, config_with, ppo

MODELS = ["actor@0", "critic@0"]
SETTINGS = {"n_seqs": "8", "models.actor@0.backend.lr": "0.1", "code.ppo": "ab"}
INFO = RecoverInfo(
    12,
    2,
    3,
    ("7", "id of a row", "ü"),
    {"save": {"epochs": 1, "steps": 2, "secs": 3.5}, "eval": {"steps": 4}},
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


class Checkpoints(RuleBasedStateMachine):
    """A trial that is killed, whose checkpoints are damaged, and which goes on from what is left, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.recovery = Recovery(Path(self.folder.name))
        self.step = 0
        self.kept: dict[int, bool] = {}
        """The last checkpoints of the steps until now, and whether each is whole."""

    @rule(count=st.integers(1, 3))
    def goes_on(self, count: int) -> None:
        self.step += count
        write(self.recovery, self.step)
        self.kept = dict([*self.kept.items(), (self.step, True)][-KEPT:])
        here = {int(path.name) for path in self.recovery.path(0).parent.iterdir()}
        assert {step for step in here if step <= self.step} == {*self.kept}

    @rule()
    def is_killed_in_a_save(self) -> None:
        self.recovery.prepare(self.step + 1, MODELS)

    @rule(back=st.integers(0, KEPT - 1))
    def is_damaged(self, back: int) -> None:
        if back < len(self.kept):
            step = [*self.kept][-1 - back]
            damage(self.recovery, step)
            self.kept[step] = False

    @rule()
    def starts_again(self) -> None:
        whole = [step for step, good in self.kept.items() if good]
        if self.kept and not whole:
            with pytest.raises(CheckpointDamaged):
                self.recovery.latest()
            self.recovery.clear()
            self.kept, self.step = {}, 0
            return
        found = self.recovery.latest()
        assert (found and found.step) == (max(whole) if whole else None)
        self.step = found.step if found is not None else 0
        self.recovery.drop_after(self.step)
        self.kept = {step: good for step, good in self.kept.items() if step <= self.step}

    def teardown(self) -> None:
        self.folder.cleanup()


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = examples(30, shrunk=False)


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
        with pytest.raises(CheckpointDamaged, match="none of them can be read; .*--recover-mode disabled"):
            recovery.latest()

    def test_of_those_before_a_step_none_can_be_read(self, recovery: Recovery) -> None:
        write(recovery, 1, 2)
        assert recovery.latest(before=2) == RecoverInfo(1)
        with pytest.raises(CheckpointDamaged, match="none of them can be read"):
            recovery.latest(before=1)

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
            with pytest.raises(CheckpointDamaged):
                recovery.latest()
        else:
            assert isinstance(found, RecoverInfo)


def settings(lr: float = 0.1, seed: int = 1, tensor: int = 1, **more: Any) -> Settings:
    """The settings of an experiment with one call and one model."""
    shape: dict[str, Any] = {name: more.pop(name) for name in ("schedule", "warmup") if name in more}
    backend = ModelBackendAbstraction("tests-backend", {"lr": lr, **shape})
    model = Allocation(NETWORK, backend, topology(tensor=tensor))
    rows = [{"prompt": str(number)} for number in range(more.pop("rows", 100))]
    workers = model_workers(
        {ACTOR: model}, seed=seed, datasets=[DatasetAbstraction("tests-prompts", {"rows": rows})]
    )
    control = ExperimentSaveEvalControl(more.pop("epochs", 1), save_freq_steps=more.pop("saves", None))
    config = config_with([call("train", ["prompt"], kind=TRAIN, **more)], workers, control)
    config.lazy_init()
    return settings_of(config)


def told(before: Settings, now: Settings) -> list[str]:
    return [*changes(before, now).values()]


class TestSettings:
    def test_they_are_of_the_models_that_have_files_in_a_checkpoint(self) -> None:
        config = ppo(separate=True)
        config.lazy_init()
        found = settings_of(config)
        assert found["n_seqs"] == "8"
        # The replica that generates gets its parameters from the other one.
        models = {name.split(".")[1] for name in found if name.startswith("models.")}
        assert models == {"actor@0", "critic@0", "ref@0", "reward@0"}
        assert found["models.critic@0.layout.pipe"] == "2"
        assert found["models.critic@0.layout.order"] == '["pipe", "data", "tensor"]'
        assert found["models.critic@0.backend"] == '"tests-backend"'
        assert found["model_rpcs.refInf.output_key_remap.logprobs"] == '"ref_logprobs"'

    def test_what_decides_the_numbers_is_told_by_name_with_both_values(self) -> None:
        assert told(settings(), settings()) == []
        assert told(settings(), settings(lr=0.2)) == ["models.actor@0.backend.lr: 0.1 → 0.2"]
        assert told(settings(), settings(seed=2)) == ["seed: 1 → 2"]
        assert told(settings(), settings(balanced_dp=True)) == ["model_rpcs.train.balanced_dp: false → true"]
        more = told(settings(), settings(mb_spec=MicroBatchSpec(2)))
        assert more == ["model_rpcs.train.mb_spec.n_mbs: 1 → 2"]

    def test_long_values_are_known_by_their_digests(self) -> None:
        (found,) = told(settings(rows=100), settings(rows=101))
        assert re.fullmatch(
            r"datasets.0.rows: sha256 \w{16}, \d+ characters → sha256 \w{16}, \d+ characters", found
        )

    def test_how_often_something_is_saved_decides_nothing_nor_how_long_a_trial_is_without_a_schedule(
        self,
    ) -> None:
        assert told(settings(), settings(epochs=2, saves=3)) == []
        assert told(settings(warmup=0.0), settings(warmup=0.0, epochs=2)) == []
        shapes: list[dict[str, Any]] = [
            {"schedule": "cosine"},
            {"warmup": 0.1},
            {"schedule": "constant", "warmup": 0.1},
        ]
        for shape in shapes:
            assert told(settings(**shape), settings(**shape, epochs=2)) == ["total_train_epochs: 1 → 2"]

    def test_a_checkpoint_that_does_not_say_how_long_its_trial_is_goes_on(self) -> None:
        now = settings(warmup=0.1)
        before = {name: value for name, value in now.items() if name != "total_train_epochs"}
        assert told(before, now) == []

    def test_the_content_of_datasets_counts_once_it_is_known(self) -> None:
        one, other = ({**settings(), DATA: f'"8 samples, {each}"'} for each in "ab")
        assert told(one, other) == ['datasets.content: "8 samples, a" → "8 samples, b"']
        assert told(one, settings()) == []

    def test_an_address_in_memory_is_no_setting(self) -> None:
        assert dict(_flat("args", "<Thing at 0x7f00>")) == {"args": '"<Thing>"'}


class TestChecks:
    @pytest.fixture
    def info(self) -> RecoverInfo:
        return RecoverInfo(12, settings=settings())

    def test_the_same_are_right_and_an_old_file_has_none(self, recovery: Recovery, info: RecoverInfo) -> None:
        assert recovery.check(info, settings()) == []
        assert recovery.check(RecoverInfo(12), settings()) == []

    def test_all_that_is_different_is_refused_at_once(self, recovery: Recovery, info: RecoverInfo) -> None:
        with pytest.raises(UsageError) as caught:
            recovery.check(info, settings(lr=0.2, seed=2))
        assert caught.value.problem == (
            f"{recovery.path(12)} was written with other settings: models.actor@0.backend.lr: 0.1 → 0.2; seed: 1 → 2"
        )
        assert caught.value.remedy == (
            "start with the settings of before, with another trial name, or with --recover-mode disabled; "
            "to go on all the same: --accept-change models.actor@0.backend.lr --accept-change seed"
        )

    def test_a_change_is_accepted_by_its_name_or_the_beginning_of_it(
        self, recovery: Recovery, info: RecoverInfo
    ) -> None:
        now = settings(lr=0.2, seed=2)
        for accepted in (["models.actor@0.backend.lr", "seed"], ["models", "seed"]):
            told = recovery.check(info, now, accepted)
            assert told == ["models.actor@0.backend.lr: 0.1 → 0.2", "seed: 1 → 2"]
        for accepted in (["seed"], ["models.actor@0.back", "seed"]):
            with pytest.raises(UsageError, match="other settings: models.actor@0.backend.lr"):
                recovery.check(info, now, accepted)

    def test_another_layout_and_other_batches_are_never_accepted(
        self, recovery: Recovery, info: RecoverInfo
    ) -> None:
        for now, told in (
            (settings(tensor=2), "layout.tensor: 1 → 2"),
            (settings(n_seqs=4), "n_seqs: 8 → 4"),
        ):
            with pytest.raises(UsageError, match=told) as caught:
                recovery.check(info, now, ["models", "n_seqs"])
            assert "--accept-change" not in caught.value.remedy

    def test_other_code_of_an_interface_is_told_and_not_refused(self, recovery: Recovery) -> None:
        before, now = (
            {**settings(), "code.ppo": "1", "code.old": "1"},
            {**settings(), "code.ppo": "2"},
        )
        assert recovery.check(RecoverInfo(12, settings=before), now) == [
            "the code of interface 'ppo' has changed"
        ]
        assert [name for name in settings() if name.startswith("code.")] == ["code.tests-interface"]


class TestKeeping:
    def test_the_two_latest_checkpoints_are_kept(self, recovery: Recovery) -> None:
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


def test_an_asynchronous_trial_goes_on_with_its_agent_and_its_bound_only() -> None:
    config = ppo(separate=False)
    config.gserver_manager = [GserverManager(ACTOR, 0, "round_robin", 1, 8, 10, 4)]
    agent, env = AgentAbstraction("a", {"turns": 2}), EnvServiceAbstraction("e")
    config.rollout_worker = [RolloutWorker(1, ACTOR, "letters", 8, 10, env, agent, [PROMPTS])]
    before = settings_of(config)
    config.gserver_manager[0].max_head_offpolicyness = 4
    config.rollout_worker[0].agent = AgentAbstraction("a", {"turns": 3})
    assert [*changes(before, settings_of(config)).values()] == [
        "gserver_manager.max_head_offpolicyness: 1 → 4",
        "rollout_worker.agent.turns: 2 → 3",
    ]
