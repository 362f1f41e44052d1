"""Random tensors, from the families of distributions that points use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Family = Literal["uniform", "normal", "hierarchical", "large offset", "heavy-tailed", "sparse", "small"]
LARGEST_OFFSET = 300.0
TAIL = 100.0
# A standard deviation whose square is about a norm's eps, so that a wrong eps shows in every precision.
SMALL = 3e-3
DENSITY = 0.1  # share of nonzero values in a sparse tensor


def generator_for(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on the device if it has one, else on the CPU."""
    kind = torch.device(device)
    return torch.Generator(kind if kind.type == "cuda" else "cpu").manual_seed(seed)


def offset_for(eps: float, largest: float = LARGEST_OFFSET) -> float:
    """A mean that is large compared with a spread of 1, but not so large that a dtype with this eps loses that
    spread."""
    return min(largest, 0.05 / eps)


def draw(
    shape: Sequence[int],
    family: Family,
    generator: torch.Generator,
    dtype: torch.dtype,
    largest: float = LARGEST_OFFSET,
) -> Tensor:
    """A tensor from a family. With two or more axes, the first two are sample and channel."""
    noise = normal(shape, generator)
    if family == "uniform":
        return uniform(shape, generator).to(dtype)
    if family == "normal":
        return (1.5 * noise + 0.3).to(dtype)
    if family == "large offset":
        return (noise + offset_for(torch.finfo(dtype).eps, largest)).to(dtype)
    if family == "heavy-tailed":  # Student's t with three degrees of freedom
        chi = normal([3, *shape], generator).square_().mean(0)
        return (noise / chi.sqrt()).clamp(-TAIL, TAIL).to(dtype)
    if family == "sparse":
        return (3 * noise * (uniform(shape, generator) < DENSITY)).to(dtype)
    for axis in range(min(2, len(shape) - 1)):
        own = [size if place == axis else 1 for place, size in enumerate(shape)]
        noise.mul_(normal(own, generator).mul(0.5).exp())  # in place: fresh memory is the slow part
        noise.add_(normal(own, generator))
    if len(shape) > 2:
        noise.add_(normal([*shape[:2], *[1] * (len(shape) - 2)], generator))
    return (noise.mul_(SMALL) if family == "small" else noise).to(dtype)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(list(shape), generator=generator, device=generator.device)


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.rand(list(shape), generator=generator, device=generator.device)
