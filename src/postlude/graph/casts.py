"""Autocast's casts of a convolution's input and weight, as operators of the graph.

Autocast computes norms in fp32 and convolutions in 16 bits. The cast between them is below the level of this graph. As
an operator it becomes the last step of the chain before it, which then writes 16 bits, and the separate pass that would
read 32 bits and write 16 is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
import torch.fx as fx

from postlude.graph import spellings
from postlude.graph.tidy import meta_for_another, storage_of, written_storages
from postlude.plan.problem import CHANNELS_LAST, layout_of
from postlude.run import layouts as layouts  # defines the operator

aten = torch.ops.aten


def cast_inputs(graph: fx.GraphModule, wanting: Collection[fx.Node]) -> None:
    """Adds autocast's casts: one per convolution for a value that wants a gradient, so that its gradients are added in
    fp32, as autocast does; otherwise one for all convolutions that read a value, which a chain can end with."""
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    written = written_storages(graph)
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        x, dtype = node.args[0], node.meta["val"].dtype
        if not isinstance(x, fx.Node) or not _is_narrowed(x, dtype):
            continue
        cast = casts.get((x, dtype))
        if cast is None or x in wanting or storage_of(x) in written:
            with graph.graph.inserting_before(node):
                cast = casts[x, dtype] = graph.graph.call_function(aten.to.dtype, (x, dtype))
            cast.meta = meta_for_another(x)
            cast.meta["val"] = x.meta["val"].to(dtype)
        node.replace_input_with(x, cast)


def cast_weights(graph: fx.GraphModule, wanting: Collection[fx.Node]) -> None:
    """Casts the weights and biases of convolutions left to PyTorch, by one operator for all of a dtype. Not those that
    the graph writes to: that operator is the graph's first."""
    written = written_storages(graph)
    by_dtype: dict[torch.dtype, dict[fx.Node, list[fx.Node]]] = {}  # parameters, and the convolutions that read each
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        call, dtype = spellings.arguments_of(node), node.meta["val"].dtype
        for given in (call["weight"], call["bias"]):
            if not isinstance(given, fx.Node) or given.op != "placeholder" or storage_of(given) in written:
                continue
            if _is_cast(given.meta["val"], dtype):
                by_dtype.setdefault(dtype, {}).setdefault(given, []).append(node)
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for dtype, readers in by_dtype.items():
        # Where none of them wants a gradient, no graph of autograd's is made for any.
        for given in ([one for one in readers if one in wanting], [one for one in readers if one not in wanting]):
            if given:
                _cast_together(graph, first, given, readers, dtype)


def _is_cast(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return parameter.dtype == torch.float32 and dtype.itemsize == 2 and layout_of(parameter) != "strided"


def _cast_together(
    graph: fx.GraphModule,
    first: fx.Node,
    parameters: list[fx.Node],
    readers: dict[fx.Node, list[fx.Node]],
    dtype: torch.dtype,
) -> None:
    is_last = [_is_read_last(one, readers[one]) for one in parameters]
    with graph.graph.inserting_before(first):
        together = graph.graph.call_function(torch.ops.postlude.weights.default, (parameters, dtype, is_last))
        together.meta["val"] = [_cast(one, dtype, last) for one, last in zip(parameters, is_last)]
        for place, one in enumerate(parameters):
            cast = graph.graph.call_function(operator.getitem, (together, place))
            cast.meta = meta_for_another(one)
            cast.meta["val"] = together.meta["val"][place]
            for node in readers[one]:
                node.replace_input_with(one, cast)


def _is_read_last(weight: fx.Node, readers: list[fx.Node]) -> bool:
    """Whether all convolutions that read a weight are channels-last. With one tap, it is already."""
    values = [node.args[0].meta["val"] for node in readers]  # type: ignore[union-attr]
    has_taps = any(size > 1 for size in weight.meta["val"].shape[2:])
    return has_taps and all(layout_of(value) == "channels_last" for value in values)


def _cast(parameter: fx.Node, dtype: torch.dtype, is_last: bool) -> torch.Tensor:
    value: torch.Tensor = parameter.meta["val"].to(dtype)
    return value.contiguous(memory_format=CHANNELS_LAST[value.dim() - 2]) if is_last else value


def _is_narrowed(x: fx.Node, dtype: torch.dtype) -> bool:
    """Whether autocast casts `x` to fewer bits. Not for an input of the graph, because no chain precedes it."""
    value = x.meta["val"]
    return x.op == "call_function" and value.is_cuda and value.dtype == torch.float32 and dtype.itemsize == 2
