"""Channels-last through a whole graph: values stay channels-last between convolutions; the graph's results do not
change.

cuDNN's tensor-core kernels read and write channels-last only. With contiguous values each of them converts its operands
and its result, forward and in both gradients: 4.8 ms of the 26 ms GPU time of an nnU-Net training step on an H200. A
value that stays channels-last from one convolution to the next needs no conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from postlude.chain import Reduce
from postlude.errors import first_line
from postlude.graph import spellings
from postlude.graph.capture import fakes_of, modes_left_as_found
from postlude.graph.dropouts import masks_of
from postlude.graph.match import Match
from postlude.graph.names import site_name
from postlude.graph.tidy import memory_of, meta_for_another, storage_of, written_storages
from postlude.plan.problem import CHANNELS_LAST, layout_of
from postlude.run import layouts as layouts  # defines the operators

aten = torch.ops.aten


class UnsuitedError(Exception):
    """The graph needs its original layouts: `view` raises on a channels-last value."""


@dataclass(frozen=True)
class Conversion:
    """A place where a value changes its layout."""

    name: str  # of the module that reads the value, or that computed a result of the graph
    layout: str  # the new layout
    shape: tuple[int, ...]
    bytes: int


_FAST = (torch.float16, torch.bfloat16)
_COMPUTED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # as PyTorch's kernels do


def read_channels_last(graph: fx.GraphModule, allows_tf32: bool) -> list[fx.Node]:
    """Adds a conversion before every convolution that gains from it, one per value, and returns the conversions. None
    for a value that the graph writes to."""
    convolutions = [node for node in graph.graph.nodes if spellings.is_convolution(node)]
    if not all(_has_sizes(node) for node in convolutions):
        return []
    made, written = dict[fx.Node, fx.Node](), written_storages(graph)
    for node in convolutions:
        x = node.args[0]
        if isinstance(x, fx.Node) and _pays(node, x, allows_tf32) and storage_of(x) not in written:
            if x not in made:
                with graph.graph.inserting_before(node):
                    made[x] = _converted(graph, x, CHANNELS_LAST[x.meta["val"].dim() - 2])
            node.replace_input_with(x, made[x])
    return list(made.values())


def _has_sizes(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in node.meta["val"].shape)


def _pays(node: fx.Node, x: fx.Node, allows_tf32: bool) -> bool:
    """Whether a convolution gains: it runs on tensor cores and has more than one channel."""
    value, given = node.meta["val"], x.meta["val"]
    is_fast = value.dtype in _FAST or (value.dtype == torch.float32 and allows_tf32)
    return value.is_cuda and is_fast and given.dim() - 2 in CHANNELS_LAST and given.shape[1] > 1


def _converted(graph: fx.GraphModule, node: fx.Node, layout: torch.memory_format) -> fx.Node:
    made = graph.graph.call_function(aten.contiguous.default, (node,), {"memory_format": layout})
    made.meta = meta_for_another(node)
    made.meta["val"] = node.meta["val"].contiguous(memory_format=layout)
    return made


def propagate(graph: fx.GraphModule, chains: Sequence[Match]) -> set[Match]:
    """Recomputes the strides of every node, and returns the chains whose result is channels-last."""
    given = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    masks = {node: item for item in chains for node in masks_of(item.tensors)}
    walk = _Strides(graph, {**masks, **{item.nodes[-1]: item for item in chains}})
    try:
        with modes_left_as_found(), fakes_of(given):
            walk.run(*given)
    except Exception as error:
        raise UnsuitedError(first_line(error)) from error
    return walk.handing_on


class _Strides(fx.Interpreter):
    """Runs the graph on fake tensors, with the strides that the chains' results and the masks for them will have."""

    def __init__(self, graph: fx.GraphModule, ends: dict[fx.Node, Match]) -> None:
        super().__init__(graph)
        self.ends, self.handing_on = ends, set[Match]()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        item = self.ends.get(n)
        if keeps_layout(n):  # outside chains only; inside it does not matter
            value = value.contiguous(memory_format=CHANNELS_LAST[value.dim() - 2])
        if item is not None and _hands_on(item):
            value = value.contiguous(memory_format=CHANNELS_LAST[item.chain.dims])
            self.handing_on.add(item)
        if isinstance(value, torch.Tensor) and "val" in n.meta:
            n.meta["val"] = value
        return value


def _hands_on(item: Match) -> bool:
    """Whether a chain's result can be channels-last: its input is, or has one channel. Never for a linear layer."""
    if item.chain.is_linear:
        return False
    x = item.tensors[0].meta["val"]
    is_whole = not any(isinstance(step, Reduce) for step in item.chain.steps)
    return is_whole and x.is_contiguous(memory_format=CHANNELS_LAST[item.chain.dims])


def keeps_layout(node: fx.Node) -> bool:
    """Whether `node` is a norm of a channels-last value that the operator can compute."""
    if node.op != "call_function" or spellings.norm(node) not in ("group_norm", "instance_norm"):
        return False
    call = spellings.arguments_of(node)
    x = call["input"].meta.get("val")
    if call.get("running_mean") is not None or not call.get("use_input_stats", True):
        return False
    return isinstance(x, torch.Tensor) and x.dim() > 3 and layout_of(x) == "channels_last"


def keep_layouts(graph: fx.GraphModule) -> None:
    """Replaces every norm that is not fused and whose result should be channels-last by an operator that keeps that."""
    for node in graph.graph.nodes:
        if not keeps_layout(node) or layout_of(node.meta["val"]) != "channels_last":
            continue
        call = spellings.arguments_of(node)
        dtype, given = node.meta["val"].dtype, call["input"].meta["val"]
        groups = call["num_groups"] if "num_groups" in call else given.shape[1]
        computed = _COMPUTED.get(dtype, dtype)
        node.args = (call["input"], call["weight"], call["bias"], groups, call["eps"], computed, dtype)
        node.kwargs, node.target = {}, torch.ops.postlude.norm.default


