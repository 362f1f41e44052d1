"""The names of modules from which a graph's nodes come."""

from __future__ import annotations

import re

import torch.fx as fx
from torch import nn

_STACK = "nn_module_stack"  # of a node: for each module that was being called, {id: (path, class)}


def site_name(nodes: tuple[fx.Node, ...]) -> str:
    """The module in which the chain begins, by its name in `named_modules`; otherwise the node's name."""
    for node in nodes:
        stack = node.meta.get(_STACK)
        name = _name(list(stack.values())[-1][0]) if stack else ""
        if name:
            return name
    return nodes[0].name


def modules_called(graph: fx.GraphModule) -> frozenset[str]:
    """The ids of the modules in whose calls the graph's operators are."""
    keys = (key for node in graph.graph.nodes for key in node.meta.get(_STACK) or ())
    return frozenset(_id_of(key) for key in keys)


def name_from(graph: fx.GraphModule, model: nn.Module) -> None:
    """Gives modules in the graph their names in `model`. Dynamo names them as it reaches them, which after a graph
    break is from the frame that it then traces: `L['self'].conv` in all blocks alike."""
    known: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known.setdefault(str(id(module)), []).append(name)
    for node in graph.graph.nodes:
        stack = node.meta.get(_STACK)
        if stack:
            node.meta[_STACK] = {key: (_known(known, key, path), kind) for key, (path, kind) in stack.items()}


def _id_of(key: str) -> str:
    return key.partition("@")[0]  # "@1" marks a module's second call


def _known(known: dict[str, list[str]], key: str, path: str) -> str:
    names = known.get(_id_of(key), [])
    return path if not names or _name(path) in names else names[0]


def _name(path: str) -> str:
    inner = re.sub(r"^L\['\w+'\]", "", str(path))
    return re.sub(r"_modules\['([^']*)'\]", r"\1", inner).strip(".")
