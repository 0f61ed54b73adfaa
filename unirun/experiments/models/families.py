"""Families of decoders: the cut of their layers over tensor-parallel ranks, tried on a small network.

Nothing is known of a family by its name. A network is refused when its parts compute something else than the whole
network does, so that one which transformers adds or changes is never cut by chance.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unirun.errors import SpecError

# The cut of the layers of a decoder over tensor-parallel ranks (Shoeybi et al. 2019, Megatron-LM).
#
# A module that is cut has linear layers that are cut by columns, and after them one that is cut by rows, whose outputs
# are summed. Each parameter is one of three kinds:
#
# - *sharded*: a weight or bias of these linear layers. Each rank has a part of it, and the gradient of this part; -
# *partial*: any other parameter of a module that is cut, as the norms of queries and keys. Each rank has all of it and
# sees some heads only, so its gradient is the sum over the ranks; - *whole*: a parameter outside of the modules that
# are cut. All ranks have the same inputs there, and the same gradient.


Cut = Mapping[str, int]
"""The linear layers of a module that are cut, by name, and the dimension of their weights: 0 is by columns, 1 by rows,
as torch has the weight of a linear layer transposed."""

PLAN: Mapping[str, Cut] = {
    "self_attn": {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1},
    "mlp": {"gate_proj": 0, "up_proj": 0, "down_proj": 1},
}
"""The modules of a layer that are cut."""

OPTIONAL = ("gate_proj",)
"""Linear layers that some families do not have."""


def cuts(layer: nn.Module) -> dict[str, Cut]:
    """The modules of this layer that are cut. One whose linear layers are others, as a fused projection or the experts
    of a mixture, is left whole."""
    found: dict[str, Cut] = {}
    for name, cut in PLAN.items():
        module = getattr(layer, name, None)
        there = {each: dim for each, dim in cut.items() if type(getattr(module, each, None)) is nn.Linear}
        if cut.keys() - there.keys() <= set(OPTIONAL):
            found[name] = there
    return found


def partial_names(layer: nn.Module) -> set[str]:
    """The names of the partial parameters of this layer."""
    found = set()
    for name, cut in cuts(layer).items():
        sharded = tuple(f"{each}." for each in cut)
        module: Any = getattr(layer, name)
        found |= {f"{name}.{n}" for n, _ in module.named_parameters() if not n.startswith(sharded)}
    return found


HEADS, LAYERS, WIDTH, EXPERTS, VOCABULARY = 4, 4, 32, 32, 64
"""The sizes of a small network; `WIDTH` is that of intermediate layers."""

MAX_PARAMETERS = 200_000_000
"""Maximum number of parameters of a network that is tried."""

LENGTHS = (12, 7, 9)
"""The lengths of the sequences that a small network gets."""

ROUNDING = 1e-6
"""Largest relative difference that is due to the order of sums. Networks compute in float64, which rounds by 1e-16."""

ZERO = 1e-12
"""Fraction of a module's largest gradient below which another one counts as zero."""

PARTS = 2
"""Tensor-parallel ranks in this process."""

Build = Callable[[nn.Module, int, int], nn.Module]
"""Function of a whole network, `stage` and `stages`: makes this stage of so many."""


