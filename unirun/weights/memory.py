"""The memory behind tensors: whether it can be read and written, which is looked at before the first byte is copied.

A version is received as a whole or not at all, so nothing may be found only when torch comes to the tensor in question.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unirun.errors import Fault

WORK = 10_000_000
"""Steps of numpy's exact search for a common element, after which two tensors count as overlapping."""

Span = tuple[int, int]
"""The address of the first byte, and that behind the last one."""


def unreadable(name: str, tensor: torch.Tensor) -> Fault | None:
    """A fault if `tensor` has no memory that holds its elements as they are, else None."""
    if is_lazy(tensor):
        return Fault(name, "it is uninitialized, as that of a lazy module", "run the module once")
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        return Fault(name, f"it is no dense tensor but {kind}", "give its parts, or a dense copy")
    if type(tensor) not in (torch.Tensor, nn.Parameter) and _is_made_of_others(tensor):
        kind = type(tensor).__name__
        return Fault(name, f"a {kind} has no elements of its own", "give its parts, or a dense copy")
    storage = tensor.untyped_storage()
    if tensor.is_meta:
        return Fault(
            name,
            "it has no memory, as it is on the meta device",
            'call to_empty(device="cpu"), or that of another device, on the module before',
        )
    size = tensor.nbytes if tensor.is_contiguous() else (_extent(tensor) + 1) * tensor.element_size()
    if tensor.numel() and storage.nbytes() < tensor.storage_offset() * tensor.element_size() + size:
        return Fault(name, "its memory was freed", "gather it, or give the part that this rank has")
    if not _copies(tensor.dtype):
        return Fault(name, f"torch does not copy {_name(tensor.dtype)}", "view it as uint8")
    return None


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return True if a tensor of a subclass keeps its elements in other tensors."""
    hollow = not tensor.is_meta and tensor.untyped_storage().device.type == "meta"
    if hollow or is_traceable_wrapper_subclass(tensor):
        return True
    try:
        return not tensor.is_meta and tensor.numel() > 0 and tensor.data_ptr() == 0
    except RuntimeError:  # no pointer to ask for
        return True


def unwritable(tensors: Mapping[str, torch.Tensor]) -> list[Fault]:
    """A fault for each of these readable `tensors` that cannot be written in place: torch would raise, the process
    would crash, or the write would change another tensor."""
    faults = []
    spans: dict[str, Span] = {}
    places = [*_joined(_mapped())]
    for name, tensor in tensors.items():
        low, high = spans[name] = span_of(tensor)
        if tensor.is_conj() or tensor.is_neg():
            kind = "conjugate" if tensor.is_conj() else "negative"
            faults.append(Fault(name, f"it is a {kind} view", "give the tensor that it is a view of"))
        elif not tensor.is_contiguous() and _overlaps_itself(tensor):
            problem = "several of its elements share memory, as of an expanded tensor"
            faults.append(Fault(name, problem, "give a clone"))
        elif low < high and tensor.is_cpu and not _within(low, high, places):
            faults.append(Fault(name, "its memory is mapped for reading only", "give a clone"))
    wrong = {fault.where for fault in faults}
    return faults + _shared(tensors, {n: span for n, span in spans.items() if n not in wrong})


def unblendable(tensors: Mapping[str, torch.Tensor]) -> list[Fault]:
    """Every tensor of a dtype that torch has no arithmetic for, so that it cannot become a moving average."""
    return [
        Fault(name, f"there is no moving average of {_name(tensor.dtype)}", "receive it without eta")
        for name, tensor in tensors.items()
        if not _blends(tensor.dtype)
    ]


def untied(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[Fault]:
    """Every name whose tensor is tied to that of another name, with another value for it. `pairs` are names, targets
    and values."""
    seen: dict[object, tuple[str, torch.Tensor]] = {}
    faults = []
    if len({target.data_ptr() for _, target, _ in pairs}) == len(pairs):
        return []
    for name, target, value in pairs:
        first, other = seen.setdefault(geometry(target), (name, value))
        if other is not value and target.numel() and not same_bits(value, other):
            problem = f"it is tied to {first}, and the publisher has other values for it"
            faults.append(Fault(name, problem, "tie both at the publisher, or none here"))
    return faults


def writing(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """A context in which these may be written in place: inference mode if any was made in it, as torch requires."""
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else nullcontext()


def geometry(tensor: torch.Tensor) -> object:
    """A key that is equal for one tensor under two names."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def span_of(tensor: torch.Tensor) -> Span:
    """The addresses between which the elements of `tensor` are; equal when it has none."""
    low = tensor.data_ptr()
    if tensor.is_contiguous():
        return low, low + tensor.nbytes
    return low, low + (_extent(tensor) + 1) * tensor.element_size() if tensor.numel() else low


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if they are equal bit for bit; 0.0 is not -0.0."""
    there = other.to(one.device)
    if one.dtype.itemsize == 16:
        one, there = torch.view_as_real(one), torch.view_as_real(there)
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.view(bits), there.view(bits))


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _copies(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:  # of which NotImplementedError is one
        return False
    return True


@cache
def _blends(dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point and not dtype.is_complex:
        return True
    try:
        one = torch.zeros(1, dtype=torch.uint8).expand(dtype.itemsize).contiguous().view(dtype)
        if dtype.itemsize > 1:
            torch.lerp(one, one, 0.5)
        else:
            one.copy_(torch.lerp(one.float(), one.float(), 0.5))
    except RuntimeError:
        return False
    return True


def _within(low: int, high: int, places: Sequence[Span]) -> bool:
    """Return True if one of `places`, in ascending order, has all addresses from `low` up to, but not
    including, `high`."""
    at = bisect_right(places, (low, sys.maxsize)) - 1
    return at >= 0 and high <= places[at][1]


def _mapped() -> Iterator[Span]:
    """The mappings that may be written, in ascending order; see proc_pid_maps(5)."""
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            addresses, mode, _ = line.split(b" ", 2)
            if mode[1:2] == b"w":
                low, _, high = addresses.partition(b"-")
                yield int(low, 16), int(high, 16)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """The same addresses, with neighbours as one span."""
    last: Span | None = None
    for low, high in spans:
        if last is not None and low == last[1]:
            last = last[0], high
            continue
        if last is not None:
            yield last
        last = low, high
    if last is not None:
        yield last


class _Array:
    """A tensor's place in memory, in the form that numpy takes. It is never read."""

    def __init__(self, address: int, size: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "typestr": f"|V{size}",
            "shape": tuple(shape),
            "strides": tuple(stride * size for stride in strides),
            "version": 3,
        }


