"""Tensors as ranks have them: the part of each global tensor, whether its memory can be read and written, and views."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unirun.errors import Fault, UsageError, WeightsError
from unirun.values import Value

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# The parts of each tensor that one rank has: boxes of the global tensor, and the arithmetic of boxes.
#
# Nothing of this needs torch, so that a plan for thousands of ranks is made and tested as plain values.

Extent = tuple[int, ...]
"""One number for each dimension."""


class Box(Value):
    """The part of a tensor from `start` (inclusive) that has `size` elements in each dimension."""

    start: Extent
    size: Extent

    @property
    def count(self) -> int:
        """The number of elements; 1 for a tensor without dimensions."""
        product = 1
        for size in self.size:
            product *= size
        return product

    def meet(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor; None if they have no element in common."""
        start, size = [], []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            low = max(a, b)
            high = min(a + n, b + m)
            if low >= high:
                return None
            start.append(low)
            size.append(high - low)
        return Box(tuple(start), tuple(size))

    def without(self, other: Box) -> Iterator[Box]:
        """The part of this box that is not in `other`, as boxes that do not overlap; two for each dimension at most."""
        common = self.meet(other)
        if common is None:
            yield self
            return
        start, size = list(self.start), list(self.size)
        for axis, (low, count) in enumerate(zip(common.start, common.size, strict=True)):
            before = low - start[axis]
            after = start[axis] + size[axis] - low - count
            if before:
                yield Box(tuple(start), (*size[:axis], before, *size[axis + 1 :]))
            if after:
                yield Box(
                    (*start[:axis], low + count, *start[axis + 1 :]), (*size[:axis], after, *size[axis + 1 :])
                )
            start[axis], size[axis] = low, count


class Tensor(Value):
    """A whole tensor, as all ranks see it: its global shape, and its dtype by torch's name (``bfloat16``)."""

    shape: Extent
    dtype: str

    @property
    def whole(self) -> Box:
        """All of it."""
        return Box((0,) * len(self.shape), self.shape)


class Piece(Value):
    """The part `box` of a tensor that a rank has, and where that begins in the rank's local tensor: at `at`."""

    box: Box
    at: Extent


class Part(Value):
    """A tensor of which a rank has `pieces`, which do not overlap and are not empty."""

    tensor: Tensor
    pieces: tuple[Piece, ...]


Layout = dict[str, Part]
"""The parts of the tensors that one rank has, by the name of the tensor."""


def shared(layout: Layout) -> Layout:
    """The same layout, in which equal parts are one object: a model of a hundred layers has a dozen."""
    seen: dict[Part, Part] = {}
    return {name: seen.setdefault(part, part) for name, part in layout.items()}


def runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive numbers in `indices`, which ascend: where a run is in `indices`, its first number and its length."""
    found: list[tuple[int, int, int]] = []
    for at, index in enumerate(indices):
        if found and index == found[-1][1] + found[-1][2]:
            begin, first, count = found[-1]
            found[-1] = begin, first, count + 1
        else:
            found.append((at, index, 1))
    return found


def pieces_of(axes: Sequence[Sequence[int]]) -> tuple[Piece, ...]:
    """The pieces of a rank whose local tensor has, along each dimension, the global indices `axes`, which ascend."""
    found = [Piece(Box((), ()), ())]
    for indices in axes:
        found = [
            Piece(Box((*p.box.start, first), (*p.box.size, count)), (*p.at, at))
            for p in found
            for at, first, count in runs(indices)
        ]
    return tuple(found)


# The parts of the tensors that each rank takes, and their sources: a pure function of layouts.


class NamedBox(Value):
    """A part of the tensor `name`."""

    name: str
    box: Box


def plan(
    sources: Sequence[Layout], wanted: Layout, near: Sequence[int] = (), turn: int = 0
) -> dict[int, tuple[NamedBox, ...]]:
    """The parts to take from each source, by its index, which give all of `wanted`, no element twice. The same
    arguments give the same plan.

    Where several sources have an element, those in `near` (on this host) come first. Those that have the same part of
    a tensor share the work: the next tensor comes from the one that has sent least. The order begins with the source
    number `turn`, so that receivers with different numbers ask different sources first.

    Raises `WeightsError` with every tensor that no source has, that has another shape or dtype, or of which a part is
    nowhere.
    """
    faults = [
        fault for name, part in wanted.items() if (fault := _difference(name, part, sources)) is not None
    ]
    if faults:
        raise WeightsError("the weights do not fit the receiver", faults=faults)
    order = _order(len(sources), near, turn)
    takes: dict[int, list[NamedBox]] = {}
    sent = [0] * len(sources)
    # Layers of a model are cut in the same way, and equal parts are one object (`shared`): one search serves all.
    known: dict[tuple[int, ...], tuple[list[tuple[list[int], Box]], list[Box]]] = {}
    for name, part in wanted.items():
        there = [sources[source].get(name) for source in order]
        key = (id(part), *map(id, there))
        if key not in known:
            twins = _twins(order, there, set(near))
            known[key] = _search(part, [(some, sources[some[0]][name]) for some in twins])
        found, missing = known[key]
        for twin, box in found:
            source = min(twin, key=sent.__getitem__) if len(twin) > 1 else twin[0]
            sent[source] += box.count
            takes.setdefault(source, []).append(NamedBox(name, box))
        faults += [_nowhere(name, part.tensor, box) for box in missing[:1]]
    if faults:
        raise WeightsError("the publishers do not have all of what the receiver needs", faults=faults)
    return {source: tuple(some) for source, some in takes.items()}


def _twins(order: Sequence[int], there: Sequence[Part | None], near: set[int]) -> list[list[int]]:
    """The sources of a tensor: those that have the same part, and are as near as each other, in one list."""
    found: dict[tuple[bool, Part], list[int]] = {}
    for source, held in zip(order, there, strict=True):
        if held is not None:
            found.setdefault((source not in near, held), []).append(source)
    return [*found.values()]


def _search(
    part: Part, there: Sequence[tuple[list[int], Part]]
) -> tuple[list[tuple[list[int], Box]], list[Box]]:
    """The boxes of `part` that come from each source, and those that no source has."""
    found: list[tuple[list[int], Box]] = []
    missing = [piece.box for piece in part.pieces]
    for sources, held in there:
        for piece in held.pieces if missing else ():
            left: list[Box] = []
            for box in missing:
                common = box.meet(piece.box)
                if common is None:
                    left.append(box)
                else:
                    found.append((sources, common))
                    left.extend(box.without(common))
            missing = left
    return found, missing


def _order(count: int, near: Sequence[int], turn: int) -> list[int]:
    close = set(near)
    rotated = [(turn + number) % count for number in range(count)] if count else []
    return sorted(rotated, key=lambda source: source not in close)


def _difference(name: str, wanted: Part, sources: Sequence[Layout]) -> Fault | None:
    found = next((layout[name].tensor for layout in sources if name in layout), None)
    if found is None:
        return Fault(name, "no publisher has it", "rename it, or leave it out of what is received")
    if found != wanted.tensor:
        return Fault(name, f"it is published as {_words(found)} and received as {_words(wanted.tensor)}")
    return None


def _nowhere(name: str, tensor: Tensor, box: Box) -> Fault:
    where = ", ".join(f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True))
    return Fault(name, f"no publisher has [{where}] of {_words(tensor)}")


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


# The memory behind tensors: whether it can be read and written, which is looked at before the first byte is copied.
#
# A version is received as a whole or not at all, so nothing may be found only when torch comes to the tensor in
# question.

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
    # A process with many libraries has thousands of mappings, which are of no interest for memory of a GPU.
    places = [*_joined(_mapped())] if any(each.is_cpu for each in tensors.values()) else []
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


_WRITABLE = re.compile(rb"\n([0-9a-f]+)-([0-9a-f]+) .w")
"""A line of proc_pid_maps(5), with its addresses. A line is found by its beginning in a third of the time that
``re.MULTILINE`` takes."""


def _mapped() -> Iterator[Span]:
    """The mappings that may be written, in ascending order."""
    with open("/proc/self/maps", "rb") as file:
        for low, high in _WRITABLE.findall(b"\n" + file.read()):
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


def _array(tensor: torch.Tensor) -> Any:
    """A tensor's place in memory as an array, which is never read."""
    size = tensor.element_size()
    place = {
        "data": (tensor.data_ptr(), False),
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "version": 3,
    }
    return numpy.asarray(SimpleNamespace(__array_interface__=place))


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


