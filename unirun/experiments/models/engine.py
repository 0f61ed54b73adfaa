"""`TorchEngine`: a stage that is trained, run or generates in any layout, by torch alone.

Tensor parallelism is in the stage (DTensor). Stages are connected by torch.distributed.pipelining. Data-parallel ranks
add up their gradients after the last micro-batch, or have parts of the parameters (FSDP2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from unirun.errors import TrainingFailed, UsageError
from unirun.experiments.graph import MicroBatchSpec
from unirun.experiments.models.api import Generated, GenerationConfig, Loss, Place, Weight
from unirun.experiments.models.generation import Continuation, Slots
from unirun.experiments.models.stage import Stage, whole
from unirun.experiments.orders import check_reductions, combined
from unirun.experiments.sample import SequenceSample
from unirun.values import show_ranks
from unirun.wire.reporting import report


class TorchEngine:
    """A `Stage` with its optimizer; without one it is only run. `schedule` gives the factor of the learning rate for
    each step. A step whose loss or gradient norm is not finite changes nothing: it raises `TrainingFailed`, or, without
    `error_if_nonfinite`, it is counted as skipped."""

    def __init__(
        self,
        place: Place,
        stage: Stage,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Callable[[int], float] = lambda step: 1.0,
        clip: float = 1.0,
        *,
        error_if_nonfinite: bool = True,
    ) -> None:
        self._place, self._stage, self._clip = place, stage, clip
        self._optimizer, self._schedule, self._steps = optimizer, schedule, 0
        self._error_if_nonfinite, self._skipped = error_if_nonfinite, 0
        self._rates = [group["lr"] for group in optimizer.param_groups] if optimizer is not None else []
        self._dropped: dict[str, torch.Size] = {}
        self._remember()

    def _remember(self) -> None:
        """Note the parameters and buffers by name. While FSDP2 computes, a state dict would gather them again."""
        self._named = self._stage.named(self._stage.state_dict(keep_vars=True))

    def train_batch(
        self,
        sample: SequenceSample,
        key: str,
        spec: MicroBatchSpec,
        loss: Loss,
        weight: Weight,
        reductions: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, float]:
        """As `PipelinableEngine` says."""
        assert self._optimizer is not None, f"{self._place.name} is not trained: its backend has no optimizer"
        check_reductions(reductions)
        self._stage.train()
        self._optimizer.zero_grad()
        batches = [part.to(self._place.device) for part, _ in self._split(sample, key, spec)]
        data = self._place.group("data")
        weights = torch.tensor(sum(map(weight, batches)), dtype=torch.float64)
        if data is not None:
            dist.all_reduce(weights, group=data)
        total = max(weights.item(), 1e-9)
        logged = self._gradients(self._padded(batches), key, loss, total, reductions)
        figures = {
            name: value / total if reductions.get(name, "mean") == "mean" else value
            for name, value in self._shared(logged, reductions).items()
        }
        norm, factor = self._norm(), self._schedule(self._steps)
        figures |= {"grad_norm": norm, "lr": self._rates[0] * factor}
        wrong = self._not_finite(logged.get("loss", 0.0), figures.get("loss", 0.0), norm)
        if wrong:
            self._optimizer.zero_grad()
            if self._error_if_nonfinite:
                raise TrainingFailed(wrong, "error_if_nonfinite=False of its backend skips such steps")
            if self._place.is_dp_head and self._place.data == 0:
                report(f"unirun: {wrong}: the step is skipped")
            self._skipped += 1
        else:
            self._update(norm, factor)
        return figures if self._error_if_nonfinite else {**figures, "skipped_steps": float(self._skipped)}

    def _update(self, norm: float, factor: float) -> None:
        """Make a step of the optimizer, with gradients of this norm."""
        assert self._optimizer is not None
        scale = min(self._clip / (norm + 1e-6), 1.0) if self._clip else 1.0
        for parameter in self._parameters():
            if parameter.grad is not None and scale < 1.0:
                parameter.grad.mul_(scale)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1

    def _not_finite(self, own: float, loss: float, norm: float) -> str:
        """A text that names the value that is not finite, and the ranks of the model with it; empty if all are finite.
        `own` is the loss of this rank's sequences, on the last stage. All ranks of the model get the same answer."""
        place = self._place
        flags = torch.zeros(3, place.topo.world_size(), dtype=torch.int32)
        flags[:, place.rank] = torch.tensor([not math.isfinite(value) for value in (own, norm, loss)])
        for axis in place.topo.axes:
            group = place.group(axis)
            if group is not None:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        for kind, (what, value) in enumerate((("loss", own), ("gradient norm", norm), ("loss", loss))):
            ranks = flags[kind].nonzero().flatten().tolist()
            if ranks:
                shown = f" ({value})" if not math.isfinite(value) else ""
                where = f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)} of {place.name}"
                return f"the {what} is not finite{shown} in {where}"
        return ""

    def _split(
        self, sample: SequenceSample, key: str, spec: MicroBatchSpec
    ) -> list[tuple[SequenceSample, list[int]]]:
        """Micro-batches, of sequences of similar lengths, as they are padded to the longest one. A pipeline has as many
        as stages at least, so that all of them work, with equal numbers of tokens, as all of them get one shape."""
        stages = self._place.topo.get_dim("pipe")
        if stages == 1:
            return sample.split(spec, key)
        return sample.split(MicroBatchSpec(max(spec.n_mbs, stages), spec.max_tokens_per_mb))

    def _gradients(
        self,
        batches: Sequence[SequenceSample | None],
        key: str,
        loss: Loss,
        total: float,
        reductions: Mapping[str, str],
    ) -> dict[str, float]:
        """Run all micro-batches forward and backward. Returns the values that were logged in all of them, on
        the last stage."""
        logged: dict[str, float] = {}
        # FSDP2 takes the mean over data-parallel ranks.
        factor = self._place.topo.get_dim("data") if isinstance(self._stage, FSDPModule) else 1

        def scaled(output: torch.Tensor, batch: SequenceSample | None) -> torch.Tensor:
            if batch is None:
                return output.sum() * 0.0
            value, more = loss(_packed(output, batch.lengths(key)), batch)
            for name, figure in {**more, "loss": value}.items():
                found = figure.item() if isinstance(figure, torch.Tensor) else figure
                before = [logged[name]] if name in logged else []
                logged[name] = combined(reductions.get(name, "sum"), [*before, found])
            return value * (factor / total)

        if self._place.group("pipe") is None:
            for number, batch in enumerate(batches, 1):
                if isinstance(self._stage, FSDPModule):
                    self._stage.set_requires_gradient_sync(number == len(batches))
                scaled(self._stage(self._rows(batch, key)), batch).backward()
        else:
            self._pipeline(batches, key, scaled)
        self._add_up()
        self._complete()
        self._tie()
        return logged

    def _padded(self, batches: Sequence[SequenceSample | None]) -> list[SequenceSample | None]:
        """Micro-batches and None: all data-parallel ranks run as many, because each one is a collective with FSDP2."""
        data, most = self._place.group("data"), torch.tensor(len(batches))
        if data is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=data)
        return [*batches, *[None] * (int(most) - len(batches))]

    def _rows(self, batch: SequenceSample | None, key: str, rows: int = 0, length: int = 0) -> torch.Tensor:
        """Tokens ``[rows, length]``: sequences, padded on the right with zeros, which the causal mask hides."""
        sequences = batch.sequences(key) if batch is not None else []
        rows = rows or max(len(sequences), 1)
        length = length or max(map(len, sequences), default=1)
        found = torch.zeros(
            rows, length, dtype=torch.long, device=sequences[0].device if sequences else self._place.device
        )
        for row, sequence in zip(found, sequences, strict=False):
            row[: len(sequence)] = sequence
        return found.to(self._place.device)

    def _pipeline(
        self,
        batches: Sequence[SequenceSample | None],
        key: str,
        loss: Callable[[torch.Tensor, SequenceSample | None], torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Run micro-batches through all stages, and back with a `loss`. Returns the outputs, on the last stage."""
        stage, place = self._stage, self._place
        rows = max(len(batch.lengths(key)) if batch is not None else 1 for batch in batches)
        length = max(max(batch.lengths(key), default=1) if batch is not None else 1 for batch in batches)
        tokens = [self._rows(batch, key, rows, length) for batch in batches]
        hidden = torch.empty(rows, length, stage.hidden, dtype=stage.dtype, device="meta")
        with torch.no_grad():
            outputs = torch.empty(rows, length, self._width(), dtype=stage.dtype, device="meta")
        part = PipelineStage(
            stage,
            place.pipe,
            place.topo.get_dim("pipe"),
            place.device,
            input_args=(tokens[0].to("meta"),) if stage.first else (hidden.requires_grad_(loss is not None),),
            output_args=((outputs if stage.last else hidden.clone()).requires_grad_(loss is not None),),
            group=place.group("pipe"),
        )
        numbers = torch.arange(len(batches)).repeat_interleave(rows)
        kind = Schedule1F1B if len(batches) >= place.topo.get_dim("pipe") else ScheduleGPipe
        schedule = kind(
            part,
            len(batches),
            None if loss is None else lambda output, which: loss(output, batches[int(which[0])]),
            scale_grads=False,
        )
        given = (torch.cat(tokens),) if stage.first else ()
        if loss is None:
            found = schedule.eval(*given)
            return list(found.split(rows)) if stage.last else []
        schedule.step(*given, target=numbers if stage.last else None)
        return []

    def _width(self) -> int:
        """Elements of an output for each token."""
        head = self._stage.head
        return int(head.out_features) if isinstance(head, nn.Linear) else self._stage.hidden

    def _add_up(self) -> None:
        """Add the gradients of all data-parallel ranks."""
        data = self._place.group("data")
        if data is None or isinstance(self._stage, FSDPModule):
            return
        for parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _sum([_local(p.grad) for p in self._parameters() if p.grad is not None], data)

    def _complete(self) -> None:
        """Add partial gradients over all tensor-parallel ranks."""
        tensor = self._place.group("tensor")
        if tensor is not None:
            _sum([_local(p.grad) for p in self._stage.partial() if p.grad is not None], tensor)

    def _tie(self) -> None:
        """Give the first and the last stage the sum of both gradients of tied embeddings, the same to the bit."""
        tied, group = self._stage.tied, self._place.group("pipe")
        if tied is None or not tied.requires_grad:
            return
        assert tied.grad is not None
        grad, last = _local(tied.grad), self._place.topo.get_dim("pipe") - 1
        if self._stage.first:
            dist.send(grad, group=group, group_dst=last)
            dist.recv(grad, group=group, group_src=last)
        else:
            other = torch.empty_like(grad)
            dist.recv(other, group=group, group_src=0)
            grad += other
            dist.send(grad, group=group, group_dst=0)

    def _norm(self) -> float:
        """The 2-norm of the gradients of the whole network, the same on all ranks."""
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in self._parameters():
            if parameter.grad is None or (parameter is self._stage.tied and not self._stage.first):
                continue
            grad = parameter.grad
            norm = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            squares += whole.double().cpu() ** 2
        pipe = self._place.group("pipe")
        if pipe is not None:
            dist.all_reduce(squares, group=pipe)
        return math.sqrt(squares.item())

    def _shared(self, logged: Mapping[str, float], reductions: Mapping[str, str]) -> dict[str, float]:
        """Combine the values logged in all data-parallel ranks, and send them from the last stage to all stages."""
        pipe, data = self._place.group("pipe"), self._place.group("data")
        # A rank without sequences has logged nothing.
        each: list[Any] = [dict(logged)]
        if data is not None:
            each = [None] * self._place.topo.get_dim("data")
            dist.all_gather_object(each, dict(logged), group=data)
        names = sorted({name for some in each for name in some})
        found: list[Any] = [
            {
                name: combined(reductions.get(name, "sum"), [some[name] for some in each if name in some])
                for name in names
            }
        ]
        if pipe is not None:
            dist.broadcast_object_list(found, group=pipe, group_src=self._place.topo.get_dim("pipe") - 1)
        shared: dict[str, float] = found[0]
        return shared

    @torch.no_grad()
    def forward(self, sample: SequenceSample, key: str, spec: MicroBatchSpec) -> torch.Tensor | None:
        """As `PipelinableEngine` says."""
        self._stage.eval()
        parts = self._split(sample, key, spec)
        padded = self._padded([part for part, _ in parts] or [None])
        if self._place.group("pipe") is None:
            packed = [self._output(self._stage(self._rows(batch, key)), batch, key) for batch in padded]
        else:
            outputs = self._pipeline(padded, key, None)
            packed = [self._output(*each, key) for each in zip(outputs, padded, strict=False)]
        if not self._stage.last:
            return None
        found: dict[int, torch.Tensor] = {}
        for output, (batch, places) in zip(packed, parts, strict=False):
            found |= zip(places, output.split(batch.sizes(key)), strict=True)
        return torch.cat([found[place] for place in range(len(sample))] or packed)

    @staticmethod
    def _output(output: torch.Tensor, batch: SequenceSample | None, key: str) -> torch.Tensor:
        """The outputs of a micro-batch without padding, on the CPU, where those of all have room."""
        return _packed(output, batch.lengths(key) if batch is not None else []).cpu()

    @torch.no_grad()
    def generate(
        self,
        sample: SequenceSample,
        key: str,
        spec: MicroBatchSpec,
        how: GenerationConfig,
        *,
        seed: int,
        stop: int | Collection[int] | None = None,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> Generated | None:
        """As `PipelinableEngine` says."""
        if stop_strings and tokenizer is None:
            raise UsageError("stop strings are found in text, and there is no tokenizer", "give tokenizer=")
        self._stage.eval()
        stops = self._stage.stops if stop is None else [stop] if isinstance(stop, int) else stop
        prompts = [prompt for prompt in sample.sequences(key) for _ in range(how.n)]
        rows = [
            Continuation(prompt, how, seed=_seed(seed, number), stop=stops, stop_strings=stop_strings)
            for number, prompt in enumerate(prompts)
        ]
        count = max((len(part.sequences(key)) for part, _ in sample.split(spec)), default=0) * how.n
        slots = Slots(self._place, self._stage, count, tokenizer.decode if stop_strings else None)
        for row in rows:
            slots.add(row)
        # Data-parallel ranks may have different numbers of steps: no collective is between them here.
        with whole(self._stage):
            while slots.busy:
                slots.step()
        if not self._stage.last:
            return None
        each = [rows[first : first + how.n] for first in range(0, len(rows), how.n)]
        return Generated(
            [[torch.tensor(row.tokens, dtype=torch.long) for row in some] for some in each],
            [[torch.tensor(row.logprobs) for row in some] for some in each],
            [[row.ended for row in some] for some in each],
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `PipelinableEngine` says."""
        return {name: tensor.detach() for name, tensor in self._named.items()}

    def state(self) -> dict[str, Any]:
        """As `PipelinableEngine` says."""
        found: dict[str, Any] = {
            "tensors": {name: _local(tensor).cpu() for name, tensor in self.tensors().items()},
            "steps": self._steps,
            "skipped": self._skipped,
        }
        if self._optimizer is not None:
            saved = self._optimizer.state_dict()["state"]
            found["optimizer"] = {
                number: {n: _local(v).cpu() if isinstance(v, torch.Tensor) else v for n, v in some.items()}
                for number, some in saved.items()
            }
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `PipelinableEngine` says."""
        own = {name: _local(tensor) for name, tensor in self.tensors().items()}
        for name in sorted({*own, *state["tensors"]}):
            there, here = (
                list(some[name].shape) if name in some else "none" for some in (state["tensors"], own)
            )
            if there != here:
                raise UsageError(
                    f"the checkpoint of {self._place.name} has other parameters than its rank {self._place.rank}: "
                    f"the shape of {name} is {there} in the checkpoint and {here} in the model",
                    "go on with the model, the layout and the backend with which the trial was begun",
                )
        for name, tensor in state["tensors"].items():
            own[name].copy_(tensor)
        self._steps, self._skipped = state["steps"], state["skipped"]
        if self._optimizer is not None:
            groups = self._optimizer.state_dict()["param_groups"]
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            saved = {
                number: {n: _like(v, parameters[number]) for n, v in some.items()}
                for number, some in state["optimizer"].items()
            }
            self._optimizer.load_state_dict({"state": saved, "param_groups": groups})

    @torch.no_grad()
    def offload(self, *, keep: bool) -> None:
        """As `PipelinableEngine` says."""
        if not keep:
            # Rotary tables are buffers outside the state dict: no other model can give them back, so they are kept.
            for name, tensor in {id(tensor): (name, tensor) for name, tensor in self._named.items()}.values():
                own = _local(tensor)
                self._dropped[name] = own.shape
                # A new tensor instead of resize_(0): the old memory may still be being sent to other workers.
                own.data = own.new_empty(0)
        self._move(torch.device("cpu"))

    @torch.no_grad()
    def fetch(self) -> None:
        """As `PipelinableEngine` says."""
        self._move(self._place.device)
        for name, shape in self._dropped.items():
            own = _local(self._named[name])
            own.data = own.new_empty(shape)
        self._dropped.clear()

    def _move(self, device: torch.device) -> None:
        self._stage.to(device)
        self._remember()
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            # The number of steps is where the optimizer has it.
            state.update(
                {n: v.to(device) for n, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
            )

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._stage.parameters() if parameter.requires_grad]


def _seed(seed: int, number: int) -> int:
    """The seed of a sequence. Seeds that are near each other give other sequences than their neighbours."""
    return (seed * 1_000_003 + number) % 2**63


def _sum(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Replace each tensor by its sum over `group`, in one buffer for each dtype."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        some = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(some, flat.split([each.numel() for each in some]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A value of the optimizer's state for `parameter`: of the same kind, if it is a part of such a tensor."""
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or not value.dim():
        return value
    local = value.to(parameter.device)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _packed(output: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The outputs without padding: ``[sum(lengths), …]``; without the last dimension if its size is 1."""
    found = torch.cat([row[:length] for row, length in zip(output, lengths, strict=False)] or [output[0, :0]])
    return found.squeeze(-1) if found.shape[-1] == 1 else found
