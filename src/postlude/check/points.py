"""Test points: random parameters and inputs that expose wrong results.

Independent noise averages out in global reductions, and default parameters (γ = 1, β = 0) hide missing terms. So inputs
also have an offset and a scale per sample and channel, and every parameter is random. The points of a chain are drawn
on the device of its tensors: a seed gives the same point every time, but another one on a GPU than on a CPU. Those of a
module are drawn on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from postlude.chain import Chain, Convolution, Normalize, Pointwise, Role, Slot
from postlude.check.draws import LARGEST_OFFSET, SMALL, Family, draw, generator_for, normal, offset_for, uniform
from postlude.check.isolation.wire import distinct_part, zeros_laid_out_like
from postlude.check.nested import map_tensors

Layout = Literal["contiguous", "channels_last"]
# The order in which a series of seeds takes its families.
PLAIN: tuple[Family, ...] = (
    "hierarchical",
    "normal",
    "hierarchical",
    "uniform",
    "hierarchical",
    "heavy-tailed",
)
PARAMETER_SPREAD = 0.5
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
_PRODUCERS = (nn.modules.conv._ConvNd, nn.Linear)


@dataclass(frozen=True)
class ChainPoint:
    """One tensor per slot of a chain, and where they come from."""

    tensors: tuple[Tensor, ...]
    family: str = "given"


def inputs_like(
    inputs: Any, family: Family, seed: int, largest: float = LARGEST_OFFSET, shuffles_integers: bool = False
) -> Any:
    """The same nested inputs with new random numbers in every floating tensor; strides and everything else are kept.

    Integers, which may be indices or labels, stay, or get another order.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def renew(tensor: Tensor) -> Tensor:
        # On the tensor's device: the CPU would take seconds for a large one.
        generator = generators.setdefault(tensor.device, generator_for(seed, tensor.device))
        if not tensor.is_floating_point():
            if not shuffles_integers or tensor.is_complex():
                return tensor
            order = torch.randperm(tensor.numel(), generator=generator, device=generator.device).to(tensor.device)
            return laid_out_like(tensor.reshape(-1)[order].reshape(tensor.shape), tensor)
        return laid_out_like(draw(tensor.shape, family, generator, tensor.dtype, largest), tensor)

    return map_tensors(renew, inputs)


def laid_out_like(values: Tensor, like: Tensor) -> Tensor:
    """`values` with the device, strides (gaps and expanded axes too) and `requires_grad` of `like`."""
    made = zeros_laid_out_like(like, like.device)
    part = distinct_part(made)
    part.copy_(values[tuple(slice(size) for size in part.shape)])
    return made.requires_grad_(like.requires_grad)


def random_state(
    module: nn.Module, seed: int, family: Family = "normal", largest: float = LARGEST_OFFSET
) -> dict[str, Tensor]:
    """A state for `module`: producers scaled by fan-in, γ of both signs, variances positive. Masks stay."""
    generator = generator_for(seed)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    owners = dict(module.named_modules(remove_duplicate=False))
    state: dict[str, Tensor] = {}
    drawn: dict[tuple[int, torch.Size], Tensor] = {}
    for key, tensor in module.state_dict().items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or _is_mask(buffers.get(key)):
            state[key] = tensor.clone() if isinstance(tensor, Tensor) else tensor
            continue
        place = (tensor.data_ptr(), tensor.shape)  # tied parameters stay tied
        if place not in drawn:
            path, _, name = key.rpartition(".")
            offset = _offset(family, seed, "bias", tensor.dtype, largest)
            values = _state_tensor(owners.get(path), name, tensor, generator, offset, family)
            drawn[place] = values.to(tensor.dtype).to(tensor.device)
        state[key] = drawn[place]
    return state


def _is_mask(buffer: Tensor | None) -> bool:
    """Whether a buffer holds zeros and one other number, as the causal mask `tril(ones)` does.

    With random numbers in it, nothing would equal zero, and the reference itself would mask nothing.
    """
    if buffer is None or buffer.device.type == "meta":
        return False
    values = buffer.detach().unique()
    return values.numel() == 2 and bool((values == 0).any())


def input_family(family: Family, seed: int, has_bias: bool = True) -> Family:
    """The family of the inputs: a large offset is in the producers' bias at even seeds, else in the inputs.

    A large mean of the input gives every channel a different large mean, so a group of channels a large spread.
    """
    return "normal" if family == "large offset" and has_bias and seed % 2 == 0 else family


def tensors_for(
    chain: Chain,
    input_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    family: Family = "normal",
    layout: Layout = "contiguous",
) -> tuple[Tensor, ...]:
    """One tensor per slot of a chain whose input has the shape `input_shape`."""
    conv = chain.producer
    channels = conv.out_channels if conv else input_shape[1]
    space = conv.output_space(tuple(input_shape[2:])) if conv else tuple(input_shape[2:])
    shapes: dict[Role, Sequence[int]] = {
        "input": input_shape,
        "weight": _weight_shape(conv) if conv else (),
        "full": (input_shape[0], channels, *space),
        "row": (input_shape[0], channels, *[1] * chain.dims),
        "one": (1,),
    }
    rows = {
        slot.index: (channels, *space)[-step.axes :]
        for step in chain.steps
        if isinstance(step, Normalize) and step.axes
        for slot in (step.weight, step.bias)
        if slot is not None
    }
    slots = [(rows.get(index, shapes.get(role, (channels,))), dtype) for index, role in enumerate(chain.roles)]
    values = _slot_values(chain, slots, seed, family, device)
    is_last = layout == "channels_last" and chain.dims > 0
    large = [role in ("input", "full") and is_last for role in chain.roles]
    return tuple(_place(one, is_large, device) for one, is_large in zip(values, large, strict=True))