# Names of tensors without the part that torch.compile adds.
#
# The module that `torch.compile` returns holds the user's module as ``_orig_mod``, and so do compiled parts of a model:
# ``_orig_mod.layers.0._orig_mod.weight`` is the tensor ``layers.0.weight``. Weights and checkpoints have the latter, so
# that either side may be compiled, as a whole or in parts.

COMPILED = "_orig_mod"
"""The attribute of a compiled module with the module that was compiled."""

T = TypeVar("T")


def original_name(name: str) -> str:
    """`name`, of a tensor or a module, as it is in a model of which nothing is compiled."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def by_original_name(named: Mapping[str, T]) -> dict[str, T]:
    """The same values in the same order, by `original_name`. Raises `UsageError` when two names become one."""
    found: dict[str, T] = {}
    for name, value in named.items():
        original = original_name(name)
        if original in found:
            raise UsageError(
                f"two tensors are called {original}, one of a compiled module", "rename the other one"
            )
        found[original] = value
    return found


class LocalShard:
    """This rank's part of a larger tensor, where no DTensor says so: tensor parallelism by hand, say.

    ::

        rows = len(w) * ctx.rank  # w is this rank's part of a matrix of which the rows are shared out
        channel.publish({"w": LocalShard(w, shape=(len(w) * ctx.world_size, w.shape[1]), start=(rows, 0))}, version)

    `shape` is that of the whole tensor, in elements; `tensor` is the part that begins at `start` of each dimension. A
    rank that has nothing of a tensor, as the other stages of a pipeline, leaves the name out.
    """

    def __init__(self, tensor: torch.Tensor, *, shape: Sequence[int], start: Sequence[int]) -> None:
        """Raises `UsageError` for a part that is not within the shape."""
        self.tensor, self.shape, self.start = tensor.detach(), tuple(shape), tuple(start)
        ends = [a + n for a, n in zip(self.start, tensor.shape, strict=False)]
        fits = len(self.shape) == len(self.start) == tensor.dim() and min(self.start, default=0) >= 0
        if not fits or any(end > size for end, size in zip(ends, self.shape, strict=True)):
            raise UsageError(
                f"a part {list(tensor.shape)} at {list(self.start)} is not within {list(self.shape)}",
                "shape is that of the whole tensor, start is where the part begins",
            )


Piecewise = torch.Tensor | LocalShard
"""A whole tensor, or this rank's part of one: a DTensor, or a `LocalShard`."""

Weights = nn.Module | Mapping[str, Piecewise]
"""A module, of which the state dict counts (parameters and persistent buffers), or tensors by name."""


def tensors_of(weights: Weights) -> dict[str, Piecewise]:
    """The tensors by `original_name`, detached; they share the memory of `weights`. Raises `WeightsError` for other
    values, and for tensors that have no memory; `UsageError` when two have one name."""
    named = by_original_name(weights.state_dict() if isinstance(weights, nn.Module) else weights)
    faults = [
        Fault(name, f"a {type(value).__name__} is no tensor", "leave it out")
        for name, value in named.items()
        if not isinstance(value, Piecewise)
    ]
    if faults:
        raise WeightsError("weights are tensors by name", faults=faults)
    faults = [fault for name, value in named.items() if (fault := unreadable(name, local(value))) is not None]
    if faults:
        if isinstance(weights, nn.Module):
            faults += [
                Fault(name, "it is on the meta device, too, and in no state dict", COMPUTE)
                for name, buffer in unsaved(weights).items()
                if buffer.is_meta
            ]
        raise WeightsError("these tensors have no elements that could be copied", faults=faults)
    return {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in named.items()}


COMPUTE = "after to_empty(), compute it again"


