"""Wrong kernels that somebody really wrote or nearly wrote, as implementations of the two named chains.

Each takes one tensor per slot and returns a tensor: (x, weight, γ, β) for chain 61, (x, weight, bias, γ, β)
for chain 23. The verifier must reject all of them and accept the honest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.chain import Chain, Convolution, Normalize, Pointwise, Reduce, Slot, Value

GROUPS = 2
EPS = 1e-5
INPUT_SHAPE = (3, 4, 5, 6, 7)
Implementation = Callable[[Sequence[Tensor]], Tensor]


def _convolution(transposed: bool, has_bias: bool) -> Convolution:
    ones, zeros = (1, 1, 1), (0, 0, 0)
    return Convolution(transposed, 4, 8, (3, 3, 3), ones, zeros, ones, zeros, has_bias=has_bias)


CHAIN_61 = Chain(
    3,
    _convolution(transposed=True, has_bias=False),
    (Pointwise("relu", (Value(0),)), Normalize("group_norm", Value(1), GROUPS, EPS, Slot(2), Slot(3))),
    ("input", "weight", "channel", "channel"),
)
CHAIN_23 = Chain(
    3,
    _convolution(transposed=False, has_bias=True),
    (Normalize("group_norm", Value(0), GROUPS, EPS, Slot(3), Slot(4)), Reduce("mean", Value(1), "sample")),
    ("input", "weight", "bias", "channel", "channel"),
)


@dataclass(frozen=True)
class Mutant:
    mistake: int  # its number in the list of mistakes
    name: str
    chain: Chain
    run: Implementation


def standardise(y: Tensor, axes: Sequence[int]) -> Tensor:
    """Zero mean and unit variance over `axes` of (N, groups, channels per group, D, H, W), in two passes."""
    centred = y - y.mean(axes, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + EPS)


def grouped(y: Tensor) -> Tensor:
    return y.reshape(y.shape[0], GROUPS, -1, *y.shape[2:])


def affine(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return y * gamma.view(-1, 1, 1, 1) + beta.view(-1, 1, 1, 1)


def normalise(y: Tensor, gamma: Tensor, beta: Tensor, axes: Sequence[int] = (2, 3, 4, 5)) -> Tensor:
    return affine(standardise(grouped(y), axes).reshape(y.shape), gamma, beta)


def honest_61(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    return normalise(F.conv_transpose3d(x, weight).relu(), gamma, beta)


def honest_23(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gamma, beta = tensors
    return normalise(F.conv3d(x, weight, bias), gamma, beta).mean((1, 2, 3, 4))


def statistics_per_position(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    return normalise(F.conv_transpose3d(x, weight).relu(), gamma, beta, axes=(2,))


def statistics_over_batch_61(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    return normalise(F.conv_transpose3d(x, weight).relu(), gamma, beta, axes=(0, 2, 3, 4, 5))


def statistics_over_batch_23(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gamma, beta = tensors
    return normalise(F.conv3d(x, weight, bias), gamma, beta, axes=(0, 2, 3, 4, 5)).mean((1, 2, 3, 4))


def output_as_large_as_input(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    return normalise(F.conv_transpose3d(x, weight, padding=1).relu(), gamma, beta)


def weight_as_out_in(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    misread = weight.reshape(weight.shape[1], weight.shape[0], 3, 3, 3).transpose(0, 1)
    return normalise(F.conv_transpose3d(x, misread).relu(), gamma, beta)


def index_of_a_convolution(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    # A convolution of the padded input walks the taps forwards; the transposed one walks them backwards.
    y = F.conv3d(x, weight.transpose(0, 1), padding=2)
    return normalise(y.relu(), gamma, beta)


def _per_group(vector: Tensor) -> Tensor:
    return vector[:GROUPS].repeat_interleave(vector.numel() // GROUPS)


def affine_per_group_61(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    return honest_61((x, weight, _per_group(gamma), _per_group(beta)))


def affine_per_group_23(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gamma, beta = tensors
    return honest_23((x, weight, bias, _per_group(gamma), _per_group(beta)))


def affine_left_out_61(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    return honest_61((x, weight, torch.ones_like(gamma), torch.zeros_like(beta)))


def affine_left_out_23(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gamma, beta = tensors
    return honest_23((x, weight, bias, torch.ones_like(gamma), torch.zeros_like(beta)))


def mean_before_norm(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, _, _ = tensors
    return F.conv3d(x, weight, bias).mean((1, 2, 3, 4))


def mean_before_affine(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gamma, beta = tensors
    y = F.conv3d(x, weight, bias)
    mean = standardise(grouped(y), (2, 3, 4, 5)).reshape(y.shape).mean((1, 2, 3, 4))
    return mean * gamma.mean() + beta.mean()


def mean_of_beta(tensors: Sequence[Tensor]) -> Tensor:
    x, beta = tensors[0], tensors[4]
    return beta.mean().expand(x.shape[0]).clone()


def squares_minus_square(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gamma, beta = tensors
    y = F.conv3d(x, weight, bias)
    parts, axes = grouped(y), (2, 3, 4, 5)
    mean = parts.mean(axes, keepdim=True)
    variance = (parts.square().mean(axes, keepdim=True) - mean.square()).clamp(min=0)
    return affine(((parts - mean) * torch.rsqrt(variance + EPS)).reshape(y.shape), gamma, beta).mean((1, 2, 3, 4))


def first_256_positions(tensors: Sequence[Tensor]) -> Tensor:
    right = honest_61(tensors)
    result = torch.empty_like(right)
    result.flatten(2)[..., :256] = right.flatten(2)[..., :256]
    return result


class SumIntoDirtyBuffer:
    """Adds its sums to a buffer that it never clears: right once, wrong from then on."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        right = honest_23(tensors)
        if self.buffer is None or self.buffer.dtype != right.dtype:
            self.buffer = torch.zeros_like(right)
        self.buffer += right
        return self.buffer.clone()


