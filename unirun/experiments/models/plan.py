"""The cut of the layers of a decoder over tensor-parallel ranks (Shoeybi et al. 2019, Megatron-LM).

A module that is cut has linear layers that are cut by columns, and after them one that is cut by rows, whose outputs
are summed. Each parameter is one of three kinds:

- *sharded*: a weight or bias of these linear layers. Each rank has a part of it, and the gradient of this part;
- *partial*: any other parameter of a module that is cut, as the norms of queries and keys. Each rank has all of it and
  sees some heads only, so its gradient is the sum over the ranks;
- *whole*: a parameter outside of the modules that are cut. All ranks have the same inputs there, and the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from unirun.values import Value


class Cut(Value):
    """The linear layers of a module that are cut, by name."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


PLAN: Mapping[str, Cut] = {
    "self_attn": Cut(("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": Cut(("gate_proj", "up_proj"), ("down_proj",)),
}
"""The modules of a layer that are cut."""

OPTIONAL = ("gate_proj",)
"""Linear layers that some families do not have."""


def cuts(layer: nn.Module) -> dict[str, Cut]:
    """The modules of this layer that are cut. One whose linear layers are others, as a fused projection or the experts
    of a mixture, is left whole."""
    found = {}
    for name, cut in PLAN.items():
        module = getattr(layer, name, None)
        there = {each for each in (*cut.columns, *cut.rows) if type(getattr(module, each, None)) is nn.Linear}
        if {*cut.columns, *cut.rows} - there <= set(OPTIONAL):
            found[name] = Cut(tuple(each for each in cut.columns if each in there), cut.rows)
    return found


def partial_names(layer: nn.Module) -> set[str]:
    """The names of the partial parameters of this layer."""
    found = set()
    for name, cut in cuts(layer).items():
        sharded = tuple(f"{each}." for each in (*cut.columns, *cut.rows))
        module: Any = getattr(layer, name)
        found |= {f"{name}.{n}" for n, _ in module.named_parameters() if not n.startswith(sharded)}
    return found
