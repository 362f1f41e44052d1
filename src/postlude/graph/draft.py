"""A chain while it is read from the graph, one ATen node at a time; a sentence says why it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from postlude.chain import (
    Cast,
    Chain,
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Reduce,
    Role,
    Scalar,
    Slot,
    Step,
    Value,
)
from postlude.graph import spellings
from postlude.graph.capture import same_shape
from postlude.graph.composed import composed
from postlude.graph.idioms import with_idioms
from postlude.graph.pools import averaged, last_pool, pooled, softmaxed
from postlude.graph.reductions import Reduction, read_reduction
from postlude.graph.roles import are_ones, broadcast_role, vector_role
from postlude.graph.rows import is_contiguous
from postlude.graph.spellings import arguments_of, describe
from postlude.words import POINTWISE


@dataclass(frozen=True)
class Draft:
    dims: int
    producer: Convolution | None
    nodes: tuple[fx.Node, ...]
    values: Mapping[fx.Node, Value]
    dtypes: tuple[torch.dtype, ...]  # of each value
    steps: tuple[Step, ...]
    roles: tuple[Role, ...]
    tensors: tuple[fx.Node, ...]

    @property
    def is_of_rows(self) -> bool:
        """Whether the rows of a linear layer are several axes of its values: [B, T, F], not [N, F]."""
        return self.producer is not None and self.producer.is_linear and len(shape_of(self.nodes[0])) > 2

    def chain(self) -> Chain:
        return with_idioms(Chain(self.dims, self.producer, self.steps, self.roles))

    def extend(self, node: fx.Node) -> Draft | str:
        """This draft with one more step, or a sentence why `node` cannot be one."""
        if any(self.values[one].index < last_pool(self.steps) for one in node.all_input_nodes if one in self.values):
            return f"{describe(node)} reads a value from before a pool"
        reduced = next((step for step in self.steps if isinstance(step, Reduce)), None)
        if reduced is not None and spellings.pointwise(node) is None:
            return f"{describe(node)} comes after a reduction"
        spelled = spellings.pointwise(node)
        if isinstance(spelled, str):
            return spelled
        if spelled is not None:
            return _pointwise(self, node, spelled)
        if spellings.norm(node) is not None:
            # A pass ends with a pool and the elementwise steps after it, so a norm needs a pass, and a chain, of its
            # own.
            return f"{describe(node)} after a pool begins a chain" if last_pool(self.steps) else _normalize(self, node)
        if (several := composed(self, node)) is not None:
            return several
        reduction = read_reduction(node, self.dims)
        if isinstance(reduction, str) and (over_axis := averaged(self, node)) is not None:
            return over_axis
        if reduction is not None:
            return reduction if isinstance(reduction, str) else _reduce(self, node, reduction)
        if spellings.pool(node) is not None:
            return pooled(self, node)
        if spellings.softmax(node) is not None:
            return softmaxed(self, node)
        if node.target is torch.ops.aten.to.dtype:
            return self.add(node, Cast(self.values[node.args[0]], name_of(dtype_of(node))))  # type: ignore[index]
        return f"{describe(node)} is not in the vocabulary"

    def slot(self, node: fx.Node, role: Role) -> tuple[Draft, Slot]:
        for index, (known, known_role) in enumerate(zip(self.tensors, self.roles)):
            if known is node and known_role == role:
                return self, Slot(index)
        grown = dataclasses.replace(self, tensors=(*self.tensors, node), roles=(*self.roles, role))
        return grown, Slot(len(self.tensors))

    def cast(self, value: Value, dtype: torch.dtype) -> tuple[Draft, Value]:
        """Adds a cast where autocast changes a dtype, which this graph does not show."""
        if self.dtypes[value.index] == dtype:
            return self, value
        steps = (*self.steps, Cast(value, name_of(dtype)))
        return dataclasses.replace(self, steps=steps, dtypes=(*self.dtypes, dtype)), Value(len(steps))

    def _add_rounded(self, node: fx.Node, step: Step, dtype: torch.dtype) -> Draft:
        """Adds a step that was in place: computed in the wider dtype of its operands, then rounded to the value's."""
        steps = (*self.steps, step)
        wide = dataclasses.replace(self, steps=steps, dtypes=(*self.dtypes, dtype))
        return wide.add(node, Cast(Value(len(steps)), name_of(dtype_of(node))))

    def step(self, nodes: Sequence[fx.Node], operand: fx.Node, step_of: Callable[[Value], Step]) -> Draft | str:
        """This draft with a step that these nodes compute of `operand`, in the dtype of the last one; or why not."""
        if operand not in self.values:
            return f"{describe(nodes[0])} does not work on the chain's value"
        draft, value = self.cast(self.values[operand], dtype_of(nodes[-1]))
        return dataclasses.replace(draft, nodes=(*draft.nodes, *nodes[:-1])).add(nodes[-1], step_of(value))

    def add(self, node: fx.Node, step: Step) -> Draft:
        steps = (*self.steps, step)
        return dataclasses.replace(
            self,
            nodes=(*self.nodes, node),
            values={**self.values, node: Value(len(steps))},
            dtypes=(*self.dtypes, dtype_of(node)),
            steps=steps,
        )


