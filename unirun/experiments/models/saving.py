"""A model as others read it: one state dict, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from unirun.experiments.models.api import Model

FILE = "model.pt"


@torch.no_grad()
def load_whole(model: Model, path: Path) -> None:
    """Give a model that is whole in this process the tensors of ``path/model.pt``."""
    saved = torch.load(path / FILE, map_location="cpu", weights_only=True)
    for name, tensor in model.running().tensors().items():
        tensor.copy_(saved[name])


def save_whole(model: Model, path: Path) -> None:
    """Write the tensors of all stages, by their names in the whole network, to ``path/model.pt``. All ranks of the
    model call it; the first one of the last stage writes. A model without a network has none."""
    if model.engine is None:
        return
    place = model.place
    whole: dict[str, Any] = {}
    for name, tensor in model.running().tensors().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[name] = full.cpu().clone()
    group = place.group("pipe")
    if group is not None:
        stages: list[Any] = [None] * place.topo.get_dim("pipe")
        dist.all_gather_object(stages, whole, group=group)
        whole = {name: tensor for stage in stages for name, tensor in stage.items()}
    if place.speaks and place.data == 0:
        part = path / f"{FILE}.partial"
        torch.save(whole, part)
        part.rename(path / FILE)