class LostUpdates:
    """A race: now and then a block's contribution to the mean is lost."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        self.calls += 1
        right = honest_23(tensors)
        return right * 0.97 if self.calls == 2 else right


def relu_drops_nan(tensors: Sequence[Tensor]) -> Tensor:
    x, weight, gamma, beta = tensors
    y = F.conv_transpose3d(x, weight)
    return normalise(torch.where(y > 0, y, torch.zeros_like(y)), gamma, beta)


MUTANTS = (
    Mutant(1, "statistics per position", CHAIN_61, statistics_per_position),
    Mutant(2, "statistics over the batch (61)", CHAIN_61, statistics_over_batch_61),
    Mutant(2, "statistics over the batch (23)", CHAIN_23, statistics_over_batch_23),
    Mutant(3, "output as large as the input", CHAIN_61, output_as_large_as_input),
    Mutant(4, "weight read as (out, in)", CHAIN_61, weight_as_out_in),
    Mutant(5, "input index of a convolution", CHAIN_61, index_of_a_convolution),
    Mutant(6, "γ and β per group (61)", CHAIN_61, affine_per_group_61),
    Mutant(6, "γ and β per group (23)", CHAIN_23, affine_per_group_23),
    Mutant(6, "γ and β left out (61)", CHAIN_61, affine_left_out_61),
    Mutant(6, "γ and β left out (23)", CHAIN_23, affine_left_out_23),
    Mutant(7, "mean of the un-normalised values", CHAIN_23, mean_before_norm),
    Mutant(7, "mean before γ and β", CHAIN_23, mean_before_affine),
    Mutant(8, "mean(β)", CHAIN_23, mean_of_beta),
    Mutant(9, "E[x²] − E[x]²", CHAIN_23, squares_minus_square),
    Mutant(10, "only the first 256 positions", CHAIN_61, first_256_positions),
    Mutant(10, "sums into a dirty buffer", CHAIN_23, SumIntoDirtyBuffer()),
    Mutant(10, "lost updates", CHAIN_23, LostUpdates()),
    Mutant(11, "a ReLU that turns NaN into 0", CHAIN_61, relu_drops_nan),
)
HONEST = ((CHAIN_61, honest_61), (CHAIN_23, honest_23))
