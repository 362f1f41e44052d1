"""Softmax and reductions over channels on a GPU: whether the last pass fuses them, and its tiles."""

from __future__ import annotations

from postlude.chain import Chain, Normalize
from postlude.plan.barriers import fused_pool, is_over_channels, over_channels, row_norm
from postlude.plan.problem import Problem, body_shape, power_of_two

MOST_CHANNELS = 512  # a tile has all channels, and enough positions for coalesced loads
# Elements of a tile, and its least and most positions. On an H200, fp32: logsumexp of tanh and hardswish over
# (128, 64, 126²) takes 0.271 ms with 4096 elements and 4 warps, 0.465 with 8192 and 8; amax over (128, 16, 14×30²)
# takes 0.047 and 0.048.
_ELEMENTS, _LEAST, _MOST = 4096, 16, 1024
CHANNELS_WARPS = 4
_GRADIENT_ELEMENTS = 2048  # each takes registers for two values, and more for steps over channels


def takes_channels(chain: Chain, problem: Problem) -> bool:
    """Whether the last pass fuses the chain's reduction or softmax over channels."""
    return over_channels(chain) is not None and why_apart(chain, problem) is None


def why_apart(chain: Chain, problem: Problem) -> str | None:
    """Why PyTorch runs a chain's reduction or softmax over channels; None if it is fused."""
    step = next((step for step in chain.steps if is_over_channels(step)), None)
    if step is None:
        return None
    why = None
    if body_shape(chain, problem)[1] > MOST_CHANNELS:
        why = f"more than {MOST_CHANNELS} channels do not fit a tile"
    if row_norm(chain) is not None:
        why = "the tiles of a layer_norm are rows of one channel"
    if fused_pool(chain) is not None:
        why = "it follows a pool"
    if sum(isinstance(step, Normalize) for step in chain.steps) > 1:
        why = "it follows a second norm"
    return None if why is None else f"{step.op} over channels is PyTorch's: {why}"


def channels_kind(op: str) -> str:
    """The reduction that computes the values of `op`: max and min return indices as well."""
    return {"max": "amax", "min": "amin"}.get(op, op)


def channels_tile(channels: int, positions: int, elements: int = _ELEMENTS, least: int = _LEAST) -> tuple[int, int]:
    """Positions and channels of a tile, both powers of two."""
    block_c = power_of_two(channels)
    return min(_MOST, max(least, elements // block_c), max(least, power_of_two(positions))), block_c


def gradient_tile(channels: int, positions: int) -> tuple[int, int]:
    return channels_tile(channels, positions, _GRADIENT_ELEMENTS, _LEAST // 2)
