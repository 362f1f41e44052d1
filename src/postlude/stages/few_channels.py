"""A convolution of 1 to 4 input channels that keeps only moments: one launch of kernels/cuda/few_channels.cu."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from postlude.plan.few_channels import FewChannels, Geometry, shared_bytes
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
    """[N, COUT, TILES] means and squared distances from them, and [N, TILES] counts, of convolution + bias.

    x is [N, CIN, D, H, W] in any strides, weight [COUT, CIN, KD, KH, KW] or, where `transposed`, [CIN, COUT, ...];
    without D and KD in 2-D. The padding is that of the equivalent convolution that gathers. All of one dtype: fp32, or
    the operands'.
    """
    if x.dim() == 4:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    shape, out = geometry_of(x, weight, bias, padding, transposed)
    batch, (deep, high, per_row) = x.shape[0], settings.tiles(out)
    per_plane = high * per_row
    tiles = deep * per_plane
    units = units_of(x, batch * tiles)
    mean, m2 = (torch.empty((batch, shape.cout, tiles), dtype=torch.float32, device=x.device) for _ in "mm")
    count = torch.empty((batch, tiles), dtype=torch.float32, device=x.device)
    launch_cuda(
        "few_channels.cu",
        "few_channels_moments",
        {**common_macros(settings, shape), "SHARED_BYTES": shared_bytes(settings, shape)},
        (min(units, settings.programs) if settings.programs else units, shape.channel_blocks),
        settings.warps * 32,
        [x, weight, None if bias is None else bias.contiguous(), mean, m2, count],
        (units, tiles, per_plane, per_row, *out, *x.stride(), *x.shape[2:], *weight_strides(weight, transposed), 0),
    )
    return Partials(mean, m2, count)


def units_of(x: Tensor, units: int) -> int:
    if units >= 1 << 31:
        raise ValueError(f"an input of {tuple(x.shape)} is too large for this kernel")
    return units


def common_macros(settings: FewChannels, shape: Geometry) -> dict[str, int]:
    """What the kernels of few channels have in common."""
    _check(settings, shape)
    return {
        "CIN": shape.cin,
        "COUT": shape.cout,
        "NFRAG": shape.fragments,
        **dict(zip(("KD", "KH", "KW"), shape.kernel)),
        **dict(zip(("PD", "PH", "PW"), shape.padding)),
        "FLIP": int(shape.flip),
        "INPUT_BITS": 32 if shape.dtype == "float32" else 16,
        "BFLOAT": int(settings.operand == "bfloat16"),
        "PLANES": settings.planes,
        "TD": settings.depth,
        "TH": settings.height,
        "R": settings.rows,
        "WARPS": settings.warps,
        "BLOCKS": settings.blocks,
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


def weight_strides(weight: Tensor, transposed: bool) -> tuple[int, ...]:
    """Of the output's channels, the input's, and the taps."""
    first, second, *taps = weight.stride()
    return (second, first, *taps) if transposed else (first, second, *taps)


def geometry_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int, int], transposed: bool
) -> tuple[Geometry, tuple[int, int, int]]:
    """And the size of the output."""
    cout, cin = weight.shape[1::-1] if transposed else weight.shape[:2]
    kd, kh, kw = weight.shape[2:]
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype) or x.shape[1] != cin:
        raise ValueError("input, weight and bias must be of one dtype, and the weight for the input's channels")
    d, h, w = (size + 2 * pad - taps + 1 for size, pad, taps in zip(x.shape[2:], padding, (kd, kh, kw)))
    out = (d, h, w)
    if math.prod(x.shape[1:]) >= 1 << 30 or min(*out, x.shape[0]) < 1:  # offsets in a sample are 32 bits wide
        raise ValueError(f"an input of {tuple(x.shape)} is empty or too large for this kernel")
    return Geometry(cin, cout, (kd, kh, kw), padding, transposed, str(x.dtype).removeprefix("torch.")), out
