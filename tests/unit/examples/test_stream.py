"""The stream of the online learning example, and what its learner makes of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import incremental
import numpy as np
import pytest
import torch
from curves import plot, table
from incremental import Incremental

if TYPE_CHECKING:
    from stream import FEATURES, PHASES, Digits, features

BATCH, PHASE = 32, 10


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Imported when a test needs it: scikit-learn takes seconds, which every process that collects tests would spend."""
    global FEATURES, PHASES, Digits, features
    from stream import FEATURES, PHASES, Digits, features


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits(seed=0, batch=BATCH, phase=PHASE)


def learnt(model: Incremental, digits: Digits, batches: range) -> list[tuple[float, float]]:
    """The scores of `batches`, as the job would give them."""
    scores = []
    for t in batches:
        images, labels = digits.draw(t)
        scores.append(model.step(t, torch.from_numpy(features(images)), torch.from_numpy(labels)))
    return scores


def learner(freeze: int = PHASE) -> Incremental:
    torch.manual_seed(0)
    return Incremental(FEATURES, 10, freeze=freeze)


def test_a_batch_is_the_same_whoever_draws_it_and_in_whatever_order(digits: Digits) -> None:
    digits.draw(7)
    other = Digits(seed=0, batch=BATCH, phase=PHASE)
    (images, labels), (same_images, same_labels) = digits.draw(3), other.draw(3)
    assert np.array_equal(images, same_images)
    assert np.array_equal(labels, same_labels)
    assert not np.array_equal(digits.draw(3)[0], digits.draw(4)[0])
    assert not np.array_equal(digits.draw(3)[0], Digits(1, BATCH, PHASE).draw(3)[0])


def test_a_drift_changes_the_images_and_not_the_digits(digits: Digits) -> None:
    for t, (name, drift) in zip((3, 13, 23, 33), PHASES.items(), strict=True):
        undrifted, labels = Digits(seed=0, batch=BATCH, phase=1000).draw(t)
        images, same_labels = digits.draw(t)
        assert np.array_equal(images, drift(undrifted)), name
        assert np.array_equal(labels, same_labels)


def test_features_do_not_depend_on_brightness_and_contrast(digits: Digits) -> None:
    images, _ = digits.draw(0)
    found = features(images)
    assert found.shape == (BATCH, FEATURES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(features(3 * images + 1), found, atol=1e-3)


def test_the_learner_finds_its_way_back_and_its_frozen_copy_does_not(digits: Digits) -> None:
    length = 25
    stream = Digits(seed=0, batch=64, phase=length)
    scores = learnt(learner(freeze=length), stream, range(2 * length))
    before, after = scores[:length], scores[length:]
    assert all(one == other for one, other in before)
    ends = torch.tensor([before[-5:], after[-5:]]).mean(1)
    assert ends[0, 0] > 0.8
    assert ends[1, 0] > 0.8
    assert ends[1, 1] < 0.4


def test_a_learner_goes_on_from_a_state_once_its_window_is_full_again(digits: Digits) -> None:
    first = learner()
    learnt(first, digits, range(12))
    second = learner()
    second.restore(first.state())
    inputs, labels = torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.long)
    assert second.step(12, inputs, labels) == first.step(12, inputs, labels)


@pytest.mark.parametrize("saved", [3, PHASE, PHASE + 3])
def test_a_learner_that_was_restored_learns_on_as_if_it_had_never_died(
    digits: Digits, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    # The window is not saved: here it has the present batch alone.
    monkeypatch.setattr(incremental, "WINDOW", 1)
    first, second = learner(), learner()
    learnt(first, digits, range(saved))
    second.restore(copy.deepcopy(first.state()))
    rest = range(saved, 2 * PHASE)
    assert learnt(second, digits, rest) == learnt(first, digits, rest)
    assert all(map(torch.equal, second.state()["model"].values(), first.state()["model"].values()))


# matplotlib keeps the files of its fonts open.
@pytest.mark.leaves
def test_the_table_has_a_line_for_each_phase_and_the_picture_is_drawn(tmp_path: Path) -> None:
    scores = [(0.0, 0.0)] * 5 + [(1.0, 0.5)] * 5 + [(0.5, 0.0)] * 5 + [(0.75, 0.25)] * 5
    lines = table(scores, ["calm", "storm"], 10).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["calm", "0.0%", "100.0%", "50.0%"],
        ["storm", "50.0%", "75.0%", "25.0%"],
    ]
    plot(scores, ["calm", "storm"], 10, tmp_path / "new" / "drift.png")
    assert (tmp_path / "new" / "drift.png").stat().st_size > 1000
