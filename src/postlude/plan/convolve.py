"""Who convolves on a GPU: our own kernel, in which arithmetic and tiles, or PyTorch's, and why."""

from __future__ import annotations

import dataclasses

from postlude.chain import Chain, Convolution
from postlude.hardware import Machine
from postlude.plan.few_channels import FewChannels, few_channels_for
from postlude.plan.gemm import Arithmetic, Gemm, WeightGemm, input_gradient_of, unsupported, volume_for
from postlude.plan.problem import Problem, body_dtype, fp32_mode, power_of_two
from postlude.plan.program import has_norm, row_norm

# A packed position has a multiple of this many channels, so that a tile's rows begin where a descriptor may.
_CHANNEL_STEP = 16
_WEIGHT_PROGRAMS = 2  # programs of the weight's gradient for each multiprocessor
# Rows, neighbouring outputs, stages and warps of the product for the input's gradient, by planes, where 64 channels
# come out: 0.47 instead of 0.50 ms on chain 61 in one plane, 1.51 instead of 1.66 in two. It has no epilogue to hide.
_INPUT_GRADIENT = {1: (256, 2, 3, 8), 2: (128, 1, 2, 4)}
_COLUMNS = 128  # of a tile: neighbouring outputs fill up what their channels leave (see `width_for`)
# Below this many operations the packing launches cost more than a better convolution gains, by what PyTorch's takes.
_WORTH = {"fp32": 1e9, "tf32": 8e9, "16 bits": 20e9}
_PYTORCH = {"fp32": 16e12, "tf32": 100e12, "16 bits": 250e12}  # its operations a second on an H200, about


def own_convolution(
    chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool = False
) -> Gemm | FewChannels | str:
    """Our convolution for this chain, or why it is PyTorch's."""
    few = few_channels_for(chain, problem, machine)
    return gemm_for(chain, problem, machine, even_if_slower) if isinstance(few, str) else few


def gemm_for(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool = False) -> Gemm | str:
    conv = chain.producer
    if conv is None:
        return "there is no convolution"
    reason = unsupported(conv)
    if reason:
        return reason
    if row_norm(chain) is not None:
        return "before a layer_norm an infinity must stay in its row, which packed rows do not keep"
    arithmetic = arithmetic_for(chain, problem)
    if arithmetic is None:
        return "without a norm after it, an infinity in the input could not be kept"
    if not even_if_slower:
        reason = _slower(chain, problem, arithmetic)
        if reason:
            return reason
    # Neighbours in a row are multiplied by zeros, which an infinity does not survive: only a norm hides that.
    return product_for(conv, problem.x.shape[2:], arithmetic, machine, widens=has_norm(chain))