def start_with(producer: Convolution, node: fx.Node, tensors: tuple[fx.Node, ...]) -> Draft:
    """A chain whose first value `node` computes, from its input, weight and perhaps bias."""
    roles: tuple[Role, ...] = ("input", "weight", "bias")
    dtypes = (dtype_of(node),)
    return Draft(producer.dims, producer, (node,), {node: Value(0)}, dtypes, (), roles[: len(tensors)], tensors)


def cast_to(node: fx.Node, tensors: tuple[fx.Node, ...]) -> str | None:
    """The dtype to which autocast casts a producer's tensors, or None."""
    dtype = dtype_of(node)
    return name_of(dtype) if any(dtype_of(tensor) != dtype for tensor in tensors) else None


def start_with_input(node: fx.Node) -> Draft | str:
    """A chain without a convolution, which begins at the tensor that `node` reads."""
    shape = shape_of(node)
    if len(shape) not in (4, 5):
        return f"{describe(node)} has {len(shape)} axes; chains are 2-D or 3-D with a batch and channels"
    return Draft(len(shape) - 2, None, (), {node: Value(0)}, (dtype_of(node),), (), ("input",), (node,))


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype = node.meta["val"].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _pointwise(draft: Draft, node: fx.Node, spelled: spellings.Spelled) -> Draft | str:
    operands: list[Operand] = []
    op, given, row = spelled.op, list(spelled.operands), POINTWISE[spelled.op]
    if len(given) == 2 and given[0] not in draft.values and row.swapped is not None:
        op = row.swapped
        given.reverse()  # the value comes first
    if not isinstance(given[0], fx.Node) or given[0] not in draft.values:
        return f"{describe(node)} does not work on the chain's value"
    first = given[0]
    if op == "batch_norm" and draft.is_of_rows:
        return _other_channels(node)
    for item in given:
        operand = _operand(draft, node, first, item, row.vectors)
        if isinstance(operand, str):
            return operand
        draft, read = operand
        operands.append(read)
    promoting = operands[:1] if row.vectors else operands
    if _promoted(draft, promoting) != dtype_of(node):
        if "in_place" in node.meta:
            step = Pointwise(op, tuple(operands), spelled.settings)
            return draft._add_rounded(node, step, _promoted(draft, promoting))
        draft, operands[0] = draft.cast(draft.values[first], dtype_of(node))
        promoting[0] = operands[0]
        if _promoted(draft, promoting) != dtype_of(node):
            return f"{describe(node)} changes the dtype in a way that is not understood"
    return draft.add(node, Pointwise(op, tuple(operands), spelled.settings))


