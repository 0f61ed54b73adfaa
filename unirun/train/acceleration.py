"""Helpers that make a training function a distributed one: model, data, optimizer, precision, reproducibility."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal, TypeVar

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

from unirun.errors import UsageError
from unirun.roles.nested import rebuilt
from unirun.train.checkpoints.state import unwrapped
from unirun.train.data.loader import Loader
from unirun.train.functions import in_worker, session

M = TypeVar("M", bound=nn.Module)

Parallel = Literal["ddp", "fsdp"] | None

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def device() -> torch.device:
    """The device of this rank: its GPU, if it has one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", session().local_rank % torch.cuda.device_count())


def accelerate(amp: Literal["bf16", "fp16"] | bool | None = None) -> None:
    """Compute in mixed precision from now on, in models that `prepare_model` has prepared: ``"bf16"`` (also True), or
    ``"fp16"``, which scales gradients on a GPU. None or False: in the precision of the parameters.

    Call it first; a later call is for what is prepared after that. Raises `UsageError`, also when the first call comes
    after `prepare_model` or `prepare_optimizer`; not so outside a `Trainer`, where nothing says when a run begins.
    """
    kind = "bf16" if amp is True else amp
    if kind and kind not in DTYPES:
        raise UsageError(f"amp={amp!r}", "it is 'bf16', 'fp16' or None")
    own = session()
    if kind and own.has_prepared and not own.accelerated_first and in_worker():
        raise UsageError(
            "accelerate was called after prepare_model or prepare_optimizer, and has no effect on what these returned",
            "call it first",
        )
    own.accelerated_first = own.accelerated_first or not own.has_prepared
    own.dtype = DTYPES[kind] if kind else None
    needs_scale = kind == "fp16" and device().type == "cuda"
    own.scaler, own.has_stepped = torch.amp.GradScaler(device().type) if needs_scale else None, False


def prepare_model(model: M, parallel: Parallel = "ddp", *, move: bool = True, **options: Any) -> M:
    """The model on this rank's device, and the ranks' gradients in common: by DistributedDataParallel (``"ddp"``), with
    its parameters shared out (``"fsdp"``: FSDP2's `fully_shard`), or not (None).

    With one rank it is not wrapped. `options` go to the wrapper. Returns the model to train with; `unwrap` gives the
    one inside. Raises `UsageError`.
    """
    if parallel not in ("ddp", "fsdp", None):
        raise UsageError(f"parallel={parallel!r}", "it is 'ddp', 'fsdp' or None")
    if move:
        model = model.to(device())
    session().has_prepared = True
    if (dtype := session().dtype) is not None:
        # With the bound method, so that of a copy of the model is the copy's.
        model.forward = partial(_autocast, model.forward, dtype)
    if parallel is None or session().world == 1:
        return model
    if not torch.distributed.is_initialized():
        raise UsageError("the ranks have no process group", "use backend='torch', or parallel=None")
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, **options)
        return model
    if device().type == "cuda":
        options.setdefault("device_ids", [device().index])
    wrapped: Any = nn.parallel.DistributedDataParallel(model, **options)
    return wrapped  # type: ignore[no-any-return]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile, or the model itself."""
    inner: nn.Module = unwrapped(model)
    return inner


def _autocast(forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a model, which computes in `dtype` and returns float32."""
    with torch.autocast(device().type, dtype):
        return _float(forward(*args, **kwargs))


def _float(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    return rebuilt(_float, value)


def prepare_data_loader(loader: DataLoader[Any]) -> Loader | DataLoader[Any]:
    """The part of a DataLoader that this rank has, in batches of its size: each sample of an epoch is used once, also
    when the run goes on from a checkpoint with another number of ranks.

    Outside a `Trainer` the loader as it is. Batches are not moved to a device. Raises `UsageError` for a loader that
    cannot be split: with a sampler of its own, or ``drop_last``.
    """
    return session().adopt(loader) if in_worker() else loader


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, of which `step` undoes the scaling of gradients with ``accelerate("fp16")``."""
    session().has_prepared = True
    scaler = session().scaler
    if scaler is not None:
        step = optimizer.step

        @wraps(step)
        def scaled(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            # That of a scheduler, if one has wrapped this.
            outer, self.step = self.step, step  # type: ignore[method-assign]
            try:
                result = scaler.step(self, *args, **kwargs)
            finally:
                self.step = outer  # type: ignore[method-assign]
            session().has_stepped = session().scaler is scaler
            return result

        # Schedulers wrap a method.
        optimizer.step = MethodType(scaled, optimizer)  # type: ignore[method-assign]
    return optimizer


def backward(loss: torch.Tensor) -> None:
    """``loss.backward()``, scaled with ``accelerate("fp16")``."""
    own = session()
    if own.scaler is not None and own.has_stepped:
        # Not with the step: another optimizer may have gradients with the same scale.
        own.scaler.update()
        own.has_stepped = False
    (loss if own.scaler is None else own.scaler.scale(loss)).backward()


def enable_reproducibility(seed: int = 0) -> None:
    """Have this function give the same numbers each time it runs with as many ranks: seeds of torch, numpy and random,
    other ones in each rank, and algorithms that are deterministic.

    The random numbers begin anew with each checkpoint that is saved or loaded, so a run that was killed and goes on
    from there has those of a run that was not. Call it first, and `load_checkpoint` last before training. What
    processes of a DataLoader draw is not part of that. Raises RuntimeError in operations without a deterministic
    algorithm.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    rank = session().rank

    def reseed(number: int) -> None:
        state = numpy.random.SeedSequence([seed, rank, number]).generate_state(2, numpy.uint32)
        torch.manual_seed(int(state[0]))
        numpy.random.seed(int(state[1]))
        random.seed(int(state[0]))

    session().begin_seeds(reseed)
