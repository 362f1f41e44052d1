"""A convolution read off the graph: the start of a chain, or a sentence why it is none."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from postlude.chain import Convolution, Role, Value
from postlude.graph import spellings
from postlude.graph.draft import Draft, dtype_of, name_of, shape_of
from postlude.graph.spellings import arguments_of


def start_with_convolution(node: fx.Node) -> Draft | str:
    call = arguments_of(node)
    x, weight, bias = call["input"], call["weight"], call["bias"]
    conv = _convolution(node, call)
    if isinstance(conv, str):
        return conv
    roles: tuple[Role, ...] = ("input", "weight")
    tensors: tuple[fx.Node, ...] = (x, weight)
    if bias is not None:
        roles, tensors = (*roles, "bias"), (*tensors, bias)
    dtype = dtype_of(node)
    return Draft(conv.dims, conv, (node,), {node: Value(0)}, (dtype,), (), roles, tensors)


def _convolution(node: fx.Node, call: spellings.Arguments) -> Convolution | str:
    name = spellings.CONVOLUTIONS[node.target]  # type: ignore[index]
    dims, transposed = int(name[-2]), "transpose" in name
    if len(shape_of(call["input"])) != dims + 2:
        return f"{name} on an input without a batch axis"
    weight = shape_of(call["weight"])
    if not all(isinstance(size, int) for size in weight):
        return f"{name} whose weight has no fixed shape"
    kernel = weight[2:]
    padding = _padding(call["padding"], kernel, _each(call["dilation"], dims))
    if isinstance(padding, str):
        return padding
    groups = int(call["groups"])
    tensors = [call["input"], call["weight"], *([call["bias"]] if call["bias"] is not None else [])]
    mixed = any(dtype_of(tensor) != dtype_of(node) for tensor in tensors)
    return Convolution(
        transposed,
        weight[0] if transposed else weight[1] * groups,
        weight[1] * groups if transposed else weight[0],
        kernel,
        _each(call["stride"], dims),
        padding,
        _each(call["dilation"], dims),
        _each(call.get("output_padding", 0), dims),
        groups,
        call["bias"] is not None,
        name_of(dtype_of(node)) if mixed else None,
    )


def _padding(given: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...] | str:
    if given == "valid":
        return (0,) * len(kernel)
    if given == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
        if any(total % 2 for total in totals):
            return "padding='same' with an even kernel pads one side more than the other"
        return tuple(total // 2 for total in totals)
    return _each(given, len(kernel))


def _each(sizes: Any, dims: int) -> tuple[int, ...]:
    given = (sizes,) if isinstance(sizes, int) else tuple(int(size) for size in sizes)
    return given * dims if len(given) == 1 else given
