"""What runs on a GPU: the library's convolution, then one pass for the moments and one for everything after."""

from __future__ import annotations

import math

from postlude.chain import Chain, Normalize, Reduce, values_of
from postlude.emit import OPERANDS, pass_slots
from postlude.hardware import Machine
from postlude.plan.problem import (
    Problem,
    body_bytes,
    body_layout,
    body_shape,
    compulsory_bytes,
    result_dtype,
    result_layout,
)
from postlude.plan.program import first_barrier, moments_only
from postlude.plan.types import Moments, Pass, Plan, Refusal, Store, Tile, first_source

# Measured on an H200 over (2, 32, 128³) in fp16, where copying the tensor twice takes 0.258 ms: tiles of 4096 elements
# contiguous (0.214) and 8192 channels-last (0.236; 4096: 0.29, 2048: 0.39), several tiles per program.
_TILE = {"contiguous": 4096, "channels_last": 8192}
_PROGRAMS_PER_CORE = {"contiguous": 64, "channels_last": 16}
SMALLEST = 32 << 20  # bytes of the value: below, three launches cost the host more than they save the card


def lower_for_gpu(chain: Chain, problem: Problem, machine: Machine, even_if_slower: bool = False) -> Plan | Refusal:
    size = body_bytes(chain, problem)
    reasons = _reasons_against(chain, machine)
    if not even_if_slower:
        reasons += _reasons_to_stay(chain, size)
    if reasons:
        return Refusal(tuple(reasons))
    source = first_source(chain)
    moments, last = moments_only(chain), last_fused_step(chain)
    barrier = first_barrier(chain)
    passes: tuple[Pass, ...]
    if moments is not None:
        passes = (Pass(source, 1, moments.before, Moments(moments.squares)),)
    elif barrier is not None and barrier <= last:
        passes = (Pass(source, 1, barrier - 1, Moments(True)), Pass("load", 1, last, Store()))
    else:
        passes = (Pass(source, 1, last, Store()),)
    compulsory = compulsory_bytes(chain, problem)
    batch = problem.x.shape[0]
    return Plan(
        chain=chain,
        passes=passes,
        slab=batch,
        slabs=1,
        slab_bytes=size,
        convolve="eager",
        norms_in_place=False,
        layout_inside=body_layout(chain, problem),
        result_layout=result_layout(chain, problem, machine),
        result_dtype=result_dtype(chain, problem),
        moved_bytes=compulsory + size * (len(passes) if chain.producer is None else len(passes) + 1),
        eager_bytes=compulsory + 2 * size * len(chain.steps),
        reasons=("PyTorch's convolution; the steps before the norm are computed twice rather than stored",)
        if len(passes) == 2
        else ("PyTorch's convolution, then one pass",),
        tile=tile_for(chain, problem, machine),
    )


def last_fused_step(chain: Chain) -> int:
    """Steps from a second barrier on run through PyTorch, on what the fused passes leave."""
    seen_norm = False
    for number, step in enumerate(chain.steps, 1):
        if isinstance(step, Reduce) or (isinstance(step, Normalize) and seen_norm):
            return number - 1
        seen_norm |= isinstance(step, Normalize)
    return len(chain.steps)


def tile_for(chain: Chain, problem: Problem, machine: Machine) -> Tile:
    """Elements per tile, and how many tiles one program of the moments pass takes."""
    batch, channels, *space = body_shape(chain, problem)
    positions = math.prod(space)
    layout = body_layout(chain, problem)
    most = _TILE.get(layout, _TILE["contiguous"])
    if layout == "channels_last":
        block_c = min(_power_of_two(channels), 256)
        block = max(1, most // block_c)
        tiles_in_all = batch * -(-positions // block) * -(-channels // block_c)
    else:
        block_c, block = 0, min(most, max(128, _power_of_two(positions)))
        tiles_in_all = batch * channels * -(-positions // block)
    programs = machine.threads * _PROGRAMS_PER_CORE.get(layout, _PROGRAMS_PER_CORE["contiguous"])
    tiles = max(1, min(64, tiles_in_all // programs))
    return Tile(block, block_c, tiles)


def _reasons_against(chain: Chain, machine: Machine) -> list[str]:
    reasons = []
    if not machine.has_triton:
        reasons.append("Triton is not installed, which the GPU passes need")
    last = last_fused_step(chain)
    if last == 0 and moments_only(chain) is None:
        reasons.append("nothing before the reduction can be fused")
    if any(value.index < last for step in chain.steps[last:] for value in values_of(step)):
        reasons.append("a step after the last fused one reads a value from inside the fused passes")
    if len(pass_slots(chain, last)) > OPERANDS:
        reasons.append(f"the steps read more than {OPERANDS} tensors")
    return reasons


def _reasons_to_stay(chain: Chain, size: int) -> list[str]:
    if moments_only(chain) is not None:
        return ["only moments are needed, but PyTorch's convolution stores its result all the same: nothing is gained"]
    if size < SMALLEST:
        return [f"too small to gain: a value of {size / 2**20:.1f} MiB, fusing pays from {SMALLEST >> 20} on"]
    return []


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
