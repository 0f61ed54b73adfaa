"""The multimodal example: damaged inputs, and a model that is cut into parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from part import LEARNING_RATE, Blank, Part
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    import modalities
    from modalities import LETTERS, LOST, NAMES, READABLE
    from networks import EMBEDDING, Fusion, ImageEncoder, NameEncoder


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    """Imported when a test needs it: scikit-learn takes seconds, which every process that collects tests would spend."""
    global EMBEDDING, LETTERS, LOST, NAMES, READABLE, Fusion, ImageEncoder, NameEncoder, modalities
    import modalities
    from modalities import LETTERS, LOST, NAMES, READABLE
    from networks import EMBEDDING, Fusion, ImageEncoder, NameEncoder


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestTheInputs:
    def test_are_the_same_in_one_view_and_others_in_the_next(self) -> None:
        for inputs in (modalities.images, modalities.names):
            assert torch.equal(inputs(0, 1), inputs(0, 1))
            assert not torch.equal(inputs(0, 1), inputs(0, 2))
            assert not torch.equal(inputs(0, 1), inputs(1, 1))

    def test_readable_letters_are_right_and_as_rare_as_they_should_be(self) -> None:
        names, labels = modalities.names(0, 1), modalities.labels()
        assert names.shape == (1797, LETTERS)
        for name, label in zip(names.tolist(), labels.tolist(), strict=True):
            for place, code in enumerate(name):
                assert code == LOST or chr(code + ord("a") - 1) == NAMES[label][place]
        lengths = torch.tensor([len(NAMES[label]) for label in labels])
        share = (names != LOST).sum() / lengths.sum()
        assert share.item() == pytest.approx(READABLE, abs=0.02)

    def test_one_half_of_each_image_is_hidden(self) -> None:
        squares = modalities.images(0, 1).reshape(-1, 8, 8)
        halves = [squares[:, :4], squares[:, 4:], squares[:, :, :4], squares[:, :, 4:]]
        hidden = torch.stack([(half == 0.0).flatten(1).all(1) for half in halves])
        assert (hidden.sum(0) == 1).all()
        assert (hidden.float().mean(1) - 0.25).abs().max() < 0.05

    def test_training_and_test_share_no_digit(self) -> None:
        train, test = modalities.split(12)
        assert (train.tolist(), test.tolist()) == ([1, 2, 3, 4, 6, 7, 8, 9, 11], [0, 5, 10])


@pytest.mark.usefixtures("alone")
class TestAPart:
    def test_has_no_network_before_it_is_given_weights(self) -> None:
        part = Part(ImageEncoder)
        with pytest.raises(Blank, match="started again"):
            _ = part.network

    def test_that_is_restored_goes_on_as_the_one_whose_state_it_was(self) -> None:
        first, second = Part(ImageEncoder), Part(ImageEncoder)
        first.begin(1)
        inputs = torch.randn(4, 64)
        first.network(inputs).sum().backward()
        first.step()
        second.restore(copy.deepcopy(first.state()))
        for part in (first, second):
            part.network(inputs).square().sum().backward()
            part.step()
        assert torch.equal(first.network(inputs), second.network(inputs))

    def test_forgets_the_gradients_of_a_step_that_was_broken_off(self) -> None:
        part = Part(ImageEncoder)
        part.begin(1)
        part.network(torch.randn(4, 64)).sum().backward()
        part.restore(copy.deepcopy(part.state()))
        assert all(p.grad is None for p in part.network.parameters())

    def test_three_parts_learn_what_the_whole_would(self) -> None:
        images, letters = torch.randn(16, 64), torch.randint(1, LOST + 1, (16, LETTERS))
        labels = torch.randint(10, (16,))
        parts = [Part(network) for network in (ImageEncoder, NameEncoder, Fusion)]
        for part in parts:
            part.begin(3)
        whole = nn.ModuleList(copy.deepcopy(part.network) for part in parts)
        optimizer = torch.optim.Adam(whole.parameters(), lr=LEARNING_RATE)

        for _ in range(3):
            logits = whole[2](whole[0](images), whole[1](letters))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()

            embeddings = [parts[0].network(images), parts[1].network(letters)]
            cut = [embedding.detach().requires_grad_() for embedding in embeddings]
            nn.functional.cross_entropy(parts[2].network(*cut), labels).backward()
            parts[2].step()
            for part, embedding, leaf in zip(parts, embeddings, cut, strict=False):
                assert embedding.shape == (16, EMBEDDING)
                embedding.backward(leaf.grad)
                part.step()

        for part, network in zip(parts, whole, strict=True):
            for mine, theirs in zip(part.network.parameters(), network.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs)