def tensors_like(
    chain: Chain, tensors: Sequence[Tensor], seed: int = 0, family: Family | None = None, weight: Tensor | None = None
) -> tuple[Tensor, ...]:
    """New values for a chain's tensors, with their shapes, dtypes, devices and strides; varied by seed. A `weight` that
    is given is taken as it is."""
    slots = [(tensor.shape, tensor.dtype) for tensor in tensors]
    values = _slot_values(chain, slots, seed, family or PLAIN[seed % len(PLAIN)], tensors[0].device, weight)
    return tuple(new if new is weight else laid_out_like(new, old) for new, old in zip(values, tensors, strict=True))


def chain_points(
    chain: Chain,
    input_shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seeds: int = 5,
    layout: Layout = "contiguous",
) -> Iterator[ChainPoint]:
    """The points that a chain is judged by, one at a time: `families(seeds)`."""
    for seed, family in enumerate(families(seeds)):
        yield ChainPoint(tensors_for(chain, input_shape, dtype, device, seed, family, layout), family)


def families(seeds: int) -> tuple[Family, ...]:
    """`seeds` hierarchical points with each other plain family among them, then `seeds` of large offset.

    Independent noise may average out to a nearly constant truth; such points are refused, so they are extra.
    """
    plain: list[Family] = ["hierarchical"] * seeds
    for place, family in enumerate(family for family in PLAIN if family != "hierarchical"):
        plain.insert(2 * place + 1, family)
    offset: list[Family] = ["large offset"] * seeds
    return (*plain, *offset)


def slots_of_gamma(chain: Chain) -> tuple[Slot, ...]:
    return tuple(step.weight for step in chain.steps if isinstance(step, Normalize) and step.weight is not None)


def _slots_of_variance(chain: Chain) -> set[int]:
    norms = [step for step in chain.steps if isinstance(step, Pointwise) and step.op == "batch_norm"]
    moved = [step.running[1] for step in chain.steps if isinstance(step, Normalize) and step.running is not None]
    return {slot.index for slot in (*(step.operands[2] for step in norms), *moved) if isinstance(slot, Slot)}


def _slot_values(
    chain: Chain,
    slots: Sequence[tuple[Sequence[int], torch.dtype]],
    seed: int,
    family: Family,
    device: torch.device | str,
    weight: Tensor | None = None,
) -> list[Tensor]:
    generator = generator_for(seed, device)
    has_bias = chain.producer is not None and chain.producer.has_bias
    transposed = chain.producer is not None and chain.producer.transposed
    gammas, variances = {slot.index for slot in slots_of_gamma(chain)}, _slots_of_variance(chain)
    found = []
    for index, (role, (shape, dtype)) in enumerate(zip(chain.roles, slots, strict=True)):
        if role == "weight" and weight is not None:
            values = weight
        elif role == "input":
            values = draw(shape, input_family(family, seed, has_bias), generator, dtype)
        elif role == "weight":
            values = _fan_in_scaled(shape, transposed, generator)
        elif dtype == torch.bool:  # a mask: almost every other number would be true
            values = uniform(shape, generator) < 0.5
        elif role == "full":
            values = draw(shape, "hierarchical", generator, dtype)
        elif index in gammas:
            values = _gamma(shape, generator)
        else:
            values = normal(shape, generator) + _offset(family, seed, role, dtype)
            if index in variances:
                values = 0.5 + values.square()
        found.append(values.to(dtype))
    return found


def _offset(family: Family, seed: int, role: str, dtype: torch.dtype, largest: float = LARGEST_OFFSET) -> float:
    in_bias = role == "bias" and family == "large offset" and input_family(family, seed) != family
    return offset_for(torch.finfo(dtype).eps, largest) if in_bias else 0.0


def producer_biases(module: nn.Module) -> set[str]:
    """The names of the biases of convolutions and linear layers in the state."""
    parts = module.named_modules(remove_duplicate=False)
    biased = {path for path, part in parts if isinstance(part, _PRODUCERS) and part.bias is not None}
    return {f"{path}.bias".removeprefix(".") for path in biased}


def _state_tensor(
    owner: nn.Module | None, name: str, tensor: Tensor, generator: torch.Generator, offset: float, family: Family
) -> Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if name == "running_var":
        return 0.5 + noise.square()
    if isinstance(owner, _PRODUCERS) and name == "weight":
        return _fan_in_scaled(tensor.shape, getattr(owner, "transposed", False), generator)
    if isinstance(owner, _PRODUCERS) and name == "bias":
        return (SMALL * noise if family == "small" else noise) + offset
    if isinstance(owner, _NORMS) and name == "weight":
        return _gamma(tensor.shape, generator)
    if isinstance(owner, _NORMS):
        return noise
    return tensor.detach().float().cpu() + PARAMETER_SPREAD * noise


def _gamma(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Around ±1, about a third negative, never near 0."""
    size = 0.5 + uniform(shape, generator)
    return torch.where(uniform(shape, generator) < 0.35, -size, size)


def _fan_in_scaled(shape: Sequence[int], transposed: bool, generator: torch.Generator) -> Tensor:
    fan_in = math.prod(shape[2:]) * shape[0 if transposed else 1]
    return normal(shape, generator).div_(math.sqrt(fan_in))  # in place: fresh memory is the slow part


def _weight_shape(conv: Convolution) -> tuple[int, ...]:
    first, second = (conv.in_channels, conv.out_channels) if conv.transposed else (conv.out_channels, conv.in_channels)
    return (first, second // conv.groups, *conv.kernel)


def _place(values: Tensor, channels_last: bool, device: torch.device | str) -> Tensor:
    if channels_last:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        values = values.contiguous(memory_format=formats[values.dim()])
    return values.to(device)