def conversions_in(graph: fx.GraphModule) -> tuple[Conversion, ...]:
    """The conversions that remain after those that change nothing are left out."""
    found = []
    for node in graph.graph.nodes:
        if node.target is not aten.contiguous.default or "memory_format" not in node.kwargs:
            continue
        value, given = node.meta["val"], node.args[0]
        if given.meta["val"].stride() != value.stride():
            is_last = node.kwargs["memory_format"] is not torch.contiguous_format
            reader = next(iter(node.users)) if is_last else given
            layout = "channels-last" if is_last else "contiguous"
            size = value.numel() * value.element_size()
            found.append(Conversion(site_name((reader,)), layout, tuple(value.shape), size))
    return tuple(found)


def hold(graph: fx.GraphModule) -> None:
    """Adds conversions to the graph where chains were planned for channels-last values.

    A compiler decomposes the operators between chains, and a decomposition may change the layout: upsampling in 3-D
    becomes indexing, whose result is contiguous, and so is a concatenation with it. The chain would then convert the
    value in a pass of its own (2.45 ms of the 10.4 ms GPU time of pytorch-3dunet's inference on an H200). With a
    conversion in the graph, the pass that writes the value writes it channels-last.
    """
    made, written = dict[fx.Node, fx.Node](), written_storages(graph)
    for node in [node for node in graph.graph.nodes if node.op == "call_module"]:
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            is_made_so = given.op in ("placeholder", "call_module") or given.target is aten.contiguous.default
            is_made_so = is_made_so or storage_of(given) in written
            if is_made_so or not isinstance(value, torch.Tensor) or layout_of(value) != "channels_last":
                continue
            if given not in made:
                with graph.graph.inserting_after(given):
                    made[given] = _converted(graph, given, CHANNELS_LAST[value.dim() - 2])
            node.replace_input_with(given, made[given])


def hold_convolutions(graph: fx.GraphModule) -> None:
    """Makes Inductor keep the channels-last inputs of PyTorch's convolutions.

    Where a value is written by a pass of its own, Inductor takes the layout of the convolution's operands for
    contiguous, except in 2-D, and cuDNN then converts them and its result (0.3 of the 1.2 ms GPU time of the inference
    of MONAI's UNet on an H200).
    """
    made, written = dict[fx.Node, fx.Node](), written_storages(graph)
    for node in [node for node in graph.graph.nodes if spellings.is_convolution(node)]:
        x = node.args[0]
        if not isinstance(x, fx.Node) or layout_of(x.meta["val"]) != "channels_last" or storage_of(x) in written:
            continue
        if x not in made:
            with graph.graph.inserting_before(node):
                made[x] = graph.graph.call_function(torch.ops.postlude.channels_last.default, (x,))
            made[x].meta = meta_for_another(x)
        node.replace_input_with(x, made[x])


def results_of(graph: fx.GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in graph.graph.output_node().all_input_nodes]


def raise_if_unsuited(graph: fx.GraphModule, before: Sequence[Any]) -> None:
    """Raises if a result that `restore_results` copies repeats its elements, or shares memory with another."""
    memories = [memory_of(was) for was in before]
    for _, was in _laid_out_anew(graph, before):
        if any(size > 1 and stride == 0 for size, stride in zip(was.shape, was.stride())):
            raise UnsuitedError("a result repeats its elements")
        if memories.count(memory_of(was)) > 1:
            raise UnsuitedError("results share memory")


def restore_results(graph: fx.GraphModule, before: Sequence[Any]) -> None:
    """Gives the graph's results the strides that they had before: `view` after them would raise otherwise. A view with
    gaps becomes dense in the same order of axes, of which every `view` works that worked before."""
    output = graph.graph.output_node()
    for node, was in _laid_out_anew(graph, before):
        axes = _axes_in_memory(was)
        with graph.graph.inserting_before(output):
            if axes == list(range(was.dim())):
                made = _converted(graph, node, torch.contiguous_format)
            else:
                stored = _converted(graph, _permuted(graph, node, axes), torch.contiguous_format)
                made = _permuted(graph, stored, [axes.index(axis) for axis in range(was.dim())])
            output.replace_input_with(node, made)


def _laid_out_anew(graph: fx.GraphModule, before: Sequence[Any]) -> list[tuple[fx.Node, torch.Tensor]]:
    """The results whose strides are others than before, and what they were."""
    pairs = zip(graph.graph.output_node().all_input_nodes, before, strict=True)
    values = [(node, node.meta.get("val"), was) for node, was in pairs]
    return [(n, was) for n, value, was in values if isinstance(value, torch.Tensor) and not _has_strides_of(value, was)]


def _has_strides_of(value: torch.Tensor, was: torch.Tensor) -> bool:
    """Whether the strides are equal, where a size is more than 1."""
    if value.is_contiguous() and was.is_contiguous():
        return True
    return all(one == other for one, other, size in zip(value.stride(), was.stride(), was.shape) if size != 1)


def _axes_in_memory(value: torch.Tensor) -> list[int]:
    """The axes from the outermost to the innermost in memory."""
    if value.is_contiguous():
        return list(range(value.dim()))
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda axis: (value.shape[axis] != 1, -strides[axis]))


def _permuted(graph: fx.GraphModule, node: fx.Node, axes: list[int]) -> fx.Node:
    made = graph.graph.call_function(aten.permute.default, (node, axes))
    made.meta = meta_for_another(node)
    made.meta["val"] = node.meta["val"].permute(axes)
    return made