def _operand(draft: Draft, node: fx.Node, first: fx.Node, item: Any, is_vector: bool) -> tuple[Draft, Operand] | str:
    if isinstance(item, (int, float)):
        if not math.isfinite(item):
            return f"{describe(node)} with {item}, which is not finite"
        return draft, Scalar(float(item))
    if not isinstance(item, fx.Node) or not isinstance(item.meta.get("val"), torch.Tensor):
        return f"{describe(node)} has an operand that is neither a tensor nor a number"
    shape, other = shape_of(first), shape_of(item)
    if item in draft.values:
        if not same_shape(shape, other):
            return f"{describe(node)} broadcasts one of the chain's values"
        return draft, draft.values[item]
    reduced = [step.over for step in draft.steps if isinstance(step, Reduce)]
    if reduced and (reduced != ["channels"] or not are_ones(other)):
        return f"{describe(node)} brings another tensor in after a reduction"
    role = (vector_role if is_vector else broadcast_role)(shape, other, draft.is_of_rows)
    role = "one" if reduced and role is not None else role  # with one channel, one number per channel is one number
    if role is None:
        return f"{describe(node)} broadcasts a tensor of shape {tuple(other)}, which is neither full nor per channel"
    if role == "full" and draft.is_of_rows and not is_contiguous(item.meta["val"]):
        return f"{describe(node)} reads a tensor of the value's size that is not contiguous"
    if last_pool(draft.steps) and role in ("full", "row"):
        return f"{describe(node)} brings a tensor of more than one number per channel in after a pool"
    return draft.slot(item, role)


def _promoted(draft: Draft, operands: list[Operand]) -> torch.dtype:
    """The dtype that plain PyTorch gives, outside autocast; numbers do not widen a floating tensor."""
    dtypes = []
    for operand in operands:
        if isinstance(operand, Value):
            dtypes.append(draft.dtypes[operand.index])
        elif isinstance(operand, Slot) and shape_of(draft.tensors[operand.index]):  # 0-d promotes like a number
            dtypes.append(dtype_of(draft.tensors[operand.index]))
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _normalize(draft: Draft, node: fx.Node) -> Draft | str:
    op = spellings.norm(node)
    assert op is not None
    call = arguments_of(node)
    if op == "instance_norm" and call["running_mean"] is not None:
        return "instance_norm that updates running statistics, which are means over the batch"
    if call["input"] not in draft.values:
        return f"{describe(node)} does not work on the chain's value"
    axes = len(call["normalized_shape"]) if op == "layer_norm" else 0
    if draft.is_of_rows and axes != 1:
        return f"{describe(node)} over more than the features" if axes else _other_channels(node)
    if op == "instance_norm" and draft.dims == 0:
        return "instance_norm of a matrix, whose rows are its channels"
    if axes > draft.dims + 1:
        return "layer_norm over all axes, the batch among them"
    if op == "batch_norm" and not isinstance(call["momentum"], (int, float)):
        return "batch_norm with a momentum that is not known beforehand"
    draft, value = draft.cast(draft.values[call["input"]], dtype_of(node))
    slots: list[Slot | None] = []
    for name in ("weight", "bias", *(("running_mean", "running_var") if op == "batch_norm" else ())):
        slot = None
        if call[name] is not None:
            role: Role = "running" if "running" in name else "last" if axes else "channel"
            draft, slot = draft.slot(call[name], role)
        slots.append(slot)
    weight, bias, *rest = slots
    running = (rest[0], rest[1]) if len(rest) == 2 and rest[0] is not None and rest[1] is not None else None
    groups = int(call["num_groups"]) if op == "group_norm" else None
    momentum = float(call["momentum"]) if running is not None else 0.0
    return draft.add(node, Normalize(op, value, groups, float(call["eps"]), weight, bias, axes, running, momentum))


def _other_channels(node: fx.Node) -> str:
    return f"{describe(node)} has the second axis as its channels, and a linear layer the last"


def _reduce(draft: Draft, node: fx.Node, found: Reduction) -> Draft | str:
    operand = arguments_of(node)["self"]
    return draft.step(found.nodes, operand, lambda value: Reduce(found.op, value, found.over, found.keepdim))  # type: ignore[arg-type]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
