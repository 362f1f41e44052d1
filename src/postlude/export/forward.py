"""The forward method as text: one statement per call, with a chain's launcher where the tensors fit."""

from __future__ import annotations

import ast
import copy
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.fx.graph import inplace_methods, magic_methods

from postlude.errors import PostludeError
from postlude.export.chain_text import ChainText
from postlude.export.masks import Drawn
from postlude.export.syntax.layout import WIDTH, comment, laid_out
from postlude.export.syntax.rules import Replaced
from postlude.export.syntax.source import written
from postlude.export.syntax.trees import parsed
from postlude.export.trace import FoundChain, Traced
from postlude.graph.rows import FLATTENED, has_row_axes

ORIGINAL = "\0"  # stands for the statements of the original forward


class ForwardText:
    """Statements of the forward; `chains` are those that have kernels."""

    def __init__(self, traced: Traced, chains: Mapping[FoundChain, ChainText], reasons: Mapping[str, str]) -> None:
        self.traced, self.chains, self.reasons = traced, chains, reasons
        self.names: dict[fx.Node, ast.expr] = {}  # the name of each value
        self.lines: list[str] = []
        self.inside = {node: chain for chain in chains for node in chain.calls}
        self.place = {node: number for number, node in enumerate(traced.graph.nodes)}

    def write(self) -> list[str]:
        for node in self.traced.graph.nodes:
            chain = self.inside.get(node)
            if node.op == "placeholder":
                self.names[node] = ast.Name(str(node.target))
            elif chain is not None:
                if node is chain.calls[-1]:
                    self._chain(chain)
            elif node.op == "output":
                self._return(node.args[0])
            elif node.op != "get_attr":
                if node.name in self.reasons:
                    self.lines += comment(f"Left to PyTorch: {self.reasons[node.name]}.", 8)
                self._statement(node)
        return self.lines

    def _chain(self, chain: FoundChain) -> None:
        """The launcher if all tensors fit it, else the original calls."""
        last, text = chain.calls[-1], self.chains[chain]
        given = [item for item in chain.tensors if not isinstance(item, Drawn)]
        tensors = [written(self.value(item)) if isinstance(item, fx.Node) else _path(item) for item in given]
        masks, x = self._masks(chain, tensors[0]), tensors[0]
        read, result = _of_rows(chain, [*tensors, *masks], f"{text.called}({{}})", x)
        self.lines += _tensors(read[: len(tensors)], self._taken())
        ends = all(user.op == "output" and user.args[0] is last for user in last.users)
        start = "return" if ends else f"{self._name(last, chain.calls[0])} ="
        modes = [f"{'' if mode else 'not '}{_path(path)}.training" for path, mode in chain.modes]
        checks = ["self.has_kernels", *modes, f"fits(tensors, {text.shapes_name})"]
        self.lines += [
            f"        if {' and '.join(checks)}:",
            *(f"            {_path(path)}.add_(1)" for path in chain.counters),
            *(f"            {line}" for lines in masks.values() for line in lines),
            f"            with torch.cuda.device_of({x}):",
            f"                {start} {result.format(', '.join(['*tensors', *read[len(tensors) :]]))}",
            *([] if ends else ["        else:"]),
            *self._plain(chain, f"{' ' * (8 if ends else 12)}{start} "),
        ]
        if not ends:
            self.names[last] = ast.Name(start.removesuffix(" ="))

    def _masks(self, chain: FoundChain, x: str) -> dict[str, list[str]]:
        """A name for each mask that the chain's dropouts draw, and the statements that draw it."""
        drawn, dtype = (
            [item for item in chain.tensors if isinstance(item, Drawn)],
            chain.match.tensors[0].meta["val"].dtype,
        )
        free = (name for name in ("mask", *(f"mask{i}" for i in range(2, 99))) if name not in self._taken())
        return {name: item.lines(name, x, dtype) for name, item in zip(free, drawn)}

    def _plain(self, chain: FoundChain, start: str) -> list[str]:
        """The original calls of a chain, as one expression if that is short and computes nothing twice."""
        *calls, last = (node for node in self.traced.graph.nodes if node in chain.calls)
        is_all = all(node in chain.calls for node in self.traced.graph.nodes if node.op.startswith("call"))
        if is_all and start.endswith("return "):
            return [ORIGINAL]
        kept, pad, lines = dict(self.names), start[: len(start) - len(start.lstrip())], list[str]()
        for node in calls:
            self.names[node] = self.expression(node)
        line = f"{start}{written(self.expression(last))}"
        if len(line) > WIDTH or any(len(node.users) > 1 and not _is_question(node) for node in calls):
            self.names = dict(kept)
            for node in calls:
                expression = self.expression(node)
                if not _is_question(node):
                    name = self._name(node, node, is_inner=True)
                    lines.append(f"{pad}{name} = {written(expression)}")
                    expression = ast.Name(name)
                self.names[node] = expression
            line = f"{start}{written(self.expression(last))}"
        self.names = kept
        return [*lines, line]

    def _return(self, result: Any) -> None:
        if isinstance(result, fx.Node) and result in self.inside and result not in self.names:
            return  # the chain has returned it
        text = written(self.value(result))
        last = re.fullmatch(rf"        {re.escape(text)} = (.+)", self.lines[-1]) if self.lines else None
        if last is not None:
            self.lines.pop()
        self.lines.append(f"        return {text if last is None else last[1]}")

    def _statement(self, node: fx.Node) -> None:
        expression = self.expression(node)
        if _is_question(node):
            self.names[node] = expression
        elif (sign := inplace_methods.get(getattr(node.target, "__name__", ""))) is not None:
            self.lines.append(f"        {sign.format(*(written(self.value(item)) for item in node.args))}")
            self.names[node] = self.value(node.args[0])
        elif node.users:
            name = self._name(node, node)
            self.lines.append(f"        {name} = {written(expression)}")
            self.names[node] = ast.Name(name)
        else:
            self.lines.append(f"        {written(expression)}")

    def _taken(self) -> set[str]:
        return {name.id for name in self.names.values() if isinstance(name, ast.Name)}

    def _name(self, node: fx.Node, first: fx.Node, is_inner: bool = False) -> str:
        """The name of the value that it replaces, if that is not read later; otherwise a new one.

        A chain is written at the place of its last call, except if one of its own calls is named.
        """
        for source in first.all_input_nodes:
            chains = [None if is_inner else self.inside.get(user) for user in source.users]
            users = [user if chain is None else chain.calls[-1] for user, chain in zip(source.users, chains)]
            name = self.names.get(source)
            if isinstance(name, ast.Name) and all(self.place[user] <= self.place[node] for user in users):
                return name.id
        taken = {*self._taken(), "tensors"}
        stem = "value" if is_inner else re.sub(r"_\d+$", "", node.name)
        return next(name for name in ("y", "z", stem, *(f"{stem}{i}" for i in range(2, 999))) if name not in taken)

    def expression(self, node: fx.Node) -> ast.expr:
        arguments = [self.value(item) for item in node.args]
        name = getattr(node.target, "__name__", "")
        if node.op == "call_module":
            function = parsed(_path(str(node.target)))
        elif node.op == "call_method":
            function = ast.Attribute(arguments.pop(0), str(node.target))
        elif node.target is getattr:
            return ast.Attribute(arguments[0], str(node.args[1]))
        elif getattr(operator, name, None) is node.target and name in {**magic_methods, **inplace_methods}:
            # Nothing else reads a value that is changed in place inside a chain.
            sign = magic_methods.get(name) or inplace_methods[name].replace("=", "")
            words = {f"_{number}": argument for number, argument in enumerate(arguments)}
            return Replaced(words).visit(parsed(sign.format(*words)))  # type: ignore[no-any-return]
        else:
            function = _function(node.target)
        given = {key: item for key, item in node.kwargs.items() if not _is_default(node, key, item)}
        return ast.Call(function, arguments, [ast.keyword(key, self.value(item)) for key, item in given.items()])

    def value(self, item: Any) -> ast.expr:
        return _value(item, lambda node: copy.deepcopy(self.names[node]))


