"""The data of the fine-tuning example."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from digits import held_out, load, of_classes


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Imported when a test needs it: scikit-learn takes seconds, which every process that collects tests would spend."""
    global held_out, load, of_classes
    from digits import held_out, load, of_classes


def test_every_fifth_image_is_held_out() -> None:
    assert held_out(11).nonzero().flatten().tolist() == [0, 5, 10]


@pytest.mark.parametrize("classes", [range(5), range(5, 10), range(3, 4)])
def test_the_images_of_some_classes_are_all_that_show_one_of_them(classes: range) -> None:
    images, labels = load()
    chosen, named = of_classes((images, labels), classes)
    assert sorted(set(named.tolist())) == list(classes)
    assert len(chosen) == len(named) == sum(int((labels == digit).sum()) for digit in classes)


def test_images_are_grey_values_from_0_to_1() -> None:
    images, labels = load()
    assert images.shape == (1797, 64)
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert torch.equal(labels.unique(), torch.arange(10))
