"""A version of the weights as a safetensors file in shared memory, which other processes of this host open by its path.

The file is a memfd: it has no name of its own, and the kernel frees it with the last process that has it, however that
ends. Others of the same user open it as ``/proc/<pid>/fd/<n>``.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from unirun.errors import Fault, FrameError, UnirunError, UsageError, WeightsError
from unirun.weights.memory import unreadable
from unirun.weights.packing import copy_all
from unirun.weights.safetensors import Param, header_of, length_of, read_header

TOKEN = "unirun"
"""The key of the header's metadata under which a file says which one it is."""


class Checkpoint:
    """Memory for tensors as `params` say, in a file at `path`. `token` is in the file, and in no other."""

    def __init__(self, params: Sequence[Param]) -> None:
        """Raises `WeightsError` for dtypes that a file cannot have, `UnirunError` when there is no memory."""
        self.params, self.token = tuple(params), secrets.token_hex(16)
        head, header, size = header_of(self.params, {"format": "pt", TOKEN: self.token})
        try:
            self._handle, memory = _memory(size)
        except OSError as error:
            raise UnirunError(
                f"there is no shared memory for {size} bytes of weights ({error.strerror})",
                "give this job more memory",
            ) from error
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._views = [header.view(memory, number) for number in range(len(self.params))]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, over the memory of the file."""
        return {param.name: view for param, view in zip(self.params, self._views, strict=True)}

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors, which come in the order of `params`. Raises `WeightsError` with all that are others."""
        faults = []
        for param, view, pair in zip_longest(self.params, self._views, tensors):
            empty = unreadable(*pair) if pair is not None else None
            found = Param(pair[0], pair[1].dtype, tuple(pair[1].shape)) if pair and not empty else None
            if empty is not None:
                faults.append(empty)
            elif found is None or found != param:
                faults.append(Fault(str(param or "nothing"), f"then came {found or 'nothing'}"))
            else:
                copy_all([view], [pair[1].detach().resolve_conj().resolve_neg()])
        if faults:
            raise WeightsError(
                "these tensors cannot be sent, or metadata() has declared others", faults=faults
            )

    def close(self) -> None:
        """Close the file. Its memory is freed when nobody reads it any more."""
        self._views.clear()
        os.close(self._handle)


def read(path: str, token: str) -> dict[str, torch.Tensor]:
    """The tensors of the file with this `token`, over its memory, in the order of its header.

    Writing to one changes this process's copy of it alone. Raises `UsageError` when the file is not there, or another.
    """
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header = read_header(mapped[: length_of(mapped[:8])])
    except (OSError, ValueError, FrameError) as error:
        raise UsageError(f"there are no weights at {path} ({error})", SAME_HOST) from error
    if header.metadata.get(TOKEN) != token:
        raise UsageError(f"there are other weights at {path}", SAME_HOST)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    return {param.name: header.view(memory, number) for number, param in enumerate(header.params)}


SAME_HOST = "run the server on the host of the worker that sends, in the same container, as the same user"


def _memory(size: int) -> tuple[int, torch.Tensor]:
    """A memfd, and its memory. Raises OSError."""
    handle = os.memfd_create("unirun-checkpoint", os.MFD_CLOEXEC)
    try:
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        os.posix_fallocate(handle, 0, size)
        return handle, torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
    except BaseException:
        os.close(handle)
        raise
