"""The gradients of a convolution of few input channels of which only moments were needed: tiles of our CUDA kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from postlude.chain import Chain
from postlude.hardware import Machine
from postlude.plan.few_channels import RESERVED, WIDTH, FewChannels, Geometry, geometry_for, layout_of_tile
from postlude.plan.problem import Problem
from postlude.plan.tiles import few_channels_use, row_for

_HEIGHTS = (16, 12, 8, 6, 4)
_MOST_CHANNELS = 32  # the input's gradient sums over all of them in one block


@dataclass(frozen=True)
class FewChannelsGradient(FewChannels):
    """One way to run the kernel. With the input's gradient, neighbouring tiles overlap by a halo."""

    def tiles_along(self, shape: Geometry, space: tuple[int, int, int], with_input: bool) -> tuple[int, int, int]:
        """Tiles per sample along each axis, for an input of size `space`.

        A tile gives at most as many rows and columns of the input's gradient as it has positions.
        """
        sizes, least = (self.depth, self.height, WIDTH), (0, space[1], space[2])
        deep, high, wide = (
            _tiles(max(out, least[axis]), out, sizes[axis], shape.kernel[axis], with_input)
            for axis, out in enumerate(shape.output(space))
        )
        return deep, high, wide


def _tiles(largest: int, out: int, tile: int, taps: int, with_input: bool) -> int:
    if not with_input:
        return -(-out // tile)
    if largest <= tile:
        return 1
    return max(2, -(-(out - tile) // (tile - taps + 1)) + 1)


def gradient_shared_bytes(settings: FewChannelsGradient, shape: Geometry, with_input: bool) -> int:
    """Shared memory of a block. The kernel asserts the same sum."""
    kd, kh, kw = shape.kernel
    plane, steps = layout_of_tile(settings, shape, slot_bytes=16)
    channels = shape.fragments * 8
    slots = (kd + 1) * plane + steps * shape.fragments * 32
    stride = (shape.fragments | 1) * 8
    halves = settings.height * WIDTH * stride
    if with_input:
        reach = (2 if shape.cin > 2 else 4) + kw - 1
        slots += kd * kh * -(-reach * shape.fragments // 2) * 32
        halves = (settings.height * (WIDTH + 1 + 2 * (kw - 1)) + reach) * stride
    words = 7 * channels + settings.warps + (kd + 1) * steps * 4
    return slots * 16 + settings.planes * halves * 2 + words * 4


@dataclass(frozen=True)
class GradientPlan:
    """How each set of gradients is computed."""

    weight: FewChannelsGradient  # the weight's alone
    both: FewChannelsGradient  # the input's, with or without the weight's


def few_channels_gradient_for(
    own: FewChannels, chain: Chain, problem: Problem, machine: Machine
) -> GradientPlan | None:
    """Settings if our kernel computed the moments; None if it cannot compute the gradients, or not fast enough."""
    conv = chain.convolution
    if not machine.card.abilities.has_few_channel_gradients or conv.out_channels > _MOST_CHANNELS:
        return None
    shape, space = geometry_for(conv, problem.x.shape[2:])
    most = row_for(machine, few_channels_use("few channels' gradients", conv, own.planes, machine)).values["height"]
    weight = _fitted(own, shape, space, problem.x.shape[0], machine, False, most)
    both = _fitted(own, shape, space, problem.x.shape[0], machine, True, most)
    return None if weight is None or both is None else GradientPlan(weight, both)


def _fitted(
    own: FewChannels,
    shape: Geometry,
    space: tuple[int, int, int],
    batch: int,
    machine: Machine,
    with_input: bool,
    most: int,
) -> FewChannelsGradient | None:
    """The tallest tile of at most `most` rows that fits, over the whole depth unless that leaves multiprocessors idle.

    The weight's gradient of chain 23 on an H200: 0.40 ms in two planes with one block per SM, 0.43 with two; in one
    plane 0.27 with either.
    """
    (kd, kh, _), out = shape.kernel, shape.output(space)
    for height in (height for height in _HEIGHTS if height <= most):
        blocks = 1 if with_input or own.planes == 2 else 2
        programs = blocks * machine.card.multiprocessors
        tile = FewChannelsGradient(
            own.operand, own.planes, max(out[0], kd), height, rows=2, blocks=blocks, programs=programs
        )
        room = machine.card.shared_bytes // blocks - RESERVED
        if height <= kh or gradient_shared_bytes(tile, shape, with_input) > room:
            continue
        _, high, wide = tile.tiles_along(shape, space, with_input)
        parts = max(1, min(-(-tile.programs // (batch * high * wide)), out[0] // (4 * kd)))
        return dataclasses.replace(tile, depth=max(-(-out[0] // parts) + (kd - 1 if parts > 1 else 0), kd))
    return None
