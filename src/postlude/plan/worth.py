"""Whether our convolution is worth its launches, by the rates and crossovers of the card at hand."""

from __future__ import annotations

import math

from postlude.cards import Card
from postlude.chain import Chain
from postlude.plan.barriers import fused_pool, has_norm, row_norm
from postlude.plan.channels import takes_channels
from postlude.plan.gemm import Gemm
from postlude.plan.problem import Problem, body_bytes, body_dtype, fp32_mode

_FEW = 16  # with fewer input channels cuDNN's tensor cores multiply padding too, so bytes count, not operations


def has_moments_apart(gemm: Gemm) -> bool:
    """Whether moments cost less in a separate pass over the value than in the epilogue.

    A short product does not hide the cost of moments on a wide tile: conv2d(64→128, k3) at 128×64×128² in TF32 takes
    0.72 ms without them and 1.10 with them; another pass takes 0.25.
    """
    steps = gemm.depth // gemm.block_k
    return gemm.phases is None and gemm.arithmetic.planes == 1 and gemm.columns >= 128 and steps <= 12


def pytorch_seconds(chain: Chain, problem: Problem, card: Card) -> float:
    """An estimate of the time of PyTorch's convolution, from its operations."""
    conv = chain.producer
    if conv is None:
        return 0.0
    return conv.flops(problem.x.shape[0], problem.x.shape[2:]) / card.rates.library[_mode(chain, problem)]


def _mode(chain: Chain, problem: Problem) -> str:
    return fp32_mode(chain, problem) if body_dtype(chain, problem) in ("float32", "float64") else "16 bits"


def slower(
    chain: Chain, problem: Problem, card: Card, gemm: Gemm, in_place: bool, brings_gradients: bool
) -> str | None:
    """Why PyTorch's convolution is expected to be faster; None if ours is.

    In training with our gradients, ours is faster: conv2d(64→128) → relu → add at 128×64×128² in TF32 takes 4.6 ms,
    10.8 with PyTorch, 8.1 with torch.compile.
    """
    crossovers = card.crossovers
    conv = chain.convolution
    if gemm.arithmetic.is_exact:
        return "PyTorch is faster in float64"
    mode = _mode(chain, problem)
    is_few = conv.in_channels < _FEW
    if gemm.volume.has_residues and (is_few or mode == "16 bits"):
        where = f"with fewer than {_FEW} channels" if is_few else f"in {mode}"
        return f"Postlude's strided convolution has not been measured {where}"
    is_small = conv.flops(problem.x.shape[0], problem.x.shape[2:]) < crossovers.packing[mode]
    if is_small and not (is_few and body_bytes(chain, problem) >= crossovers.reading):
        return "the convolution is too small for packing its operands to pay"
    # cuDNN converts an input that is not channels-last, which costs as much as our packing. In training ours is packed
    # once for both gradients (64→64 at 64³, channels-last: a step takes 1.11 ms, 1.19 with cuDNN).
    converts = problem.needs_grad or problem.x.layout == "contiguous"
    few = conv.in_channels <= crossovers.trained_channels if converts else conv.in_channels + conv.out_channels <= 64
    if mode == "16 bits" and not few and not in_place:
        return "cuDNN is faster from this many channels on"
    if in_place and conv.in_channels > crossovers.trained_channels and body_bytes(chain, problem) < crossovers.reading:
        return "cuDNN is as fast from this many channels on, and reading so small a result again costs little"
    # Two planes cost three 16-bit products. They gain nothing on a card whose tensor cores are not three times as fast.
    if card.rates.product / gemm.arithmetic.products <= card.rates.library[mode]:
        return f"it reaches more operations per second in {mode} on this card"
    is_estimated = gemm.arithmetic.keeps_infinities or row_norm(chain) is not None
    if gemm.volume.has_residues or (is_estimated and not brings_gradients):
        ours, theirs = _seconds(chain, problem, card, gemm)
        after = "" if _is_followed(chain, problem) else " and a pass after it"
        if ours >= theirs:
            expected = f"about {ours * 1e3:.2g} ms are expected of Postlude's convolution"
            return f"{expected}, {theirs * 1e3:.2g} of PyTorch's{after}"
    return None


def _is_followed(chain: Chain, problem: Problem) -> bool:
    """Whether the same pass follows the convolution, whether it is ours or PyTorch's."""
    if has_norm(chain):
        return row_norm(chain) is not None
    return problem.needs_grad or takes_channels(chain, problem) or fused_pool(chain) is not None


def _seconds(chain: Chain, problem: Problem, card: Card, gemm: Gemm) -> tuple[float, float]:
    """Estimates for a chain without a norm: with our convolution, and with PyTorch's and a pass after it.

    Before a layer_norm, a pool or a reduction over channels, and in training, the same pass follows either, so it is
    not counted. Before a layer_norm a row must be contiguous, but in 3-D (except in fp32) cuDNN's result is
    channels-last: the conversion is counted against PyTorch.
    """
    rates = card.rates
    conv, x, out = chain.convolution, problem.x, body_bytes(chain, problem)
    flops, arithmetic = conv.flops(x.shape[0], x.shape[2:]), gemm.arithmetic
    rate = rates.library[_mode(chain, problem)]
    if conv.in_channels < _FEW and arithmetic.planes == 1:
        rate *= conv.in_channels / _FEW
    elif conv.in_channels < _FEW and conv.transposed:
        # In fp32 conv_transpose3d(3→16, k3, s2) at 128×3×16×32² takes 10 ms on an H200: 0.5 TFLOP/s.
        rate *= (conv.in_channels / _FEW) ** 2
    if arithmetic.planes == 1:
        rate *= rates.library_flat if conv.dims == 2 else 1.0
        rate *= rates.library_last if x.layout == "channels_last" else 1.0
    theirs = max(flops / rate, (x.bytes + out) / rates.copy)
    turns = x.layout == "channels_last" or (conv.dims == 3 and arithmetic.planes == 1)
    if not _is_followed(chain, problem) or (row_norm(chain) is not None and turns):
        theirs += 2 * out / rates.copy
    # An element in shared memory is used once for each row or column on the other side, so small tiles are
    # memory-bound.
    reuse = gemm.rows * gemm.block_c / (gemm.rows + gemm.block_c) * arithmetic.products / arithmetic.planes
    products = flops * arithmetic.products * gemm.depth / (conv.in_channels * math.prod(conv.kernel))
    packed = gemm.packed_bytes(x.shape[0])
    rate = min(rates.product, reuse * rates.cache * dict(rates.short_steps)[gemm.block_k])
    product = max(products / rate, (packed + out) / rates.copy)
    return product + ((1 + arithmetic.scaled) * x.bytes + packed) / rates.copy, theirs
