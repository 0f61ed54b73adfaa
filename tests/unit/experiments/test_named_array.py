"""Tensors by name: they are sliced together, and come as they were sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirun.errors import UsageError
from unirun.experiments.sample import NamedArray
from unirun.roles.calls.codec import dump, load

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
names = st.from_regex("[a-z]{1,6}", fullmatch=True).filter(lambda name: not hasattr(NamedArray, name))


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits, for bool random truths."""
    chance = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=chance)
    return (bits < 128).view(shape) if dtype is torch.bool else bits.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def same(one: NamedArray, other: NamedArray) -> bool:
    """Bit for bit, nan included."""
    a, b = one.flat(), other.flat()
    return [*a] == [*b] and all(
        (x is None and y is None)
        or (x is not None and y is not None and (x.dtype, x.shape, bits(x)) == (y.dtype, y.shape, bits(y)))
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def sent(array: NamedArray) -> NamedArray:
    """As it comes to another process."""
    head, buffers = dump(array, "an array")
    found: NamedArray = load(head, tuple(memoryview(bytearray(each)) for each in buffers))
    return found


tensors = st.builds(noise, shapes, st.sampled_from(DTYPES), st.integers(0, 99))
nested: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.dictionaries(names, tensors | st.none(), min_size=1, max_size=3),
    lambda inner: st.dictionaries(names, tensors | inner, min_size=1, max_size=3),
    max_leaves=6,
)
OBS = NamedArray.from_dict(
    {"obs": {"image": torch.arange(12).reshape(3, 4), "text": None}, "reward": torch.tensor([0.5, 1.5, 2.5])},
    step=3,
)


class TestNames:
    def test_a_tensor_is_found_by_its_name(self) -> None:
        assert OBS["reward"] is OBS.reward
        assert OBS["obs"]["image"] is OBS.obs.image
        assert OBS.obs.text is None
        assert [*OBS] == ["obs", "reward"]
        assert len(OBS) == 2
        assert "reward" in OBS

    def test_one_that_is_not_there_is_told_with_those_that_are(self) -> None:
        with pytest.raises(KeyError, match="rewards"):
            OBS["rewards"]
        with pytest.raises(AttributeError, match="NamedArray has no 'rewards'; it has: obs, reward"):
            OBS.rewards  # noqa: B018

    @pytest.mark.parametrize("name", ["", "a.b", "keys", "flat", "metadata", "_values", "__len__"])
    def test_a_name_that_it_has_itself_is_refused(self, name: str) -> None:
        with pytest.raises(UsageError, match="is no name for an array"):
            NamedArray({name: torch.zeros(1)})

    @pytest.mark.parametrize("value", [1.0, [1.0], "x", {"a": torch.zeros(1)}])
    def test_what_is_no_tensor_is_refused(self, value: object) -> None:
        with pytest.raises(UsageError, match="give tensors, arrays or None"):
            NamedArray({"x": value})

    def test_arrays_of_numpy_are_tensors(self) -> None:
        array = NamedArray({"x": np.arange(3, dtype=np.int16)})
        assert array.x.dtype is torch.int16
        assert array.x.tolist() == [0, 1, 2]

    @given(nested)
    def test_nested_dicts_come_back(self, values: dict[str, Any]) -> None:
        def plain(value: Any) -> Any:
            return {n: plain(v) for n, v in value.items()} if isinstance(value, dict) else id(value)

        assert plain(NamedArray.from_dict(values).to_dict()) == plain(values)

    def test_it_shows_dtypes_and_shapes(self) -> None:
        assert repr(OBS) == (
            "NamedArray({'obs.image': 'torch.int64[3, 4]', 'obs.text': 'None', 'reward': 'torch.float32[3]'})"
        )


class TestSlicing:
    @pytest.mark.parametrize(
        "part", [slice(1, 3), slice(None, None, 2), 1, [2, 0], torch.tensor([True, False, True])]
    )
    def test_every_tensor_is_sliced(self, part: Any) -> None:
        found = OBS[part]
        assert torch.equal(found.obs.image, OBS.obs.image[part])
        assert torch.equal(found.reward, OBS.reward[part])
        assert found.obs.text is None
        assert found.metadata == {"step": 3}

    def test_a_function_is_applied_to_every_tensor(self) -> None:
        doubled = OBS.apply(lambda tensor: 2 * tensor)
        assert doubled.reward.tolist() == [1.0, 3.0, 5.0]
        assert doubled.obs.image[0].tolist() == [0, 2, 4, 6]
        assert OBS.reward.tolist() == [0.5, 1.5, 2.5]


class TestSending:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
    def test_every_dtype_and_shape_comes_as_it_was(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        array = NamedArray({"x": noise(shape, dtype)})
        assert same(sent(array), array)

    @given(nested)
    def test_what_is_nested_comes_as_it_was(self, values: dict[str, Any]) -> None:
        array = NamedArray.from_dict(values)
        assert same(sent(array), array)

    @pytest.mark.parametrize(
        "metadata", [{}, {"step": 3, "who": {"rank": [1, None, "ü"]}}, {"values": 1, "cls": 2, "self": 3}]
    )
    def test_metadata_comes_too(self, metadata: dict[str, Any]) -> None:
        assert sent(NamedArray({"x": None}, **metadata)).metadata == metadata

    def test_integers_that_no_float_has_are_kept(self) -> None:
        numbers = [2**24 + 1, 2**53 + 1, -(2**63)]
        assert sent(NamedArray({"x": torch.tensor(numbers)})).x.tolist() == numbers

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.t(),
            lambda t: t[:, ::2],
            lambda t: t[1:],
            lambda t: t.expand(3, 3, 4),
            lambda t: t[1, 2],
        ],
        ids=["transposed", "strided", "offset", "expanded", "element"],
    )
    def test_views_come_as_they_look(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        array = NamedArray({"x": change(torch.arange(12).reshape(3, 4))})
        assert torch.equal(sent(array).x, array.x)

    def test_a_parameter_comes_as_its_values(self) -> None:
        array = NamedArray({"x": torch.nn.Parameter(torch.ones(2))})
        assert sent(array).x.tolist() == [1.0, 1.0]

    def test_what_comes_is_a_copy(self) -> None:
        before = torch.zeros(3)
        found = sent(NamedArray({"x": before}))
        found.x.fill_(7.0)
        assert before.tolist() == [0.0, 0.0, 0.0]