def _of_rows(chain: FoundChain, tensors: list[str], result: str, x: str) -> tuple[list[str], str]:
    """The tensors as the kernels read them, and the result as the model does: rows of several axes are one matrix.

    This comes before the check of shapes, so it works for a single row too.
    """
    found = chain.match
    if not has_row_axes(found.chain, found.tensors[0].meta["val"]):
        return tensors, result
    pairs = zip(tensors, found.chain.roles, strict=True)
    read = [f"{tensor}.reshape(-1, {tensor}.shape[-1])" if role in FLATTENED else tensor for tensor, role in pairs]
    return read, f"{result}.unflatten(0, {x}.shape[:-1])"


def _value(item: Any, of: Callable[[fx.Node], ast.expr] | None = None) -> ast.expr:
    if isinstance(item, fx.Node) and of is not None:
        return parsed(_path(str(item.target))) if item.op == "get_attr" else of(item)
    if isinstance(item, list | tuple):
        parts = [_value(part, of) for part in item]
        return ast.List(parts) if isinstance(item, list) else ast.Tuple(parts)
    if isinstance(item, dict):
        return ast.Dict([_value(key, of) for key in item], [_value(part, of) for part in item.values()])
    if isinstance(item, slice):
        return ast.Slice(*(None if part is None else _value(part, of) for part in (item.start, item.stop, item.step)))
    if isinstance(item, torch.dtype | torch.memory_format):
        return parsed(str(item))
    if item is None or item is Ellipsis or isinstance(item, bool | int | float | str):
        return ast.Constant(item)
    raise PostludeError(f"a value of type {type(item).__name__} cannot be written to a file.")


def literal(item: Any) -> str:
    """A value as source text, if a file can hold it."""
    return written(_value(item))


def _is_question(node: fx.Node) -> bool:
    """Whether a node is x.shape, x.shape[2:], x.size(0) or the like: not a tensor, and written where it is read."""
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


def _tensors(expressions: list[str], taken: set[str]) -> list[str]:
    """`tensors = (…)`; if that is too long, modules get names first."""
    if len(expressions) == 1:
        return [f"        tensors = ({expressions[0]},)"]
    lines = laid_out("", expressions, "tensors = ", indent=8)
    owners = dict.fromkeys(e.rpartition(".")[0] for e in expressions if e.startswith("self."))
    names = {owner: re.sub(r"\W+", "_", owner.rpartition(".")[2]).strip("_") for owner in owners if owner != "self"}
    is_free = len(set(names.values())) == len(names) and taken.isdisjoint(names.values())
    if len(lines) == 1 or not names or not is_free:
        return lines
    parts = [e.rpartition(".") for e in expressions]
    short = [f"{names.get(owner, owner)}{dot}{last}" for owner, dot, last in parts]
    alias = f"        {', '.join(names.values())} = {', '.join(names)}"
    return [alias, *laid_out("", short, "tensors = ", indent=8)]


def _path(path: str) -> str:
    """self.blocks[0].weight for blocks.0.weight."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))


def _function(target: Any) -> ast.expr:
    name = getattr(target, "__name__", "")
    for space, word in ((F, "F"), (torch, "torch")):
        if getattr(space, name, None) is target:
            return parsed(f"{word}.{name}")
    raise PostludeError(f"the forward calls {name or target}, which cannot be written as a call of torch.")
