"""Reads a convolution from the graph as the start of a chain, or says in a sentence why it is none."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from postlude.chain import Convolution
from postlude.graph import spellings
from postlude.graph.draft import Draft, cast_to, shape_of, start_with
from postlude.graph.spellings import arguments_of
from postlude.windows import per_axis


def start_with_convolution(node: fx.Node) -> Draft | str:
    call = arguments_of(node)
    given = tuple(call[name] for name in ("input", "weight", "bias") if call[name] is not None)
    conv = _convolution(node, call, given)
    return conv if isinstance(conv, str) else start_with(conv, node, given)


def _convolution(node: fx.Node, call: spellings.Arguments, tensors: tuple[fx.Node, ...]) -> Convolution | str:
    name = spellings.CONVOLUTIONS[node.target]  # type: ignore[index]
    dims, transposed = int(name[-2]), "transpose" in name
    if len(shape_of(call["input"])) != dims + 2:
        return f"{name} on an input without a batch axis"
    weight = shape_of(call["weight"])
    if not all(isinstance(size, int) for size in weight):
        return f"{name} whose weight has no fixed shape"
    kernel = weight[2:]
    padding = _padding(call["padding"], kernel, per_axis(call["dilation"], dims))
    if isinstance(padding, str):
        return padding
    groups = int(call["groups"])
    return Convolution(
        transposed,
        weight[0] if transposed else weight[1] * groups,
        weight[1] * groups if transposed else weight[0],
        kernel,
        per_axis(call["stride"], dims),
        padding,
        per_axis(call["dilation"], dims),
        per_axis(call.get("output_padding", 0), dims),
        groups,
        call["bias"] is not None,
        cast_to(node, tensors),
    )


def _padding(given: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...] | str:
    if given == "valid":
        return (0,) * len(kernel)
    if given == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
        if any(total % 2 for total in totals):
            return "padding='same' with an even kernel pads one side more than the other"
        return tuple(total // 2 for total in totals)
    return per_axis(given, len(kernel))