def _array(tensor: torch.Tensor) -> Any:
    shape, strides = tuple(tensor.shape), tensor.stride()
    return numpy.asarray(_Array(tensor.data_ptr(), tensor.element_size(), shape, strides))


def _share(one: Any, other: Any) -> bool:
    """Return True if two arrays have a byte in common."""
    shares: Any = numpy.shares_memory  # its stub knows two limits only
    try:
        return bool(shares(one, other, WORK))
    except numpy.exceptions.TooHardError:
        return True


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements are at one address."""
    if not tensor.numel():
        return False
    axes = sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    reach = 0
    for stride, n in axes:
        if stride <= reach:
            break
        reach += stride * (n - 1)
    else:
        return False
    if axes[0][0] == 0:
        return True
    rest = _array(tensor)
    # Two elements with other numbers along the first axis, or with the same one.
    while rest.ndim:
        if len(rest) > 1 and _share(rest[:1], rest[1:]):
            return True
        rest = rest[0]
    return False


def _shared(tensors: Mapping[str, torch.Tensor], spans: Mapping[str, Span]) -> list[Fault]:
    """Tensors that have memory in common with another one, without being the same tensor by two names."""
    faults: list[Fault] = []
    near: list[str] = []
    for name in sorted(spans, key=spans.__getitem__):
        low, tensor = spans[name][0], tensors[name]
        near = [each for each in near if spans[each][1] > low]
        for other in near:
            if _meet(tensor, tensors[other]):
                problem = f"it has memory in common with {other}, and is not the same tensor"
                faults.append(Fault(name, problem, "give one of them"))
                break
        near.append(name)
    return faults


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Devices may use the same addresses.
    return (
        one.device == other.device and geometry(one) != geometry(other) and _share(_array(one), _array(other))
    )
