"""Makes in-place operators functional where that is safe, and restores those that were not fused."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

from postlude.graph.rows import is_chains_result

aten = torch.ops.aten
_DROPOUTS = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.dropout_, aten.feature_dropout_)


def functionalise(graph: fx.GraphModule) -> None:
    """Makes in-place operators functional if their value is private and has no views; later readers read the result.

    In-place operators on anything else (a view, an input, a parameter) stay as they are.
    """
    _erase_inactive_dropout(graph)
    _erase_copies(graph)
    nodes = list(graph.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    aliases: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        aliases.setdefault(storage_of(node), []).append(node)
    for node in nodes:
        twin = _functional_twin(node)
        if twin is None or not isinstance(before := node.args[0], fx.Node):
            continue
        family = aliases[storage_of(node)]
        if any(member.op in ("placeholder", "get_attr") for member in family):
            continue
        if any(_functional_twin(member) is None and "in_place" not in member.meta for member in family[1:]):
            continue

        def reads_later(user: fx.Node, change: fx.Node = node) -> bool:
            return place[user] > place[change]

        before.replace_all_uses_with(node, delete_user_cb=reads_later)
        node.meta["in_place"] = node.target
        node.target = twin


def meta_for_another(node: fx.Node) -> dict[str, Any]:
    """The metadata of `node` for a node that takes its place or is inserted beside it, which was not in place."""
    return {key: value for key, value in node.meta.items() if key != "in_place"}


def restore(graph: fx.GraphModule) -> None:
    """Makes operators that were not fused in-place again, to save memory as in eager, except on a chain's result.

    Dropout is in place there too: on a GPU `dropout` draws other numbers than `dropout_`.
    """
    for node in [node for node in graph.graph.nodes if "in_place" in node.meta]:
        if not is_chains_result(node.args[0]) or node.target.overloadpacket in _DROPOUTS:
            node.target = node.meta["in_place"]
        else:
            _keep_dtype(graph, node)


def _keep_dtype(graph: fx.GraphModule, node: fx.Node) -> None:
    """Casts the result back: in place a value keeps its dtype, but the functional operator promotes, or autocast
    casts."""
    users = list(node.users)
    with graph.graph.inserting_after(node):
        kept = graph.graph.call_function(aten.to.dtype, (node, node.meta["val"].dtype))
    kept.meta["val"] = node.meta["val"]
    for user in users:
        user.replace_input_with(node, kept)


def storage_of(node: Any) -> Any:
    """A key that two nodes share when their tensors share memory; None for what is not a tensor."""
    return memory_of(node.meta.get("val")) if isinstance(node, fx.Node) else None


def memory_of(value: Any) -> Any:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def mutated_storages(node: fx.Node) -> set[Any]:
    """The memory that a node writes to, by its schema. detach_ does not count: it changes no number."""
    if node.target is aten.batch_norm.default and node.args[5]:  # its schema does not say so
        return {storage_of(node.args[3]), storage_of(node.args[4])} - {None}
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return set()
    if node.target is aten.detach_.default:
        return set()
    arguments = node.target._schema.arguments
    written = [given for given, argument in zip(node.args, arguments) if _is_written(argument)]
    written += [
        node.kwargs[argument.name] for argument in arguments if _is_written(argument) and argument.name in node.kwargs
    ]
    return {storage_of(item) for item in written} - {None}


def written_storages(graph: fx.GraphModule) -> set[Any]:
    """The memory that some node of the graph writes to. What is read of it depends on where it is read."""
    return {storage for node in graph.graph.nodes for storage in mutated_storages(node)}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _functional_twin(node: fx.Node) -> OpOverload | None:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if not (schema.name.startswith("aten::") and schema.name.endswith("_") and schema.arguments):
        return None
    if not _is_written(schema.arguments[0]):
        return None
    packet = getattr(aten, schema.name[len("aten::") : -1], None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    # By arguments, not by name: pow_.Scalar has a number as exponent, pow.Scalar has a number as base.
    return next((twin for twin in overloads if _takes(twin) == _takes(node.target)), None)


def _takes(overload: OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments. The first one's name does not count: dropout has "input", dropout_ "self"."""
    arguments = overload._schema.arguments
    return [(argument.name if number else "", str(argument.type)) for number, argument in enumerate(arguments)]


def _erase_inactive_dropout(graph: fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        if isinstance(node.target, OpOverload) and node.target.overloadpacket in _DROPOUTS:
            probability, is_training = node.args[1], node.args[2]
            if probability == 0 or not is_training:
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)


def _erase_copies(graph: fx.GraphModule) -> None:
    """Removes `clone` of an intermediate value if nothing writes to either and neither is a result of the graph."""
    nodes = list(graph.graph.nodes)
    touched = written_storages(graph)
    touched |= {storage_of(node) for node in nodes if node.op in ("placeholder", "get_attr")}
    for node in nodes:
        if node.op == "output":
            touched |= {storage_of(value) for value in node.all_input_nodes}
    for node in nodes:
        if node.target is aten.clone.default and node.kwargs.get("memory_format") in (None, torch.preserve_format):
            source = node.args[0]
            if touched.isdisjoint({storage_of(source), storage_of(node)}):
                node.replace_all_uses_with(source)
                graph.graph.erase_node(node)
