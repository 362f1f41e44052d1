"""A forward as text: one statement for each call, chains by their launchers where the tensors fit."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F

from postlude.errors import PostludeError
from postlude.export.chain_text import ChainText
from postlude.export.layout import call, comment
from postlude.export.trace import FoundChain, Traced

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.matmul: "@",
    operator.pow: "**",
    operator.mod: "%",
    operator.eq: "==",
    operator.lt: "<",
    operator.gt: ">",
    operator.le: "<=",
    operator.ge: ">=",
}
_IN_PLACE = {operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/="}

ORIGINAL = "\0"  # stands for the statements of the original forward


class ForwardText:
    """Statements of the forward; `chains` are those that have kernels."""

    def __init__(self, traced: Traced, chains: Mapping[FoundChain, ChainText], reasons: Mapping[str, str]) -> None:
        self.traced, self.chains, self.reasons = traced, chains, reasons
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []
        self.inside = {node: chain for chain in chains for node in chain.calls}
        self.place = {node: number for number, node in enumerate(traced.graph.nodes)}

    def write(self) -> list[str]:
        for node in self.traced.graph.nodes:
            chain = self.inside.get(node)
            if node.op == "placeholder":
                self.names[node] = str(node.target)
            elif chain is not None:
                if node is chain.calls[-1]:
                    self._chain(chain)
            elif node.op == "output":
                self._return(node)
            elif node.op != "get_attr":
                if node.name in self.reasons:
                    self.lines += comment(f"Left to PyTorch: {self.reasons[node.name]}.", 8)
                self._statement(node)
        return self.lines

    def _chain(self, chain: FoundChain) -> None:
        """The launcher where everything fits it, else the calls as they were written."""
        last = chain.calls[-1]
        tensors = [self.value(item) if isinstance(item, fx.Node) else _attribute(item) for item in chain.tensors]
        self.lines += _tensors(tensors, set(self.names.values()))
        ends = [user.op for user in last.users] == ["output"] and not self._is_inside_result(last)
        name = "" if ends else self._name(last, chain.calls[0])
        text = self.chains[chain]
        modes = [f"{'' if mode else 'not '}{_attribute(path)}.training" for path, mode in chain.modes]
        checks = ["self.has_kernels", *modes, f"fits(tensors, {text.shapes_name})"]
        self.lines.append(f"        if {' and '.join(checks)}:")
        self.lines += [f"            {_attribute(path)}.add_(1)" for path in chain.counters]
        self.lines.append(f"            with torch.cuda.device_of({tensors[0]}):")
        self.lines.append(f"                {'return' if ends else f'{name} ='} {text.called}(*tensors)")
        if ends:
            self.lines += self._plain(chain, "        ", "return ")
            self.names[last] = ""
        else:
            self.lines += ["        else:", *self._plain(chain, " " * 12, f"{name} = ")]
            self.names[last] = name

    def _plain(self, chain: FoundChain, pad: str, start: str) -> list[str]:
        """The calls of a chain as they were: one expression where that is short and computes nothing twice."""
        last, calls = chain.calls[-1], set(chain.calls)
        if start == "return " and all(node in calls for node in self.traced.graph.nodes if node.op.startswith("call")):
            return [ORIGINAL]
        inner = [node for node in chain.calls if node is not last and not _is_question(node)]
        line = f"{pad}{start}{self.nested(last, calls)}"
        if len(line) <= 88 and all(len(node.users) == 1 for node in inner):
            return [line]
        kept, lines = dict(self.names), []
        for node in (node for node in self.traced.graph.nodes if node in calls):
            text = self.expression(node)
            if node is last:
                lines.append(f"{pad}{start}{text}")
            elif _is_question(node):
                self.names[node] = text
            else:
                self.names[node] = self._inner_name(node)
                lines.append(f"{pad}{self.names[node]} = {text}")
        self.names = kept
        return lines

    def _inner_name(self, node: fx.Node) -> str:
        """As `_name`, inside of a chain."""
        for source in node.all_input_nodes:
            last = max(self.place[user] for user in source.users)
            if source in self.names and last <= self.place[node] and self.names[source].isidentifier():
                return self.names[source]
        taken = set(self.names.values())
        return next(name for name in ("y", "z", "value", *(f"value{i}" for i in range(2, 999))) if name not in taken)

    def _is_inside_result(self, node: fx.Node) -> bool:
        return not any(user.args[0] is node for user in node.users)

    def _return(self, node: fx.Node) -> None:
        result = node.args[0]
        if isinstance(result, fx.Node) and self.names.get(result) == "":
            return
        if self.lines and isinstance(result, fx.Node):
            text = re.fullmatch(rf"        {self.names.get(result)} = (.+)", self.lines[-1])
            if text is not None:
                self.lines[-1] = f"        return {text[1]}"
                return
        self.lines.append(f"        return {self.value(result)}")

    def _statement(self, node: fx.Node) -> None:
        if _is_question(node):
            self.names[node] = self.expression(node)
            return
        if node.target in _IN_PLACE:
            name, other = (self.value(item) for item in node.args)
            self.lines.append(f"        {name} {_IN_PLACE[node.target]} {other}")
            self.names[node] = name
            return
        text = self.expression(node)
        if node.users:
            name = self._name(node, node)
            self.lines.append(f"        {name} = {text}")
            self.names[node] = name
        else:
            self.lines.append(f"        {text}")

    def _name(self, node: fx.Node, first: fx.Node) -> str:
        """The name of what it is made from, where nobody reads that later; else one of its own."""
        for source in first.all_input_nodes:
            last = max((self.place[self._written_at(user)] for user in source.users), default=0)
            if source in self.names and last <= self.place[node] and self.names[source].isidentifier():
                return self.names[source]
        taken = {*self.names.values(), "tensors"}
        stem = re.sub(r"_\d+$", "", node.name)
        return next(name for name in ("y", "z", stem, *(f"{stem}{i}" for i in range(2, 999))) if name not in taken)

    def _written_at(self, node: fx.Node) -> fx.Node:
        """A chain is written where its last call was."""
        chain = self.inside.get(node)
        return node if chain is None else chain.calls[-1]

    def nested(self, node: fx.Node, inside: set[fx.Node]) -> str:
        """One expression of all the calls of a chain."""
        kept = dict(self.names)
        for item in self.traced.graph.nodes:
            if item in inside:
                text = self.expression(item)
                is_infix = item.target in (*_INFIX, *_IN_PLACE) and item is not node
                self.names[item] = f"({text})" if is_infix else text
        text = self.names[node]
        self.names = kept
        return text

    def expression(self, node: fx.Node) -> str:
        arguments = [self.value(item) for item in node.args]
        if node.op != "call_method" and node.target not in (*_INFIX, *_IN_PLACE, getattr, operator.getitem):
            arguments = list(map(_bare, arguments))
        given = {key: item for key, item in node.kwargs.items() if not _is_default(node, key, item)}
        named = [f"{key}={_bare(self.value(item))}" for key, item in given.items()]
        if node.op == "call_module":
            return f"{_attribute(str(node.target))}({', '.join([*arguments, *named])})"
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join([*arguments[1:], *named])})"
        if node.op == "get_attr":
            return _attribute(str(node.target))
        if node.target in _IN_PLACE:  # inside a chain: its value is nobody else's
            return f"{arguments[0]} {_IN_PLACE[node.target][:-1]} {arguments[1]}"
        if node.target in _INFIX:
            return f"{arguments[0]} {_INFIX[node.target]} {arguments[1]}"
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1].removeprefix('(').removesuffix(')')}]"
        if node.target is getattr:
            return f"{arguments[0]}.{node.args[1]}"
        return f"{_function(node.target)}({', '.join([*arguments, *named])})"

    def value(self, item: Any) -> str:
        if isinstance(item, fx.Node):
            return _attribute(str(item.target)) if item.op == "get_attr" else self.names[item]
        if isinstance(item, (list, tuple)):
            parts = [self.value(part) for part in item]
            if isinstance(item, list):
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{self.value(key)}: {self.value(part)}" for key, part in item.items()) + "}"
        if isinstance(item, slice):
            words = ["" if part is None else self.value(part) for part in (item.start, item.stop)]
            return ":".join(words) + (f":{self.value(item.step)}" if item.step is not None else "")
        return literal(item)


def _is_question(node: fx.Node) -> bool:
    """x.shape, x.shape[2:], x.size(0): no tensor, and asked where it is needed."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_question(node.args[0])
    return node.target in (getattr, "size", "dim")