def unsaved(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `module`, by `original_name`, that are in no state dict, so that no version has them."""
    saved = module.state_dict().keys()
    return {original_name(name): buffer for name, buffer in module.named_buffers() if name not in saved}


def targets_of(weights: Weights, eta: float = 1.0) -> dict[str, Piecewise]:
    """As `tensors_of`, where all of them can be written, or blended with `eta`. Raises `WeightsError` with every one
    that cannot."""
    tensors = tensors_of(weights)
    mine = {name: local(tensor) for name, tensor in tensors.items()}
    faults = unwritable(mine) + (unblendable(mine) if eta < 1.0 else [])
    if faults:
        raise WeightsError("nothing was received, as these tensors cannot be written", faults=faults)
    return tensors


def assigner(weights: Weights) -> Callable[[str, torch.Tensor], None]:
    """A function that puts a tensor into `weights` under a name. Raises `UsageError` for a mapping that cannot change,
    and `WeightsError` for a module of which the state dict has names that no parameter or buffer has."""
    if isinstance(weights, nn.Module):
        own: dict[str, torch.Tensor] = {}
        own |= weights.named_parameters(remove_duplicate=False)
        own |= weights.named_buffers(remove_duplicate=False)
        own = by_original_name(own)
        strange = [name for name in tensors_of(weights) if name not in own]
        if strange:
            raise WeightsError(
                "assign=True replaces parameters and buffers, and the state dict has other names",
                "receive without assign=True, or into a dict",
                faults=[
                    Fault(name, "the module has no parameter or buffer of this name") for name in strange
                ],
            )

        def assign(name: str, tensor: torch.Tensor) -> None:
            own[name].data = tensor

        return assign
    if not isinstance(weights, MutableMapping):
        raise UsageError(
            "assign=True changes a module or a dict", f"give one, not a {type(weights).__name__}"
        )
    mapping = weights
    keys = {original_name(key): key for key in mapping}

    def put(name: str, tensor: torch.Tensor) -> None:
        mapping[keys[name]] = tensor

    return put


def layout_of(tensors: Mapping[str, Piecewise]) -> Layout:
    """The parts of each tensor that this rank has. Raises `WeightsError` for a DTensor that is no part of a tensor."""
    faults: list[Fault] = []
    layout: Layout = {}
    for name, tensor in tensors.items():
        about = Tensor(tuple(tensor.shape), str(local(tensor).dtype).removeprefix("torch."))
        if not is_dtensor(tensor):
            box = about.whole
            if isinstance(tensor, LocalShard):
                box = Box(tensor.start, tuple(tensor.tensor.shape))
            layout[name] = Part(about, (Piece(box, (0,) * len(box.start)),) if box.count else ())
            continue
        from unirun.weights.dtensors import indices_of

        try:
            axes = indices_of(cast("DTensor", tensor))
        except ValueError as error:
            faults.append(Fault(name, str(error), "redistribute it first"))
            continue
        if axes is not None:
            layout[name] = Part(about, pieces_of(axes))
    if faults:
        raise WeightsError("these tensors have no layout", faults=faults)
    return shared(layout)


def is_dtensor(tensor: Piecewise) -> bool:
    """Return True if it is a DTensor. There is none where nobody has imported its module, which takes long."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Piecewise) -> torch.Tensor:
    """The memory of this rank behind `tensor`."""
    if isinstance(tensor, LocalShard):
        return tensor.tensor
    if not is_dtensor(tensor):
        return tensor
    mine: torch.Tensor = cast("DTensor", tensor).to_local()
    # The result of a collective that may be under way is a tensor around it.
    wait: Callable[[], torch.Tensor] | None = getattr(mine, "wait", None)
    return wait() if wait is not None else mine


def part_of(tensor: torch.Tensor, part: Part, box: Box) -> torch.Tensor:
    """A view of the local `tensor` of which this rank has `part`: the elements of `box`, which are in one piece.

    Raises ValueError when they are not.
    """
    if len(part.pieces) == 1 and part.pieces[0].box == box:
        return tensor
    for piece in part.pieces:
        if piece.box.meet(box) == box:
            for axis, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
                tensor = tensor.narrow(axis, piece.at[axis] + start - piece.box.start[axis], size)
            return tensor
    raise ValueError(f"{box} is not in one piece of {part}")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls `name`. Raises ValueError for any other."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
