"""Reads a reduction from the graph: its axes, and which node holds its result."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch.fx as fx

from postlude.graph import spellings
from postlude.graph.spellings import Arguments, arguments_of, describe
from postlude.words import REDUCTIONS

_UNDERSTOOD = {("space", "sample", "channels"): "space, channels, or all but the batch,", ("channels",): "channels"}


@dataclass(frozen=True)
class Reduction:
    op: str
    over: str
    keepdim: bool
    nodes: tuple[fx.Node, ...]  # the call, then the getitems of a pair; the last one holds the values


def read_reduction(node: fx.Node, dims: int) -> Reduction | str | None:
    """The reduction that a node computes; a sentence why this call is not supported; None if it is none."""
    op = spellings.reduction(node)
    if op is None:
        return None
    call = arguments_of(node)
    if op == "adaptive_avg_pool":
        sizes = call["output_size"]
        if set(sizes if isinstance(sizes, (list, tuple)) else (sizes,)) != {1}:
            return f"{describe(node)} to more than one position"
        return Reduction(op, "space", True, (node,))
    if call.get("dtype") is not None:
        return f"{describe(node)} with a dtype of its own"
    nodes = _with_parts(node) if op in ("max", "min") else (node,)
    if not nodes:
        return f"{describe(node)} whose indices are used"
    spans = REDUCTIONS[op]
    if not dims:  # a linear layer: features are the channels, and all there is of a sample
        rank = call["self"].meta["val"].dim()
        is_features = _axes(call, rank) == (rank - 1,)
        return Reduction(op, spans[-1], bool(call["keepdim"]), nodes) if is_features else f"{describe(node)} of rows"
    axes = _axes(call, dims + 2)
    over = {tuple(range(2, dims + 2)): "space", tuple(range(1, dims + 2)): "sample", (1,): "channels"}.get(axes, "")
    if over not in spans:
        return f"{describe(node)} over axes {list(axes)}: only {_UNDERSTOOD[spans]} is supported"
    return Reduction(op, over, bool(call["keepdim"]), nodes)


def _axes(call: Arguments, rank: int) -> tuple[int, ...]:
    given = call["dim"]
    axes = given if isinstance(given, (list, tuple)) else () if given is None else (given,)
    return tuple(sorted(axis % rank for axis in axes))


def _with_parts(node: fx.Node) -> tuple[fx.Node, ...]:
    """The node of a (values, indices) pair with its getitems, values last; empty if the indices are used."""
    values = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    rest = [user for user in node.users if user not in values]
    is_all = len(values) == 1 and all(user.target is operator.getitem and not user.users for user in rest)
    return (node, *rest, *values) if is_all else ()
