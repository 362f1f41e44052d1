"""The launches of our convolution by phase: its weight's packing, and the products."""

from __future__ import annotations

from typing import Any

from postlude.plan.gemm import Gemm
from postlude.plan.phases import Phases
from postlude.plan.problem import Spec
from postlude.run.launch import Launch, accumulator
from postlude.run.passes import accumulator_of, sizes_of

_WEIGHT_BLOCK = 1024  # elements of a packed weight at a time


def phased_weight_launch(gemm: Gemm, phases: Phases, columns: int, numbers: tuple[int, ...]) -> Launch:
    """Takes the weight, what it is packed to, the input's largest magnitudes and what undoes the scales."""
    from postlude.kernels.triton.phases import pack_phases_kernel

    constants = {
        **_axes("K", [axis.kernel for axis in phases.axes]),
        **_axes("S", [axis.stride for axis in phases.axes]),
        "CP": gemm.channels,
        "PLANES": gemm.arithmetic.planes,
        "SCALED": gemm.arithmetic.scaled,
        "KEEPS": gemm.arithmetic.keeps_infinities,
        "BLOCK": _WEIGHT_BLOCK,
    }
    return Launch(pack_phases_kernel, (columns,), numbers, constants)


def phased_launch(gemm: Gemm, phases: Phases, before: Any, value: Spec, store: str, moments: str) -> Launch:
    """Takes what the product of stride 1 takes (see gemm.py)."""
    from postlude.kernels.triton.phases import convolve_phases_kernel

    volume, (batch, channels, positions) = gemm.volume, sizes_of(value)
    blocks_c = -(-channels // gemm.block_c)
    out = [axis.out for axis in phases.axes]
    numbers = (channels, gemm.tiles, volume.sample_rows * volume.pitch, volume.pitch, volume.plane, *out)
    constants = {
        "BEFORE": before,
        **_axes("K", [axis.kernel for axis in phases.axes]),
        **_axes("S", [axis.stride for axis in phases.axes]),
        **_axes("P", [axis.padding for axis in phases.axes]),
        **_axes("F", phases.front),
        "C": gemm.channels,
        "PLANES": gemm.arithmetic.planes,
        "SCALED": gemm.arithmetic.scaled,
        "KEEPS": gemm.arithmetic.keeps_infinities,
        "STORE": store,
        "MOMENTS": moments,
        "LAST": value.layout == "channels_last",
        "WIDE": positions * channels >= 1 << 31,
        "FULL": channels % gemm.block_c == 0,
        "BLOCKS_C": blocks_c,
        "BM": gemm.rows,
        "BC": gemm.block_c,
        "BK": gemm.block_k,
        "STAGES": gemm.stages,
        "ACC": accumulator(accumulator_of(value)),
    }
    return Launch(convolve_phases_kernel, (batch * gemm.chunks * blocks_c,), numbers, constants, gemm.warps)


def _axes(letter: str, sizes: Any) -> dict[str, int]:
    return {letter + axis: size for axis, size in zip("DHW", sizes)}
