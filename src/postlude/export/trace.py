"""A model's forward at two levels: calls of modules and functions, as people write it, and the ATen graph below.

Chains are found in the ATen graph. Each of its nodes records the call that it came from, so that a chain can be mapped
to calls of the forward. A forward that is not a straight line of calls is refused in one sentence.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from postlude.chain import Convolution, Normalize, Operand, Scalar, Slot, Step, with_operands
from postlude.errors import PostludeError, what_it_says
from postlude.export.masks import Drawn, are_drawn_in_order, drawn_by
from postlude.graph.capture import capture_function
from postlude.graph.dropouts import open_dropouts
from postlude.graph.match import Match, match
from postlude.graph.tidy import functionalise


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module computes one thing in training and another in evaluation.

    An instance_norm, or a batch_norm, without running statistics takes those of its input in both.
    """
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.running_mean is not None
    return isinstance(module, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class FoundChain:
    """A chain as calls of the forward, in order, and where each of its tensors comes from: a call, an attribute, or a
    draw; masks that are drawn come last."""

    match: Match
    calls: tuple[fx.Node, ...]
    tensors: tuple[fx.Node | str | Drawn, ...]  # a dotted path is a parameter or buffer
    counters: tuple[str, ...] = ()  # batch_norm's num_batches_tracked, which each call increments
    modes: tuple[tuple[str, bool], ...] = ()  # modules whose mode affects their result, and the mode when traced

    @property
    def masks(self) -> int:
        """How many of its tensors are masks that are drawn."""
        return sum(isinstance(tensor, Drawn) for tensor in self.tensors)


@dataclass(frozen=True)
class Traced:
    graph: fx.Graph
    chains: tuple[FoundChain, ...]
    declined: Mapping[str, str]  # the name of a call that is not fused, and why


def trace(
    model: nn.Module,
    inputs: Sequence[Any],
    over_dropout: bool = True,
    takes_alone: Callable[[fx.Node], bool] = lambda _: False,
) -> Traced:
    """Traces a model. A chain that continues past a batch_norm in training, or past an active dropout, may not map to
    calls; a shorter one may. `takes_alone` says of a convolution that it is a chain even if nothing follows it."""
    graph, tries = _calls(model), []
    for over_batch, over_masks in [(True, over_dropout), (False, over_dropout), (True, False), (False, False)]:
        below = _Below(model, graph, inputs, over_masks)
        found, declined = match(below.aten, functools.partial(_unwritten, over_batch), takes_alone)
        reasons = {item.name: f"{item.what.removeprefix('aten.')}: {item.reason}" for item in declined}
        chains, failed = [], False
        for item in found:
            chain = below.as_calls(item)
            if isinstance(chain, str) and (before := _without_pair(item)) is not None:
                chain = below.as_calls(before)
            if isinstance(chain, str):
                reasons[item.name], failed = chain, True
            else:
                chains.append(chain)
        tries.append(Traced(graph, tuple(chains), reasons))
        if not failed or (not over_batch and not below.masks):
            break
    return max(tries, key=lambda traced: len(traced.chains))


def _refusal(words: str, error: Exception) -> PostludeError:
    return PostludeError(f"the forward cannot be {words} ({what_it_says(error) or type(error).__name__}).")


def _calls(model: nn.Module) -> fx.Graph:
    """The calls of the forward, which must be the same in both modes; differences must be inside modules."""
    was_training = model.training
    try:
        graphs = [fx.Tracer().trace(model.train(mode)) for mode in (not was_training, was_training)]
    except Exception as error:
        raise _refusal("written as one straight line of calls", error) from error
    finally:
        model.train(was_training)
    for graph in graphs:
        _write_out_constants(model, graph)
    if str(graphs[0]) != str(graphs[1]):
        raise PostludeError("the forward differs between training and evaluation outside its modules.")
    return graphs[1]


def _write_out_constants(model: nn.Module, graph: fx.Graph) -> None:
    """Replaces scalar tensors that the forward creates by the call that creates them."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and "_tensor_constant" in str(node.target):
            value = getattr(model, str(node.target))
            if value.dim() or value.device.type == "meta":
                raise PostludeError(
                    "the forward makes a tensor of its own, which a straight line of calls cannot hold."
                )
            with graph.inserting_before(node):
                made = graph.call_function(torch.tensor, (value.item(),))
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _unwritten(over_batch: bool, step: Step) -> str | None:
    """Why the kernels of a file end before a step, or None."""
    if isinstance(step, Normalize) and step.over == "batch" and not over_batch:
        return "a chain over this batch_norm could not be written as calls"
    return None


class _Interpreted(nn.Module):
    """Runs the calls one by one; each ATen node then carries the name of the call it belongs to."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        self.model, self.graph = model, graph
        for node in graph.nodes:
            node.meta["nn_module_stack"] = {"call": (node.name, type(None))}

    def forward(self, *inputs: Any) -> Any:
        return fx.Interpreter(fx.GraphModule(self.model, self.graph)).run(*inputs)


class _Below:
    """The ATen graph of the calls; maps its nodes to calls, and its inputs to tensors."""

    def __init__(self, model: nn.Module, graph: fx.Graph, inputs: Sequence[Any], opens_dropout: bool) -> None:
        state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.model, interpreted, count = model, _Interpreted(model, graph), len(inputs)

        def call(*values: Any) -> Any:
            given = {f"model.{name}": value for name, value in zip(state, values[count:])}
            return torch.func.functional_call(interpreted, given, tuple(values[:count]))

        try:
            with torch.no_grad(), fx.traceback.preserve_node_meta():
                self.aten = capture_function(call, [*inputs, *state.values()])
        except Exception as error:
            raise _refusal("traced", error) from error
        functionalise(self.aten)
        opened = open_dropouts(self.aten, devices=("cpu", "cuda", "meta") if opens_dropout else ())
        self.masks = {one.mask: one for one in opened}
        self.drawing = {node for one in opened for node in one.drawing}
        nodes, self.calls = self.aten.graph.nodes, {node.name: node for node in graph.nodes}
        names = [node.name for node in graph.nodes if node.op == "placeholder"][:count]
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.placeholders = dict(zip(placeholders, [*names, *(f".{name}" for name in state)]))
        stacks = {node: node.meta["nn_module_stack"] for node in nodes if node.meta.get("nn_module_stack")}
        self.origins = {node: str(next(iter(stack.values()))[0]) for node, stack in stacks.items()}

    def as_calls(self, item: Match) -> FoundChain | str:
        """A match as calls of the forward, or why it is none."""
        names = {self.origins.get(node, "") for node in item.nodes}
        computing = [node for node in self.origins if node.op == "call_function" and node not in self.drawing]
        whole = [node for node in computing if self.origins[node] in names]
        counters = {node: path for node in whole if (path := self._counter(node)) is not None}
        if not names <= self.calls.keys() or set(whole) - set(counters) != set(item.nodes):
            return "a call of the forward lies only partly in the chain"
        calls = [node for name, node in self.calls.items() if name in names]
        if item.nodes[-1].target is operator.getitem:
            values = _values_of_pair(calls[-1])
            if values is None:
                return "a pair of values and indices is used as such"
            calls.append(values)
        calls = self._with_inner(calls)
        if any(user not in calls for call in calls[:-1] for user in call.users):
            return "a value inside the chain is used outside it as well"
        numbers, tensors = dict[int, float](), list[fx.Node | str | Drawn]()
        masks = {slot: self.masks[node] for slot, node in enumerate(item.tensors) if node in self.masks}
        if not are_drawn_in_order(self.aten.graph, list(masks.values()), item.nodes[-1]):
            return "another call draws random numbers between its dropout and its end"
        for slot, node in [(slot, node) for slot, node in enumerate(item.tensors) if slot not in masks]:
            source = self.placeholders.get(node, self.origins.get(node, ""))
            made = self.calls.get(source)
            if made is not None and (number := _number(made)) is not None:
                numbers[slot] = number
            elif source.startswith("."):
                tensors.append(source[1:])
            elif made is not None and made not in calls:
                tensors.append(made)
            else:
                return "a tensor that the chain reads is made on the way"
        left = [slot for slot in range(len(item.chain.roles)) if slot not in numbers and slot not in masks]
        paths = [str(node.target) for node in calls if node.op == "call_module"]
        modules = [(path, self.model.get_submodule(path)) for path in paths]
        modes = tuple((path, module.training) for path, module in modules if _depends_on_mode(module))
        item = _with_slots(item, [*left, *masks], numbers, item.chain.producer)
        tensors += map(drawn_by, masks.values())
        return FoundChain(item, tuple(calls), tuple(tensors), tuple(counters.values()), modes)

    def _counter(self, node: fx.Node) -> str | None:
        """The counter that a node increments for a batch_norm in training, if it does just that."""
        path = self.placeholders.get(node.args[0], "") if node.args and isinstance(node.args[0], fx.Node) else ""
        adds = node.target in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and node.args[1:] == (1,)
        is_copied = node.target is torch.ops.aten.copy_.default
        return path[1:] if path.endswith("num_batches_tracked") and (adds or is_copied) else None

    def _with_inner(self, calls: Sequence[fx.Node]) -> list[fx.Node]:
        """The calls, with those between them that compute nothing: copies, shape queries, and numbers as tensors."""
        computing = {name for node, name in self.origins.items() if node.op == "call_function"}
        found = set(calls)
        for node in reversed(self.calls.values()):
            computes = node.name in computing and _number(node) is None
            if node.op.startswith("call_") and not computes and node.users and found.issuperset(node.users):
                found.add(node)
        return [node for node in self.calls.values() if node in found]


def _number(node: fx.Node) -> float | None:
    """The number from which torch.tensor makes a scalar tensor, or None."""
    number = node.args[0] if node.target is torch.tensor and node.args else None
    return number if isinstance(number, int | float) and set(node.kwargs) <= {"device"} else None


def _with_slots(item: Match, left: Sequence[int], numbers: Mapping[int, float], producer: Convolution | None) -> Match:
    """The match with a chain that reads only the slots `left`, and numbers instead of others."""

    def read(operand: Operand) -> Operand:
        if not isinstance(operand, Slot):
            return operand
        return Scalar(float(numbers[operand.index])) if operand.index in numbers else Slot(left.index(operand.index))

    chain = item.chain
    steps = tuple(with_operands(step, read) for step in chain.steps)
    chain = replace(chain, producer=producer, steps=steps, roles=tuple(chain.roles[slot] for slot in left))
    return replace(item, chain=chain, tensors=tuple(item.tensors[slot] for slot in left))


def without_convolution(found: FoundChain) -> FoundChain:
    """The chain without its convolution, whose call, bias included, stays the model's own."""
    conv = found.match.chain.producer
    if conv is None:
        return found
    taken = 3 if conv.has_bias else 2
    item = _with_slots(found.match, [0, *range(taken, len(found.tensors))], {}, None)
    item = replace(item, nodes=item.nodes[1:], tensors=(item.nodes[0], *item.tensors[1:]))
    return replace(found, match=item, calls=found.calls[1:], tensors=(found.calls[0], *found.tensors[taken:]))


def _values_of_pair(pair: fx.Node) -> fx.Node | None:
    """The call that takes the values from a (values, indices) pair, if nothing else reads the pair."""
    for user in pair.users:
        if len(pair.users) == 1 and (user.target, *user.args[1:]) in ((operator.getitem, 0), (getattr, "values")):
            return user
    return None


def _without_pair(item: Match) -> Match | None:
    """The chain without the max or min at its end."""
    if item.nodes[-1].target is not operator.getitem or len(item.chain.steps) < 2:
        return None
    pair = item.nodes.index(item.nodes[-1].args[0])
    return replace(item, chain=replace(item.chain, steps=item.chain.steps[:-1]), nodes=item.nodes[:pair])
