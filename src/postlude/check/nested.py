"""Values nested in lists, tuples and dicts, as models take and return them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    """The same nested value with `function` applied to everything that is no container."""
    if isinstance(item, dict):
        return type(item)((key, map_leaves(function, part)) for key, part in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(map_leaves(function, part) for part in item))
    if isinstance(item, (list, tuple)):
        return type(item)(map_leaves(function, part) for part in item)
    return function(item)


def map_tensors(function: Callable[[Tensor], Any], item: Any) -> Any:
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, item)


def named_leaves(name: str, item: Any) -> dict[str, Any]:
    """Everything in a nested value that is no container, with its place in the name."""
    if isinstance(item, dict):
        pairs = [(f"{name}[{key!r}]", part) for key, part in item.items()]
    elif isinstance(item, (list, tuple)):
        pairs = [(f"{name}[{index}]", part) for index, part in enumerate(item)]
    else:
        return {name: item}
    return {place: leaf for path, part in pairs for place, leaf in named_leaves(path, part).items()}


def named_tensors(name: str, item: Any) -> dict[str, Tensor]:
    return {place: leaf for place, leaf in named_leaves(name, item).items() if isinstance(leaf, Tensor)}


def tensors_in(item: Any) -> list[Tensor]:
    return list(named_tensors("", item).values())
