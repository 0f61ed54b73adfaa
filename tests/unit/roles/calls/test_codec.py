"""Values go through bytes and buffers and come out the same."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import WAIT_TIMEOUT
from unirun.errors import EncodingError
from unirun.roles.calls import codec
from unirun.roles.calls.codec import INLINE, dump, load
from unirun.roles.transport.protocol import Parcel, own


def through(value: Any) -> Any:
    """The value that arrives."""
    head, buffers = dump(value, "a value")
    parcel = own(Parcel(head, buffers))
    return load(parcel.head, parcel.buffers)


DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (30, 40)], ids=str)
def test_a_tensor_of_any_kind_and_shape_is_rebuilt(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    bits = tensor.view(torch.uint8) if tensor.ndim and tensor.numel() else None
    if bits is not None:
        bits.copy_(torch.randint(0, 2, bits.shape, dtype=torch.uint8))
    found = through(tensor)
    assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert tensor.numel() == 0 or bytes(found.reshape(-1).view(torch.uint8)) == bytes(
        tensor.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10_000).reshape(100, 100).t(),
        torch.arange(10_000)[::7],
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.ones(1).expand(3000),
        torch.randn(40, 40, dtype=torch.complex64).conj(),
        torch.randn(40, dtype=torch.complex64).conj().imag,
        torch.ones(4, 3, 20, 20).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "permuted", "expanded", "conj", "neg", "channels-last"],
)
def test_a_tensor_of_any_memory_layout_is_rebuilt(tensor: torch.Tensor) -> None:
    assert torch.equal(through(tensor), tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 10_000])
def test_a_tensor_on_a_gpu_arrives_on_a_gpu(count: int) -> None:
    tensor = torch.arange(count, device="cuda")
    found = through(tensor)
    assert found.device.type == "cuda"
    assert torch.equal(found, tensor)


def test_only_the_elements_of_a_view_are_sent() -> None:
    storage = torch.zeros(1 << 20)
    _, buffers = dump(storage[:1000], "a view")
    assert sum(buffer.nbytes for buffer in buffers) == 4000
    head, buffers = dump(storage[:10], "a small view")
    assert len(head) < 1000
    assert buffers == ()


@pytest.mark.starts_processes
def test_a_tensor_of_a_preloaded_module_is_one_though_torch_appears_as_not_imported() -> None:
    program = """
        import sys
        from unirun.launcher.preloaded import PreloadedModules
        modules = PreloadedModules()
        modules.load("torch")
        from torch import zeros
        from unirun.roles.calls.codec import dump
        modules.in_fork(lambda: None)
        assert "torch" not in sys.modules
        head, buffers = dump(zeros(1 << 20)[:1000], "a view")
        assert len(head) < 1000, len(head)
        assert [buffer.nbytes for buffer in buffers] == [4000]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=WAIT_TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("count", [INLINE // 4 - 1, INLINE // 4, INLINE // 4 + 1, 1 << 16])
def test_a_tensor_that_arrives_may_be_written(count: int) -> None:
    tensor = torch.zeros(count)
    through(tensor).add_(1)
    assert float(tensor.sum()) == 0.0


def test_what_needs_gradients_needs_them_there() -> None:
    leaf = torch.randn(500, requires_grad=True)
    found = through({"leaf": leaf, "result": leaf * 2})
    assert found["leaf"].requires_grad
    assert found["result"].requires_grad
    assert found["result"].is_leaf
    assert torch.equal(found["result"], leaf * 2)


def test_parameters_and_modules_stay_what_they_are() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    found = through(module)
    assert isinstance(found[0].weight, torch.nn.Parameter)
    assert all(
        torch.equal(a, b)
        for a, b in zip(found.state_dict().values(), module.state_dict().values(), strict=True)
    )
    frozen = torch.nn.Parameter(torch.ones(300), requires_grad=False)
    assert isinstance(through(frozen), torch.nn.Parameter)
    assert not through(frozen).requires_grad


def test_an_object_that_is_named_twice_is_one_object_there() -> None:
    tensor = torch.ones(1000)
    first, second = through([tensor, tensor])
    assert first is second


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 4).to_sparse(),
        lambda: torch.eye(50).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
    ],
    ids=["sparse", "csr", "meta"],
)
def test_other_kinds_of_tensors_travel_as_torch_pickles_them(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    found = through(tensor)
    assert (found.layout, found.dtype, found.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    assert found.device == tensor.device
    if tensor.device.type != "meta":
        assert torch.equal(found.to_dense(), tensor.to_dense())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1000.0),
        np.zeros((0, 3)),
        np.array(5),
        np.asfortranarray(np.arange(600).reshape(20, 30)),
        np.arange(1000)[::3],
        np.array(["a", None, {1: 2}], dtype=object),
        np.zeros(3, dtype=[("x", "i4"), ("y", "f8")]),
    ],
    ids=["plain", "empty", "0-dim", "fortran", "strided", "objects", "records"],
)
def test_arrays_are_rebuilt(array: Any) -> None:
    found = through(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert (found == array).all()
    if array.dtype != object:
        found[...] = 0


def test_an_array_that_must_not_be_written_stays_so() -> None:
    array = np.ones(1000)
    array.flags.writeable = False
    assert not through(array).flags.writeable


@dataclasses.dataclass
class Batch:
    """A class that is known by its name."""

    ids: torch.Tensor
    texts: list[str]


def test_functions_and_classes_by_name_and_by_value() -> None:
    factor = 3
    assert through(lambda x: x * factor)(2) == 6

    class Local:
        """Known here only."""

        def __init__(self) -> None:
            self.value = torch.ones(1000)

    assert torch.equal(through(Local()).value, torch.ones(1000))
    assert through(Batch) is Batch
    assert through(Batch(torch.ones(3), ["a"])).texts == ["a"]
    assert through(len) is len


def test_tracebacks_of_a_function_that_was_sent_show_its_lines() -> None:
    def fails() -> None:
        raise LookupError("nothing here")

    with pytest.raises(LookupError) as raised:
        through(fails)()
    assert raised.traceback[-1].path == Path(__file__)
    assert 'raise LookupError("nothing here")' in "".join(traceback.format_exception(raised.value))


def test_objects_with_importable_names_are_pickled_without_cloudpickle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes twice as long."""
    monkeypatch.setattr(codec, "_CloudPickler", None)
    value = through({"batch": Batch(torch.ones(1000), ["a"]), "kind": Batch, "function": through})
    assert torch.equal(value["batch"].ids, torch.ones(1000))
    assert (value["kind"], value["function"]) == (Batch, through)
    with pytest.raises(EncodingError):
        through(lambda: None)


def test_plain_arguments_are_only_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for tensors in them takes five times as long."""
    monkeypatch.setattr(codec, "_Pickler", None)
    monkeypatch.setattr(codec, "_CloudPickler", None)
    arguments: Any = ((1, 2.5, "text", True, None), {})
    assert through(arguments) == arguments
    with pytest.raises(EncodingError):
        through((([],), {}))


@pytest.mark.starts_processes
def test_what_is_defined_in_the_main_program_goes_by_value() -> None:
    """As a trainer's own classes do, when its file is the program."""
    program = """
        import pickle, sys
        from unirun.roles.calls.codec import dump

        class Mine:
            def answer(self):
                return 42

        def double(x):
            return 2 * x

        head, buffers = dump((Mine(), double), "mine")
        sys.stdout.buffer.write(head)
    """
    head = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True
    ).stdout
    mine, double = load(head, ())
    assert (mine.answer(), double(4)) == (42, 8)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    )
)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    assert through(value) == value
    assert through(((value,), {})) == ((value,), {})
    assert through(((value,),)) == ((value,),), "a tuple that looks like arguments at first"


