"""Active dropout as products: x · mask · 1/(1 - p), whose mask is an operand of the chain.

The mask is drawn where the dropout was, by the operator that PyTorch's own dropout calls. Its numbers, and those of
everything that draws after it, are therefore the ones that eager draws with the same seed. A mask of one byte per
element has no rounding: 1/(1 - p) in 16 bits would be a bias.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

from postlude.graph.spellings import DROPOUTS, arguments_of
from postlude.graph.tidy import meta_for_another
from postlude.plan.problem import layout_of, memory_format

aten = torch.ops.aten
FUSED_ON = ("cuda",)  # the kernels for CPUs do not read a mask
DRAWN = "is a drawn mask"  # in a node's metadata


@dataclass(frozen=True)
class Opened:
    """A dropout that was written as products, and what it was."""

    was: OpOverload
    arguments: tuple[Any, ...]  # after the value
    meta: dict[str, Any]
    drawing: tuple[fx.Node, ...]  # memory, the draw, and the mask, which is the last of them
    products: tuple[fx.Node, fx.Node]

    @property
    def mask(self) -> fx.Node:
        return self.drawing[-1]


def open_dropouts(graph: fx.GraphModule, devices: Sequence[str] = FUSED_ON) -> list[Opened]:
    """Writes every active dropout on one of `devices` as products, if its sizes are known."""
    found = [node for node in graph.graph.nodes if node.target in DROPOUTS and _can_be_opened(node, devices)]
    return [_opened(graph, node) for node in found]


def close_dropouts(graph: fx.GraphModule, opened: Sequence[Opened]) -> None:
    """Restores the dropouts that are in no chain."""
    left = set(graph.graph.nodes)
    for one in opened:
        if left.issuperset(one.products):
            _restore(graph, one)


def masks_of(tensors: Sequence[fx.Node]) -> list[fx.Node]:
    """The masks among a chain's tensors, in the order in which they are drawn."""
    return [node for node in tensors if node.meta.get(DRAWN)]


def _can_be_opened(node: fx.Node, devices: Sequence[str]) -> bool:
    """Where p is 1 PyTorch draws nothing. A mask for a value with gaps would be drawn in another order."""
    call, value = arguments_of(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not 0 < call["p"] < 1 or not call["train"]:
        return False
    has_sizes = all(isinstance(size, int) for size in value.shape)
    return has_sizes and value.device.type in devices and layout_of(call["input"].meta["val"]) != "strided"


def _opened(graph: fx.GraphModule, node: fx.Node) -> Opened:
    x, p = node.args[0], float(arguments_of(node)["p"])
    assert isinstance(node.target, OpOverload)
    assert isinstance(x, fx.Node)
    with graph.graph.inserting_before(node):
        drawing = _draw(graph.graph, node, x.meta["val"], p)
        kept = graph.graph.call_function(aten.mul.Tensor, (x, drawing[-1]))
        scaled = graph.graph.call_function(aten.mul.Tensor, (kept, 1 / (1 - p)))
    for product in (kept, scaled):
        product.meta = meta_for_another(node)
    node.replace_all_uses_with(scaled)
    graph.graph.erase_node(node)
    return Opened(node.target, tuple(node.args[1:]), dict(node.meta), drawing, (kept, scaled))


def _draw(graph: fx.Graph, node: fx.Node, value: torch.Tensor, p: float) -> tuple[fx.Node, ...]:
    """The nodes that draw the mask for `node`: zeros and ones.

    On a GPU `dropout` is `native_dropout`, except in place. What that computes of its input is not read, so the input
    is memory that nobody has written. Everything else is `bernoulli_`, whose numbers are the same in all dtypes but
    float64.
    """
    is_feature, is_native = node.target is not aten.dropout.default, False
    if is_feature:  # one number per sample and channel: small, so it has the value's dtype
        mask = value.new_empty((*value.shape[:2], *(1,) * (value.dim() - 2)))
    else:
        is_native = "in_place" not in node.meta
        is_double = value.dtype == torch.float64 and not is_native
        mask = torch.empty_like(value, dtype=torch.float64 if is_double else torch.bool)
    dtype = value.dtype if is_native else mask.dtype
    about = {"dtype": dtype, "device": value.device, "memory_format": memory_format(layout_of(mask), mask.dim() - 2)}
    memory = graph.call_function(aten.empty.memory_format, (list(mask.shape),), about)  # type: ignore[arg-type]
    if is_native:
        pair = graph.call_function(aten.native_dropout.default, (memory, p, True))
        nodes: tuple[fx.Node, ...] = (memory, pair, graph.call_function(operator.getitem, (pair, 1)))
        pair.meta["val"] = (torch.empty_like(value), mask)
    else:
        nodes = (memory, graph.call_function(aten.bernoulli.p, (memory, 1 - p)))
    memory.meta["val"] = torch.empty_like(mask, dtype=dtype)
    nodes[-1].meta["val"] = mask
    for one in nodes:
        one.meta = {**meta_for_another(node), "val": one.meta["val"]}
    nodes[-1].meta[DRAWN] = True
    return nodes


def _restore(graph: fx.GraphModule, one: Opened) -> None:
    kept, scaled = one.products
    with graph.graph.inserting_before(scaled):
        again = graph.graph.call_function(one.was, (kept.args[0], *one.arguments))
    again.meta = {**one.meta, "val": scaled.meta["val"]}
    scaled.replace_all_uses_with(again)
    for node in (scaled, kept, *reversed(one.drawing)):
        graph.graph.erase_node(node)
