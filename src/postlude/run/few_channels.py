"""A convolution of 1 to 4 input channels that keeps only moments: one launch of kernels/cuda/few_channels.cu."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.hardware import machine_for
from postlude.plan import Plan
from postlude.plan.few_channels import FewChannels, Geometry, shared_bytes
from postlude.plan.gemm import volume_for
from postlude.run import nvrtc
from postlude.run.library import cast_for_convolution
from postlude.run.passes import Partials
from postlude.run.recording import recording

_ARGUMENTS = 27


class FewChannelsConvolution:
    """The first pass of a chain that needs only the convolution's moments."""

    def __init__(self, plan: Plan, settings: FewChannels) -> None:
        conv = plan.chain.producer
        assert conv is not None
        volume = volume_for(conv, plan.input.shape[2:], 1)
        self.settings, self.padding, self.transposed = settings, volume.padding, conv.transposed
        self.chain, self.has_bias, self.dims = plan.chain, conv.has_bias, plan.chain.dims
        self.chunks = math.prod(settings.tiles(volume.out))
        self.ready: dict[tuple[Any, ...], Ready] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[None, Partials]:
        x, weight, *more = cast_for_convolution(self.chain, tensors)
        bias = more[0] if self.has_bias else None
        if self.dims == 2:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        key = (x.device.index, x.stride(), weight.stride())
        ready = self.ready.get(key)
        if ready is None:
            ready = self.ready[key] = Ready(x, weight, bias, self.padding, self.settings, self.transposed)
        return None, Partials(*ready(x, weight, bias))


def defines(settings: FewChannels, shape: Geometry) -> tuple[str, ...]:
    """The compiler's options that make this kernel of the source."""
    return options_of(all_defines(settings, shape))


def all_defines(settings: FewChannels, shape: Geometry) -> dict[str, int]:
    return {**common_defines(settings, shape), "SHARED_BYTES": shared_bytes(settings, shape)}


def options_of(values: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in values.items())


def common_defines(settings: FewChannels, shape: Geometry) -> dict[str, int]:
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


@functools.cache
def source(name: str = "few_channels.cu") -> nvrtc.Source:
    return nvrtc.read_source(Path(str(resources.files("postlude.kernels") / "cuda")), name)


@functools.cache
def _kernel(settings: FewChannels, shape: Geometry, device: int) -> nvrtc.Kernel:
    options = (f"--gpu-architecture={machine_for(f'cuda:{device}').card.architecture}", *defines(settings, shape))
    shared = shared_bytes(settings, shape)
    return nvrtc.load(source(), "few_channels_moments", options, device, shared, _ARGUMENTS)


class Ready:
    """The kernel, compiled and with every argument but the pointers, for tensors of these shapes and strides."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, int, int],
        settings: FewChannels,
        transposed: bool,
    ) -> None:
        shape, out = geometry_of(x, weight, bias, padding, transposed)
        batch, (deep, high, per_row) = x.shape[0], settings.tiles(out)
        per_plane = high * per_row
        tiles = deep * per_plane
        units = batch * tiles
        if units >= 1 << 31:
            raise ValueError(f"an input of {tuple(x.shape)} is too large for this kernel")
        self.macros = all_defines(settings, shape)
        self.load = functools.partial(_kernel, settings, shape)  # onto a device
        self.kernel = None if x.is_meta else self.load(x.device.index or 0)
        self.shape, self.counts, self.threads = (2, batch, shape.cout, tiles), (batch, tiles), settings.warps * 32
        w_strides = weight_strides(weight, transposed)
        self.grid = (min(units, settings.programs) if settings.programs else units, shape.channel_blocks)
        self.sizes = (units, tiles, per_plane, per_row, *out, *x.stride(), *x.shape[2:], *w_strides, 0)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        bias = bias if bias is None else bias.contiguous()
        mean, m2 = torch.empty(self.shape, dtype=torch.float32, device=x.device)
        count = torch.empty(self.counts, dtype=torch.float32, device=x.device)
        if self.kernel is None:
            assert recording.active is not None
            tensors = (x, weight, bias, mean, m2, count)
            recording.active.cuda("few_channels.cu", "few_channels_moments", self, tensors)
            return mean, m2, count
        pointers = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr())
        results = (mean.data_ptr(), m2.data_ptr(), count.data_ptr())
        self.kernel.launch(self.grid, self.threads, (*pointers, *results, *self.sizes))
        return mean, m2, count


def convolve_moments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int, int],
    settings: FewChannels,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """[N, COUT, TILES] means and squared distances from them, and [N, TILES] counts, of convolution + bias.

    x is [N, CIN, D, H, W] in any strides, weight [COUT, CIN, KD, KH, KW] or, where `transposed`, [CIN, COUT, ...];
    the padding is that of the equivalent convolution that gathers. All of one dtype: fp32, or the operands'.
    """
    return Ready(x, weight, bias, padding, settings, transposed)(x, weight, bias)


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