def _is_default(node: fx.Node, key: str, item: Any) -> bool:
    if node.op != "call_function" or isinstance(item, fx.Node):
        return False
    try:
        parameter = inspect.signature(node.target).parameters.get(key)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin
        return False
    return parameter is not None and type(parameter.default) is type(item) and parameter.default == item


def _bare(text: str) -> str:
    """Without the parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            is_tuple = text.endswith(",)") or isinstance(ast.parse(text, mode="eval").body, ast.Tuple)
            return text[1:-1] if place == len(text) - 1 and not is_tuple else text
    return text


def _tensors(expressions: list[str], taken: set[str]) -> list[str]:
    """`tensors = (…)`; where that is too long, modules go by a name first."""
    if len(expressions) == 1:
        return [f"        tensors = ({expressions[0]},)"]
    lines = call("", expressions, "tensors = ", indent=8)
    owners = dict.fromkeys(e.rpartition(".")[0] for e in expressions if e.startswith("self."))
    names = {owner: re.sub(r"\W+", "_", owner.rpartition(".")[2]).strip("_") for owner in owners if owner != "self"}
    is_free = len(set(names.values())) == len(names) and taken.isdisjoint(names.values())
    if len(lines) == 1 or not names or not is_free:
        return lines
    short = [f"{names[owner]}.{last}" if (owner := e.rpartition(".")[0]) in names else e
             for e in expressions for last in [e.rpartition(".")[2]]]  # fmt: skip
    alias = f"        {', '.join(names.values())} = {', '.join(names)}"
    return [alias, *call("", short, "tensors = ", indent=8)]


def literal(item: Any) -> str:
    """A value that a file can hold, as source."""
    if item is Ellipsis:
        return "..."
    if isinstance(item, (torch.dtype, torch.memory_format)):
        return str(item)
    if isinstance(item, str):
        return '"' + repr(item)[1:-1].replace('"', '\\"') + '"'
    if isinstance(item, (list, tuple)):
        parts = ", ".join(map(literal, item))
        return f"[{parts}]" if isinstance(item, list) else f"({parts}{',' * (len(item) == 1)})"
    if item is None or isinstance(item, (bool, int, float)):
        return repr(item)
    raise PostludeError(f"a value of type {type(item).__name__} cannot be written to a file.")


def _attribute(path: str) -> str:
    """self.blocks[0].weight, of blocks.0.weight."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))


def _function(target: Any) -> str:
    name = getattr(target, "__name__", "")
    for space, word in ((F, "F"), (torch, "torch")):
        if getattr(space, name, None) is target:
            return f"{word}.{name}"
    raise PostludeError(f"the forward calls {name or target}, which cannot be written as a call of torch.")