def small(config: Any) -> Any:
    """The same configuration with few and small layers, one of each kind at least."""
    found: dict[str, Any] = config.to_dict()
    names: Mapping[str, str] = type(config).attribute_map

    def key(name: str) -> str:
        return names.get(name, name)

    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(found.get(key(name)), int):
            raise TypeError(f"its configuration has no {name}")
    count = int(found[key("num_hidden_layers")])
    # Lists with an element for each layer, such as the kinds of attention.
    each = [name for name, value in found.items() if isinstance(value, (list, tuple)) and len(value) == count]
    kinds: dict[str, int] = {}
    for at in range(count):
        kinds.setdefault(repr([found[name][at] for name in each]), at)
    chosen = sorted(kinds.values())
    while len(chosen) < min(count, LAYERS):
        chosen += sorted(kinds.values())
    for name in each:
        found[name] = [found[name][at] for at in chosen]
    heads, groups = int(found[key("num_attention_heads")]), found.get(key("num_key_value_heads"))
    # Heads stay as wide as they are: many sizes follow from that.
    sizes = {
        "num_hidden_layers": len(chosen),
        "num_attention_heads": HEADS,
        "num_key_value_heads": groups and (HEADS if groups == heads else min(int(groups), HEADS // 2)),
        "hidden_size": HEADS * (int(found[key("hidden_size")]) // heads),
        "vocab_size": VOCABULARY,
    }
    found |= {key(name): size for name, size in sizes.items() if found.get(key(name)) is not None}
    standard = {key("num_attention_heads"), key("num_key_value_heads")}
    for name, value in found.items():
        if "heads" in name and name not in standard and isinstance(value, int):
            # As much fewer as the others, since hidden sizes follow from them.
            found[name] = max(value * HEADS // heads, 1)
        elif name.endswith("intermediate_size") and isinstance(value, int):
            found[name] = WIDTH
        elif name in ("num_experts", "num_local_experts", "n_routed_experts") and isinstance(value, int):
            found[name] = min(value, EXPERTS)
        elif name.endswith("token_id") and value is not None:
            found[name] = 1
    for name in ("architectures", "dtype", "torch_dtype"):
        found.pop(name, None)
    # torch's product of all experts at once has no float64.
    return type(config).from_dict({**found, "experts_implementation": "eager"})


def refusal(config: Any, build: Build, layout: str, *, critic: bool) -> str:
    """The reason to refuse networks of this configuration at all (`layout` is ``""``), in stages (``pipe``), or cut by
    tensor parallelism (``tensor``); empty if they run. It is found once in a process for each configuration."""
    key = type(config), config.to_json_string(use_diff=False), build, layout, critic
    if key not in _REFUSALS:
        _REFUSALS[key] = _refusal(config, build, layout, critic)
    return _REFUSALS[key]


_REFUSALS: dict[Any, str] = {}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """In the block torch computes with one thread: two that compute a small network mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    """In the block float32 is float64, in the code of networks too: what then differs is no rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles():
            yield
    finally:
        torch.set_default_dtype(before)


class _Doubles(TorchFunctionMode):
    """Calls of torch with float64 in place of float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        # Most calls have no dtype, and there are many.
        for value in args:
            if value is torch.float32:
                args = [torch.float64 if each is torch.float32 else each for each in args]
                break
        more = kwargs or {}
        for name, value in more.items():
            if value is torch.float32:
                more = {**more, name: torch.float64}
        return function(*args, **more)


def _refusal(config: Any, build: Build, layout: str, critic: bool) -> str:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), one_thread(), doubles():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            whole = _network(config, build, critic)
        except SpecError as error:
            return error.faults[0].problem
        except Exception as error:  # noqa: BLE001 - whatever a network of another family raises
            return f"no small network of it can be made, to try it: {first_line(error)}"
        finally:
            logging.set_verbosity(level)
        for told, tried in _trials(whole, build, layout, critic):
            try:
                why = tried()
            except SpecError as error:
                return error.faults[0].problem
            except Exception as error:  # noqa: BLE001 - as above
                why = first_line(error)
            if why:
                return f"{told}: {why}"
    return ""


@torch.no_grad()
def _network(config: Any, build: Build, critic: bool) -> Any:
    from transformers import AutoModelForCausalLM

    def made() -> Any:
        return AutoModelForCausalLM.from_config(small(config), dtype=torch.float64)  # type: ignore[no-untyped-call]

    with torch.device("meta"):
        shape = made()
    count = sum(parameter.numel() for parameter in shape.parameters())
    # Raises `SpecError` when it has no layers that stages can have.
    build(shape, 0, 1)
    if count > MAX_PARAMETERS:
        raise ValueError(f"it still has {count} parameters")
    whole = made()
    if critic:
        whole.lm_head = nn.Linear(whole.config.hidden_size, 1, bias=False)
    # What is zero or one in a new network hides differences.
    for parameter in whole.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return whole


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its text, which may be empty."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _trials(whole: Any, build: Build, layout: str, critic: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    tokens = [torch.randint(2, VOCABULARY, (length,)) for length in LENGTHS]
    if not layout and not _dropout(whole.config):
        yield "in training it draws random numbers", lambda: _drawn(whole, tokens[0])
    if layout == "tensor":
        yield "tensor parallelism cannot cut its layers", lambda: _cut(whole, tokens)
        return
    # A stage for each layer finds all that layers of a network have in common.
    numbers = sorted({2, len(whole.model.layers)}) if layout == "pipe" else [1]

    for count in numbers:
        shown = f"in {count} stage{'s' * (count > 1)}"

        stages: list[Any] = []

        def outputs(stages: list[Any] = stages, count: int = count) -> str:
            stages += [build(_copied(whole, whole.parameters()), each, count).eval() for each in range(count)]
            why = _outputs(stages, tokens, _whole(whole, tokens, critic))
            if why and not _outputs(stages, tokens, _whole(whole, tokens, True)):
                return "the network changes its logits after the last layer"
            return why

        def cached(stages: list[Any] = stages) -> str:
            return _cached(stages, tokens, _whole(whole, tokens, critic))

        yield f"{shown} it has other outputs", outputs
        yield f"{shown} it continues sequences differently", cached


def _copied(module: Any, same: Iterable[nn.Parameter] = ()) -> Any:
    """A copy with the same configuration, which takes longer to copy than the rest, and with these parameters."""
    return copy.deepcopy(module, {id(each): each for each in (getattr(module, "config", None), *same)})


@torch.no_grad()
def _drawn(whole: Any, tokens: torch.Tensor) -> str:
    """The difference of two passes in training, in words: routers with noise would draw other numbers in each rank."""
    whole.train()
    one, other = (whole(tokens[None], use_cache=False).logits for _ in range(2))
    return _differ(one, other)


@torch.no_grad()
def _whole(whole: Any, tokens: Sequence[torch.Tensor], bare: bool) -> list[torch.Tensor]:
    """The outputs for each sequence alone; with `bare` as the last layer gives them, before any later change."""
    whole.eval()
    if bare:
        return [whole.lm_head(whole.model(row[None], use_cache=False)[0])[0] for row in tokens]
    return [whole(row[None], use_cache=False).logits[0] for row in tokens]


def _through(stages: Sequence[Any], value: torch.Tensor, each: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    for stage, more in zip(stages, each, strict=True):
        value = stage(value, **more)
    return value


def _differ(one: torch.Tensor, other: torch.Tensor, largest: float = 0.0) -> str:
    """The difference of two tensors in words; empty if it is due to rounding. What is zero but for rounding is small
    beside `largest`, which its terms may have."""
    if one.shape != other.shape:
        return f"the shapes are {list(one.shape)} and {list(other.shape)}"
    scale, most = float(other.abs().max()), float((one - other).abs().max())
    if most <= ROUNDING * scale + ZERO * largest:
        return ""
    return f"they differ by {most / scale:.1%}" if scale else f"they differ by {most:.1g}, and one is zero"


@torch.no_grad()
def _outputs(stages: Sequence[Any], tokens: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Compare outputs as in training: padded on the right with zeros, without a mask."""
    rows = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.long)
    for row, some in zip(rows, tokens, strict=True):
        row[: len(some)] = some
    found = _through(stages, rows, [{} for _ in stages])
    parts = [row[: len(some)] for row, some in zip(found, tokens, strict=True)]
    return _differ(torch.cat(parts), torch.cat([*expected]))


@torch.no_grad()
def _cached(stages: Sequence[Any], tokens: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Compare outputs as in generation: rows of different lengths join, the longer ones later, and the last two tokens
    come one after the other."""
    from unirun.experiments.models.cache import RowCache, left_padded, mask_of

    caches = [RowCache(stage.config, len(tokens)) for stage in stages]
    shortest = min(range(len(tokens)), key=lambda row: len(tokens[row]))
    device = tokens[0].device
    for rows in ([shortest], [row for row in range(len(tokens)) if row != shortest]):
        value, mask, positions = left_padded([tokens[row][:-2] for row in rows], device)
        joining = [RowCache(stage.config, len(rows)) for stage in stages]
        each = [{"attention_mask": mask, "positions": positions, "cache": cache.layers} for cache in joining]
        found = _through(stages, value, each)[:, -1]
        if why := _differ(found, torch.stack([expected[row][-3] for row in rows])):
            return why
        for cache, more in zip(caches, joining, strict=True):
            more.length = value.shape[1]
            cache.join(rows, more)
    for left in (2, 1):
        lengths = [len(row) - left for row in tokens]
        mask = mask_of([length + 1 for length in lengths], caches[0].length + 1)
        positions = torch.tensor(lengths)[:, None]
        each = [{"attention_mask": mask, "positions": positions, "cache": cache.layers} for cache in caches]
        found = _through(stages, torch.stack([row[-left] for row in tokens])[:, None], each)[:, -1]
        if why := _differ(found, torch.stack([row[-left] for row in expected])):
            return why
        for cache in caches:
            cache.length += 1
    return ""


def _cut(whole: Any, tokens: Sequence[torch.Tensor]) -> str:
    """Run each module that is cut in parts, one after the other, as tensor-parallel ranks do. The outputs of the parts
    have to add up to those of the module, and gradients have to be as `plan` says."""
    seen: list[tuple[Any, str, Cut, tuple[Any, ...], dict[str, Any], Any]] = []
    found = {id(layer): cuts(layer) for layer in whole.model.layers}
    if not any(found.values()):
        return f"no linear layers are as the plan has them ({_names(whole.model.layers[0])})"

    def hook(layer: Any, name: str, cut: Cut) -> Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]:
        def remember(module: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            first.retain_grad()
            seen.append((layer, name, cut, args, given, first))

        return remember

    hooks = [
        getattr(layer, name).register_forward_hook(hook(layer, name, cut), with_kwargs=True)
        for layer in whole.model.layers
        for name, cut in found[id(layer)].items()
    ]
    whole.train()
    rows = torch.stack([some[: min(LENGTHS)] for some in tokens])
    logits = whole(rows, use_cache=False).logits
    (logits * torch.randn_like(logits)).sum().backward()
    for each in hooks:
        each.remove()
    for layer, name, cut, args, given, output in seen:
        try:
            why = _parts(layer, name, cut, args, given, output)
        except Exception as error:  # noqa: BLE001 - whatever a module raises that has some of its heads only
            why = first_line(error)
        if why:
            return f"{name} {_others(layer, name)}: {why}{_dropout(whole.config)}"
    return ""


def _others(layer: nn.Module, name: str) -> str:
    """The parameters of a module that the plan does not cut."""
    some = sorted(partial_names(layer))
    mine = [each.removeprefix(f"{name}.") for each in some if each.startswith(f"{name}.")]
    return f"(with {', '.join(mine)})" if mine else "(without other parameters)"


def _dropout(config: Any) -> str:
    some = [
        f"{name} is {value}"
        for name, value in config.to_dict().items()
        if "drop" in name and isinstance(value, float) and value > 0.0
    ]
    return f"; {', '.join(some)}, and each rank draws for its own heads" if some else ""


def _names(layer: nn.Module) -> str:
    return ", ".join(name for name, module in layer.named_modules() if isinstance(module, nn.Linear))


def _parts(
    layer: Any, name: str, cut: Cut, args: tuple[Any, ...], given: Mapping[str, Any], output: torch.Tensor
) -> str:
    module = getattr(layer, name)
    sums: dict[str, torch.Tensor] = {}
    total = torch.zeros_like(output)
    assert output.grad is not None
    for rank in range(PARTS):
        part = _part(module, cut, rank)
        # Gradients may reach inputs only through the layers cut by columns, whose inputs are detached: none are left.
        inputs: list[torch.Tensor] = []

        def leaf(value: Any, inputs: list[torch.Tensor] = inputs) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            inputs.append(value.detach().requires_grad_())
            return inputs[-1]

        sums_of_rows = _interrupted(part, cut)
        found = part(*map(leaf, args), **{key: leaf(value) for key, value in given.items()})
        found = found[0] if isinstance(found, tuple) else found
        found.backward(output.grad)
        after = [key for key, parameter in part.named_parameters() if parameter.grad is not None]
        if after:
            return f"{after[0]} is used after the linear layers that are cut"
        for row, rest in sums_of_rows:
            row.backward(rest.grad)
        if any(each.grad is not None and bool(each.grad.any()) for each in inputs):
            return "its inputs are also used beside the linear layers that are cut"
        total = total + found.detach()
        for key, parameter in part.named_parameters():
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            linear, _, what = key.rpartition(".")
            dim = cut.get(linear)
            if dim == 0 or (dim == 1 and what == "weight"):
                sums[key] = torch.cat([sums[key], grad], dim) if rank else grad
            elif dim is None:
                sums[key] = sums[key] + grad if rank else grad
    if why := _differ(total, output.detach()):
        return f"the outputs of its parts do not add up: {why}"
    whole = {
        key: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for key, parameter in module.named_parameters()
    }
    largest = max(float(grad.abs().max()) for grad in whole.values())
    partial = partial_names(layer)
    for key, found in sums.items():
        if why := _differ(found, whole[key], largest):
            kind = "partial" if f"{name}.{key}" in partial else "sharded"
            return f"the gradients of {key}, which is {kind}, do not add up: {why}"
    return ""


def _interrupted(part: nn.Module, cut: Cut) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The outputs of linear layers that are cut by rows, as this part has them and as the rest of the module gets them:
    gradients of the rest do not go on to the part by themselves."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append((output, output.detach().requires_grad_()))
        return found[-1][1]

    for name, dim in cut.items():
        if dim == 1:
            getattr(part, name).register_forward_hook(remember)
    return found


def _part(module: nn.Module, cut: Cut, rank: int) -> Any:
    """The part of a module that tensor-parallel `rank` has."""
    part: Any = _copied(module)
    for parameter in part.parameters():
        parameter.grad = None
    for name, dim in cut.items():
        linear = getattr(part, name)
        weight = linear.weight.detach().chunk(PARTS, dim)[rank].clone()
        mine = nn.Linear(weight.shape[1], weight.shape[0], bias=linear.bias is not None)
        mine.weight = nn.Parameter(weight)
        if linear.bias is not None:
            bias = linear.bias.detach()
            # The bias after a sum is added once.
            mine.bias = nn.Parameter(bias.chunk(PARTS)[rank].clone() if dim == 0 else bias * (rank == 0))
        if dim == 0:
            mine.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
        setattr(part, name, mine)
    return part