class Refuses:
    """Raises what it likes when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        (n for n in range(3)),
        Refuses(ValueError("no")),
        Refuses(RuntimeError("no")),
        Refuses(KeyError("no")),
    ],
    ids=["lock", "generator", "value-error", "runtime-error", "key-error"],
)
def test_what_does_not_pickle_is_refused_by_name(value: Any) -> None:
    with pytest.raises(EncodingError, match="an argument of actor's update cannot be sent"):
        dump(((value,), {}), "an argument of actor's update")


def test_what_is_nested_too_deep_is_refused_by_name() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(EncodingError, match="a value cannot be sent: .*recursion"):
        dump(value, "a value")
    while value:
        value = value.pop()


def test_what_is_too_large_for_a_frame_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_HEAD", 1000)
    with pytest.raises(EncodingError, match="a value cannot be sent: it has .* bytes beside its tensors"):
        dump("x" * 2000, "a value")
    with pytest.raises(EncodingError, match="send large data as tensors or arrays"):
        dump((("x" * 2000,), {}), "a value")
    dump(torch.ones(2000), "a tensor")


def test_a_copy_is_independent_of_what_was_dumped() -> None:
    tensor, array = torch.ones(1000), np.ones(1000)
    parcel = own(Parcel(*dump((tensor, array, torch.empty(0)), "values")))
    tensor.zero_()
    array[:] = 0
    found = load(parcel.head, parcel.buffers)
    assert (float(found[0].sum()), float(found[1].sum())) == (1000.0, 1000.0)
