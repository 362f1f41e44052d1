"""Masks of dropout in a file's forward: drawn beside the kernels, by the operator that PyTorch's dropout calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch._ops import OpOverload

from postlude.graph.dropouts import Opened


@dataclass(frozen=True)
class Drawn:
    """A tensor of a chain that is drawn at each call."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the memory that the draw is given
    layout: torch.memory_format
    call: str  # with {} for that memory

    def lines(self, name: str, x: str, dtype: torch.dtype) -> list[str]:
        """Statements that draw it, on the device of the tensor `x`, whose dtype is given."""
        sizes = ", ".join(map(str, self.shape))
        if self.layout is torch.contiguous_format:
            word = "" if self.dtype == dtype else f", dtype={self.dtype}"
            return [f"{name} = {self.call.format(f'{x}.new_empty({sizes}{word})')}"]
        memory = f"torch.empty({sizes}, dtype={self.dtype}, device={x}.device, memory_format={self.layout})"
        # bernoulli returns contiguous memory, and so does native_dropout on a CPU.
        return [f"{name} = {memory}", f"{name} = {self.call.format(name)}.contiguous(memory_format={self.layout})"]


def drawn_by(one: Opened) -> Drawn:
    memory, draw, *_ = one.drawing
    shape, about = memory.args[0], memory.kwargs
    is_native = draw.target is torch.ops.aten.native_dropout.default
    call = (
        f"torch.native_dropout({{}}, {draw.args[1]!r}, True)[1]"
        if is_native
        else f"torch.bernoulli({{}}, {draw.args[1]!r})"
    )
    return Drawn(tuple(shape), about["dtype"], about["memory_format"], call)  # type: ignore[arg-type]


def are_drawn_in_order(graph: fx.Graph, drawn: Sequence[Opened], last: fx.Node) -> bool:
    """Whether a file may draw these masks together, at the place of `last`: nothing else draws in between."""
    nodes = list(graph.nodes)
    if not drawn:
        return True
    between = nodes[nodes.index(drawn[0].drawing[0]) : nodes.index(last)]
    return [node for node in between if _draws(node)] == [one.drawing[1] for one in drawn]


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
