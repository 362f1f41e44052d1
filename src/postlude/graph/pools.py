"""How a pool is read: its windows, and what of it is not understood."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from postlude.chain import Pool, Step, Value
from postlude.graph import spellings
from postlude.graph.spellings import arguments_of, describe
from postlude.windows import Windows

MOST_TAPS = 256  # positions of a window: where its largest lies is kept in one byte


def read_pool(node: fx.Node, dims: int, value: Value) -> Pool | str | None:
    """The pool that a node spells, on `value`; a sentence why this call is not understood, or None."""
    op = spellings.pool(node)
    if op is None:
        return None
    call, name = arguments_of(node), describe(node)
    if int(name[-2]) != dims:
        return f"{name} in a {dims}-D chain"
    kernel, padding, dilation = (_each(call.get(word, 1), dims) for word in ("kernel_size", "padding", "dilation"))
    stride = _each(call["stride"] or kernel, dims)
    if any(size != 1 for size in dilation):
        return f"{name} with a dilation"
    windows = Windows(kernel, stride, padding, bool(call["ceil_mode"]))
    if windows.taps > MOST_TAPS:
        return f"{name} over windows of {windows.taps} positions: up to {MOST_TAPS} are understood"
    if any(s > k for s, k in zip(stride, kernel)):
        return f"{name} with gaps between its windows, which a fused pass would not skip"
    if op == "max_pool":
        return Pool(op, value, windows)
    divisor = call["divisor_override"]
    counts = bool(call["count_include_pad"]) or not any(padding)
    return Pool(op, value, windows, counts, None if divisor is None else int(divisor))


def left_to_pytorch(device: str, step: Step) -> str | None:
    """Why a chain ends before a pool on this device, where it does: PyTorch's own pools follow it there."""
    if isinstance(step, Pool) and device == "cpu":
        return f"{step.op} is PyTorch's on a CPU"
    return None


def _each(sizes: Any, dims: int) -> tuple[int, ...]:
    given = (sizes,) if isinstance(sizes, int) else tuple(int(size) for size in sizes)
    return given * dims if len(given) == 1 else given
