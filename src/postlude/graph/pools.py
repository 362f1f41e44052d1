"""Reads a pool with its windows, or a softmax, from the graph; a sentence says why one is not supported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from postlude.chain import Pointwise, Pool, Softmax, Step
from postlude.graph import spellings
from postlude.graph.spellings import arguments_of, describe
from postlude.plan.through import AFFINE as THROUGH
from postlude.windows import Windows, per_axis

if TYPE_CHECKING:
    from postlude.graph.draft import Draft

MOST_TAPS = 256  # positions of a window: the argmax is kept in one byte


def pooled(draft: Draft, node: fx.Node) -> Draft | str:
    """The draft with a pool, or a sentence why not."""
    op, call, name = str(spellings.pool(node)), arguments_of(node), describe(node)
    if int(name[-2]) != draft.dims:
        return f"{name} in a {draft.dims}-D chain"
    windows = windows_of(node, draft.dims)
    if windows is None:
        return f"{name} with a dilation"
    if windows.taps > MOST_TAPS:
        return f"{name} over windows of {windows.taps} positions: up to {MOST_TAPS} are supported"
    if any(s > k for s, k in zip(windows.stride, windows.kernel)):
        return f"{name} with gaps between its windows, which a fused pass would not skip"
    settings: tuple[Any, ...] = ()
    if op == "avg_pool":
        divisor = call["divisor_override"]
        counts = bool(call["count_include_pad"]) or not any(windows.padding)
        settings = (counts, None if divisor is None else int(divisor))
    return draft.step((node,), call["self"], lambda value: Pool(op, value, windows, *settings))


def windows_of(node: fx.Node, dims: int) -> Windows | None:
    """The windows of a pool; None if they have a dilation."""
    call = arguments_of(node)
    kernel, padding, dilation = (per_axis(call.get(word, 1), dims) for word in ("kernel_size", "padding", "dilation"))
    stride = per_axis(call["stride"] or kernel, dims)
    return Windows(kernel, stride, padding, bool(call["ceil_mode"])) if set(dilation) == {1} else None


def averaged(draft: Draft, node: fx.Node) -> Draft | str | None:
    """The draft with a mean over one axis of space, which stays, as a pool of one window; None where it is none, or
    where it could not go through the convolution. Windows along the last axis would be read number by number."""
    if spellings.reduction(node) != "mean" or draft.producer is None or draft.dims < 2:
        return None
    call = arguments_of(node)
    given, operand = call["dim"], call["self"]
    axes = [axis % (draft.dims + 2) for axis in (given if isinstance(given, (list, tuple)) else [given])]
    is_affine = all(isinstance(step, Pointwise) and step.op in THROUGH for step in draft.steps)
    if len(axes) != 1 or not 2 <= axes[0] <= draft.dims or not call["keepdim"] or call.get("dtype") is not None:
        return None
    if not is_affine:
        return None
    size = operand.meta["val"].shape[axes[0]]
    if not isinstance(size, int) or not 1 < size <= MOST_TAPS:
        return None
    kernel = tuple(size if axis == axes[0] else 1 for axis in range(2, draft.dims + 2))
    windows = Windows(kernel, kernel, (0,) * draft.dims)
    return draft.step((node,), operand, lambda value: Pool("avg_pool", value, windows))


def last_pool(steps: Sequence[Step]) -> int:
    """The number of the last pool. Values before it have other sizes."""
    return max((number for number, step in enumerate(steps, 1) if isinstance(step, Pool)), default=0)


def softmaxed(draft: Draft, node: fx.Node) -> Draft | str:
    """The draft with a softmax over channels, or a sentence why not."""
    call, op = arguments_of(node), spellings.softmax(node)
    rank = call["self"].meta["val"].dim()
    if call["dim"] % rank != (1 if draft.dims else rank - 1):  # a linear layer's channels are its features
        return f"{describe(node)} over axis {call['dim']}: only channels is supported"
    if call["dtype"] is not None:
        return f"{describe(node)} with a dtype of its own"
    return draft.step((node,), call["self"], lambda value: Softmax(str(op), value))


def left_to_pytorch(device: str, step: Step) -> str | None:
    """Why a chain ends before a pool or a softmax on this device, where PyTorch runs them; None if it does not."""
    if isinstance(step, Pool | Softmax) and device == "cpu":
        return f"PyTorch runs {step.op} on a CPU"
    return None
