"""A convolution of 1 to 4 input channels that keeps only moments: one launch of kernels/cuda/few_channels.cu."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postlude.plan.few_channels import FewChannels, Geometry, shared_bytes, tile_slots
from postlude.stages.cuts import Partials
from postlude.stages.trace import launch_cuda


def convolve_moments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int, int],
    settings: FewChannels,
    transposed: bool = False,
) -> Partials:
    """Means and squared deviations [N, C_OUT, TILES] and counts [N, TILES] of convolution + bias.

    x is [N, C_IN, D, H, W] with any strides; weight is [C_OUT, C_IN, KD, KH, KW], or [C_IN, C_OUT, ...] if
    `transposed`; in 2-D without D and KD. A transposed convolution is run as the equivalent ordinary one, whose padding
    `padding` is. All tensors have one dtype: fp32, or that of the tensor cores' operands.
    """
    if x.dim() == 4:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    shape, out = geometry_of(x, weight, bias, padding, transposed)
    along = settings.tiles(out)
    batch, tiles = x.shape[0], math.prod(along)
    units = units_of(x, batch * tiles)
    mean, m2 = (torch.empty((batch, shape.cout, tiles), dtype=torch.float32, device=x.device) for _ in range(2))
    count = torch.empty((batch, tiles), dtype=torch.float32, device=x.device)
    given = {} if bias is None else {"bias": bias.contiguous()}
    launch_cuda(
        "few_channels.cu",
        "few_channels_moments",
        {
            **common_macros(settings, shape),
            **tensor_macros(x, weight, transposed, along),
            "HAS_BIAS": int(bias is not None),
            "TILE_SLOTS": tile_slots(settings, shape),
            "SHARED_BYTES": shared_bytes(settings, shape),
        },
        (min(units, settings.programs) if settings.programs else units, shape.channel_blocks),
        settings.warps * 32,
        {"x": x, "weight": weight, **given, "means": mean, "squares": m2, "counts": count},
        (units, 0),
    )
    return Partials(mean, m2, count)


def units_of(x: Tensor, units: int) -> int:
    if units >= 1 << 31:
        raise ValueError(f"an input of {tuple(x.shape)} is too large for this kernel")
    return units


def common_macros(settings: FewChannels, shape: Geometry) -> dict[str, int]:
    """The macros that both kernels for few channels take."""
    _check(settings, shape)
    return {
        "C_IN": shape.cin,
        "C_OUT": shape.cout,
        "NFRAG": shape.fragments,
        **dict(zip(("KD", "KH", "KW"), shape.kernel)),
        **dict(zip(("PD", "PH", "PW"), shape.padding)),
        "IS_FLIPPED": int(shape.flip),
        "INPUT_BITS": 32 if shape.dtype == "float32" else 16,
        "IS_BFLOAT": int(settings.operand == "bfloat16"),
        "PLANES": settings.planes,
        "BLOCK_D": settings.depth,
        "BLOCK_H": settings.height,
        "ROWS_PER_WARP": settings.rows,
        "WARPS": settings.warps,
        "BLOCKS_PER_SM": settings.blocks,
    }


def _check(settings: FewChannels, shape: Geometry) -> None:
    taps = all(1 <= k <= 4 and 0 <= p < k for k, p in zip(shape.kernel, shape.padding))
    if not (1 <= shape.cin <= 4 and taps):
        raise ValueError(f"{shape} is not for this kernel: 1 to 4 channels, 1 to 4 taps a side, padded by fewer")
    if shape.dtype != "float32" and (shape.dtype, settings.planes) != (settings.operand, 1):
        raise ValueError(f"{shape.dtype} input goes into one plane of {shape.dtype}, not {settings}")
    if settings.operand == "bfloat16" and settings.planes != 1:
        raise ValueError("two planes of bfloat16 are less than fp32")
    if settings.height % settings.rows or settings.warps < 2:
        raise ValueError(f"{settings}: the rows must divide the height, and there must be two warps")


def tensor_macros(x: Tensor, weight: Tensor, transposed: bool, tiles: tuple[int, int, int]) -> dict[str, int]:
    """Sizes, strides, and tiles per sample along each axis. As constants they halve the instructions of staging."""
    first, second, *taps = weight.stride()
    of_weight = (second, first, *taps) if transposed else (first, second, *taps)
    return {
        **dict(zip("DHW", x.shape[2:])),
        **{f"X_{axis}": stride for axis, stride in zip("NCDHW", x.stride())},
        **{f"W_{axis}": stride for axis, stride in zip("OCDHW", of_weight)},
        **{f"TILES_{axis}": count for axis, count in zip("DHW", tiles)},
    }


def geometry_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int, int], transposed: bool
) -> tuple[Geometry, tuple[int, int, int]]:
    """The geometry that the kernel is compiled for, and the size of the output."""
    cout, cin = weight.shape[1::-1] if transposed else weight.shape[:2]
    kd, kh, kw = weight.shape[2:]
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype) or x.shape[1] != cin:
        raise ValueError("input, weight and bias must be of one dtype, and the weight for the input's channels")
    shape = Geometry(cin, cout, (kd, kh, kw), padding, transposed, str(x.dtype).removeprefix("torch."))
    out = shape.output(x.shape[2:])
    if math.prod(x.shape[1:]) >= 1 << 30 or min(*out, x.shape[0]) < 1:  # offsets within a sample have 32 bits
        raise ValueError(f"an input of {tuple(x.shape)} is empty or too large for this kernel")
    return shape, out
