"""Calls of PyTorch as text."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from postlude.export.syntax.trees import parsed
from postlude.plan.program import Buffer, TorchCall

_INFIX = {
    "add": "+",
    "__add__": "+",
    "sub": "-",
    "__sub__": "-",
    "mul": "*",
    "__mul__": "*",
    "div": "/",
    "__truediv__": "/",
}
_REFLECTED = {"__radd__": "+", "__rmul__": "*", "__rsub__": "-", "__rtruediv__": "/"}
_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
# Defaults of the arguments after a pool's kernel size; the stride's is the kernel size.
_POOLS = {"max_pool": (None, 0, 1, False), "avg_pool": (None, 0, False, True, None)}
# Calls whose result is a view of their argument: written where it is read, if it is read once.
VIEWS = frozenset({"__getitem__", "view", "reshape", "expand", "unsqueeze", "squeeze"})


class TorchText:
    """Writes calls of PyTorch. `words` names buffers by number; new tensors get the device of the tensor `first`."""

    def __init__(self, words: Mapping[int, str], first: Buffer) -> None:
        self.words, self.first = dict(words), first

    def value(self, item: Any) -> str:
        if isinstance(item, Buffer):
            return self.words[item.number]
        if isinstance(item, torch.dtype | torch.memory_format):
            return str(item)
        if isinstance(item, torch.device):
            return f"{self.value(self.first)}.device"
        if isinstance(item, list):
            return f"[{', '.join(map(self.value, item))}]"
        if isinstance(item, tuple):
            return f"({', '.join(map(self.value, item))}{',' * (len(item) == 1)})"
        if isinstance(item, slice):
            return ":".join("" if part is None else str(part) for part in (item.start, item.stop))
        if item is Ellipsis:
            return "..."
        if isinstance(item, float) and not math.isfinite(item):
            return f'float("{item}")'
        return f'"{item}"' if isinstance(item, str) else repr(item)

    def expression(self, call: TorchCall) -> str:
        name = call.function.rpartition(".")[2]
        arguments, keywords = list(call.arguments), dict(call.keywords)
        if call.function in ("torch.empty", "torch.zeros"):
            return self._allocation(name, arguments, keywords)
        if name == "__getitem__":
            index = self.value(arguments[1])
            return f"{self._owner(arguments[0])}[{index[1:-1] if isinstance(arguments[1], tuple) else index}]"
        if name in _INFIX and not keywords:
            return f"{self._term(arguments[0])} {_INFIX[name]} {self._term(arguments[1])}"
        if name in _REFLECTED:
            return f"{self._term(arguments[1])} {_REFLECTED[name]} {self._term(arguments[0])}"
        if name == "__get__":
            raise ValueError(f"{call.function} has no text")
        if name.startswith("conv") and call.function.startswith("torch.conv"):
            return self._convolution(name, arguments)
        if name[:8] in _POOLS and name[8:] in ("2d", "3d") and not keywords:
            return self._pool(name, arguments)
        if call.function == "torch.ops.aten.convolution_backward" and arguments[-1] == [True, True, False]:
            words = [*map(self.value, arguments[:-1]), "[needs[0], needs[1], False]"]
            return f"{call.function}({', '.join(words)})"
        if call.function.startswith("torch.ops."):
            return self._call(call.function, arguments, keywords)
        if call.function.startswith("Tensor."):
            if name == "contiguous" and keywords.get("memory_format") is torch.contiguous_format:
                keywords = {}
            kept = self._trimmed(getattr(torch.Tensor, name), arguments, keywords)
            if name in ("view", "reshape", "expand", "permute") and len(kept[0]) == 2 and isinstance(kept[0][1], tuple):
                kept = ([arguments[0], *kept[0][1]], kept[1])
            return self._call(f"{self._owner(arguments[0])}.{name}", kept[0][1:], kept[1])
        space: Any = F if call.function.startswith("F.") or not hasattr(torch, name) else torch
        if hasattr(F, name) and name not in ("tanh", "sigmoid") and callable(getattr(F, name)):
            space = F
        word = "F" if space is F else "torch"
        return self._call(f"{word}.{name}", *self._trimmed(getattr(space, name), arguments, keywords))

    def _allocation(self, name: str, arguments: list[Any], keywords: dict[str, Any]) -> str:
        shape = self.value(
            tuple(arguments[0]) if len(arguments) == 1 and not isinstance(arguments[0], int) else tuple(arguments)
        )
        dtype, form = keywords.get("dtype"), keywords.get("memory_format", torch.contiguous_format)
        first = self.value(self.first)
        word = "" if str(dtype) == f"torch.{self.first.dtype}" else f", dtype={dtype}"
        if form is torch.contiguous_format:
            return f"{first}.new_{name}({shape}{word})"
        return f"torch.{name}({shape}, dtype={dtype}, device={first}.device, memory_format={form})"

    def _convolution(self, name: str, arguments: list[Any]) -> str:
        words = _TRANSPOSED if "transpose" in name else _CONVOLUTION
        given = [self.value(item) for item in arguments[: 3 if arguments[2] is not None else 2]]
        for word, item in zip(words, arguments[3:]):
            default = 0 if "padding" in word else 1
            values = {item} if isinstance(item, int) else set(item)
            if values != {default}:
                given.append(f"{word}={values.pop() if len(values) == 1 else tuple(item)}")
        return f"F.{name}({', '.join(given)})"

    def _pool(self, name: str, arguments: list[Any]) -> str:
        """A pool, with one number for sizes that are equal and without arguments that equal their defaults."""
        value, *sizes = arguments
        sizes = [size[0] if isinstance(size, list | tuple) and len(set(size)) == 1 else size for size in sizes]
        defaults = [object(), *_POOLS[name[:8]]]
        defaults[1] = sizes[0]
        sizes[1:2] = [sizes[0] if size in ((), [], None) else size for size in sizes[1:2]]
        while len(sizes) > 1 and _equal(defaults[len(sizes) - 1], sizes[-1]):
            sizes.pop()
        return f"F.{name}({', '.join(map(self.value, [value, *sizes]))})"

    def _trimmed(
        self, function: Any, arguments: list[Any], keywords: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments without those that equal their defaults."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            plain = {"approximate": "none"}  # gelu, of which Python does not know the signature
            return arguments, {key: item for key, item in keywords.items() if item not in (None, plain.get(key))}
        keywords = {k: v for k, v in keywords.items() if k not in parameters or parameters[k].default is not v}
        names = list(parameters)
        while len(names) >= len(arguments) > 1 and _equal(parameters[names[len(arguments) - 1]].default, arguments[-1]):
            arguments = arguments[:-1]
        return arguments, keywords

    def _call(self, function: str, arguments: list[Any], keywords: dict[str, Any]) -> str:
        parts = [*map(self.value, arguments), *(f"{key}={self.value(item)}" for key, item in keywords.items())]
        return f"{function}({', '.join(parts)})"

    def _term(self, item: Any) -> str:
        text = self.value(item)
        return f"({text})" if isinstance(parsed(text), ast.BinOp | ast.UnaryOp) else text

    def _owner(self, item: Any) -> str:
        text = self.value(item)
        return f"({text})" if isinstance(parsed(text), ast.BinOp) else text


def _equal(default: Any, item: Any) -> bool:
    return type(default) is type(item) and default == item
