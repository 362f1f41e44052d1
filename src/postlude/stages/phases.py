"""Our strided transposed convolution: one implicit GEMM for each phase of the output, all in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from postlude.plan import Plan
from postlude.plan.gemm import Gemm
from postlude.plan.phases import Phases
from postlude.stages.cuts import Partials, is_wide
from postlude.stages.epilogue import Epilogue, product_tile
from postlude.stages.pack import PackedWeight, packed_weight, planes, weight_strides
from postlude.stages.trace import Pointer, launch, or_unread

_WEIGHT_BLOCK = 1024  # elements of a packed weight at a time


def pack_phases(
    gemm: Gemm, phases: Phases, weight: Tensor, sizes: tuple[int, int], largest: Tensor | None
) -> PackedWeight:
    """Packs a weight by phase; arguments as for `pack_weight`."""
    outputs = -(-sizes[0] // gemm.block_c) * gemm.block_c
    made = packed_weight(outputs, gemm.volume.width, gemm.depth, gemm.arithmetic, weight)
    launch(
        "phases",
        "pack_phases_kernel",
        (outputs,),
        [weight, made.matrix, or_unread(largest, weight), or_unread(made.unscale, weight)],
        (*sizes, *weight_strides(weight, True)),
        {
            **_axes("K", [axis.kernel for axis in phases.axes]),
            **_axes("STRIDE_", [axis.stride for axis in phases.axes]),
            "C_PACKED": gemm.channels,
            **planes(gemm.arithmetic),
            "BLOCK_K": _WEIGHT_BLOCK,
        },
    )
    return made


def launch_phases(
    plan: Plan,
    gemm: Gemm,
    phases: Phases,
    product: Sequence[Pointer],
    unread: Tensor,
    tensors: Sequence[Tensor],
) -> tuple[Tensor | None, Partials | None]:
    volume, is_last = gemm.volume, plan.value.layout == "channels_last"
    end = Epilogue(plan, gemm.chunks, gemm.block_c, "[None, :]" if is_last else "[:, None]")
    out = [axis.out for axis in phases.axes]
    constants = {
        "STEPS_FN": end.before,
        **_axes("K", [axis.kernel for axis in phases.axes]),
        **_axes("STRIDE_", [axis.stride for axis in phases.axes]),
        **_axes("CROP_", [axis.padding for axis in phases.axes]),
        **_axes("P", phases.front),
        "C_PACKED": gemm.channels,
        **planes(gemm.arithmetic),
        **end.written,
        "USES_INT64": is_wide(plan.value),
        **end.channels,
        **product_tile(gemm, plan.value),
    }
    numbers = (plan.value.shape[1], gemm.tiles, volume.sample_rows * volume.pitch, volume.pitch, volume.plane, *out)
    kernel = ("phases", "convolve_phases_kernel", (end.programs,))
    return end.launch(*kernel, product, unread, tensors, numbers, constants, gemm.warps)


def _axes(name: str, sizes: Iterable[int]) -> dict[str, int]:
    return {name + axis: size for axis, size in zip("DHW", sizes)}