def product_for(
    conv: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine, widens: bool = True
) -> Gemm:
    """The matrix product of a convolution that `unsupported` says nothing against."""
    columns = min(_COLUMNS, max(16, power_of_two(conv.out_channels)))
    rows, block_c, stages, warps = _tile(arithmetic, columns, machine)
    channels = -(-conv.in_channels // _CHANNEL_STEP) * _CHANNEL_STEP
    volume = volume_for(conv, space, width_for(conv, block_c) if widens else 1)
    steps = (16,) if arithmetic.operands == "float64" else (64, 32, 16)
    block_k = next(k for k in steps if volume.span * channels % k == 0)
    return Gemm(arithmetic, volume, channels, rows, block_c, block_k, stages, warps)


def gradient_products(
    conv: Convolution, problem: Problem, own: Gemm | FewChannels, machine: Machine
) -> tuple[Gemm | None, WeightGemm | None]:
    """Our products for the gradients of input and weight where our convolution made the forward pass.

    Before Hopper the weight's does not fit the registers. With few channels only the weight's is ours: there cuDNN's
    takes 40 times as long as its convolution.
    """
    if machine.architecture != "sm_90" or max(conv.kernel[-2:]) > 3:
        return None, None
    is_few = isinstance(own, FewChannels)
    if is_few and (conv.dtype or problem.x.dtype) != "float32":
        return None, None
    arithmetic = Arithmetic("float16", own.planes, scaled=True) if isinstance(own, FewChannels) else own.arithmetic
    space = problem.x.shape[2:]
    if is_few:
        return None, weight_gemm_for(conv, space, arithmetic, machine)
    back = product_for(input_gradient_of(conv), conv.output_space(space), arithmetic, machine)
    if back.block_c == 64 and arithmetic.operands != "float64":
        rows, width, stages, warps = _INPUT_GRADIENT[arithmetic.planes]
        volume = dataclasses.replace(back.volume, width=min(width, back.volume.width))
        back = dataclasses.replace(back, rows=rows, volume=volume, stages=stages, warps=warps)
    return back, weight_gemm_for(conv, space, arithmetic, machine, back.volume.width)


def packs_gradient(dx: Gemm | None, dw: WeightGemm | None) -> bool:
    """Whether the last pass of the gradients writes what both products read, instead of the gradient itself.

    A scale would have to be known before the gradient is. Rows of 34 are read and written in pieces: 0.27 ms on chain
    61, 0.20 for the two passes; rows of 128 in 0.23 instead of 0.31 (2×32×128³).
    """
    return dx is not None and dw is not None and not dx.arithmetic.scaled and dx.volume.space[2] % 32 == 0


def arithmetic_for(chain: Chain, problem: Problem) -> Arithmetic | None:
    """Scaled planes turn an infinity into NaN, which only a norm does as well: without one there are none."""
    dtype = body_dtype(chain, problem)
    if dtype != "float32":
        return Arithmetic(dtype)
    if not has_norm(chain):
        return None
    return Arithmetic("float16", 1 if fp32_mode(chain, problem) == "tf32" else 2, scaled=True)


def width_for(conv: Convolution, block_c: int) -> int:
    """Neighbouring outputs of one row: as many as fill the tile's columns, at most 4; 1 where nothing is read twice."""
    return 1 if conv.kernel[-1] == 1 else min(4, _COLUMNS // block_c)


def _tile(arithmetic: Arithmetic, block_c: int, machine: Machine) -> tuple[int, int, int, int]:
    """Rows, channels, stages and warps. Measured on an H200 on chain 61 (docs/gpu.md); elsewhere the largest that do
    not spill, for there the operands of a product wait in registers."""
    if arithmetic.operands == "float64":
        return 32, min(32, block_c), 2, 4  # correctness only: no card is fast at it
    if machine.architecture != "sm_90":
        return (128, block_c, 3, 8) if arithmetic.planes == 1 else (64, block_c, 2, 8)
    # One plane, 96 KiB: two blocks an SM hide each other's epilogue. Two planes, 192 KiB: one block.
    return (128, block_c, 3, 4) if arithmetic.planes == 1 else (128, block_c, 3, 8)


def pytorch_seconds(chain: Chain, problem: Problem) -> float:
    """About what PyTorch's convolution takes on a card, by its operations."""
    conv = chain.producer
    if conv is None:
        return 0.0
    return conv.flops(problem.x.shape[0], problem.x.shape[2:]) / _PYTORCH[_mode(chain, problem)]


def _mode(chain: Chain, problem: Problem) -> str:
    return fp32_mode(chain, problem) if body_dtype(chain, problem) in ("float32", "float64") else "16 bits"


def _slower(chain: Chain, problem: Problem, arithmetic: Arithmetic) -> str | None:
    conv = chain.producer
    assert conv is not None
    if arithmetic.operands == "float64":
        return "float64 is faster through PyTorch"
    mode = _mode(chain, problem)
    if conv.in_channels < 8:
        return "with so few input channels most products would be with zeros"
    if conv.flops(problem.x.shape[0], problem.x.shape[2:]) < _WORTH[mode]:
        return "the convolution is too small for packing its operands to pay"
    # cuDNN converts what is not channels-last, which costs it as much as packing costs us. In training ours is packed
    # once for both gradients (64→64 at 64³, channels-last: a step of 1.11 ms, 1.19 through cuDNN).
    converts = problem.needs_grad or problem.x.layout == "contiguous"
    few = conv.in_channels <= 64 if converts else conv.in_channels + conv.out_channels <= 64
    if mode == "16 bits" and not few:
        return "cuDNN is faster from this many channels on"
    return None


def weight_gemm_for(
    conv: Convolution, space: tuple[int, ...], arithmetic: Arithmetic, machine: Machine, width: int = 1
) -> WeightGemm:
    """The product for the weight's gradient; the convolution must be one that `unsupported` says nothing against.

    `width` is that of the product for the input's gradient, so that both read the same packed gradient.
    """
    channels, out_channels = (
        -(-size // _CHANNEL_STEP) * _CHANNEL_STEP for size in (conv.in_channels, conv.out_channels)
    )
    is_exact = arithmetic.operands == "float64"
    # 32 output channels are half of the rows that a product has on Hopper.
    neighbours = 2 if out_channels == 32 and conv.kernel[-1] > 1 and not is_exact else 1
    volume = volume_for(conv, space, max(width, neighbours))
    shared = volume.kernel[2]
    rows, columns = min(128, max(16, power_of_two(conv.out_channels))), min(64, max(16, power_of_two(conv.in_channels)))
    if neighbours > 1:
        rows, columns = 64, min(256, power_of_two((neighbours - 1 + volume.kernel[2]) * channels))
        shared = volume.kernel[1] if arithmetic.planes == 1 and columns <= 128 and volume.kernel[1] <= 3 else 1
    if is_exact:
        rows, columns = min(rows, 32), min(columns, 32)
    stages = 2 if arithmetic.planes == 2 or is_exact or neighbours > 1 else 3
    warps = 4 if rows == 64 and columns < 256 else 8
    gemm = WeightGemm(
        *(arithmetic, volume, channels, out_channels, neighbours, shared, rows, columns),
        *(16 if is_exact else 64, 1, stages, warps),
    )
    tiles = gemm.groups * -(-gemm.result[0] // rows) * -(-gemm.result[1] // columns)
    return dataclasses.replace(gemm, splits=max(1, _WEIGHT_PROGRAMS * machine.threads // tiles))
