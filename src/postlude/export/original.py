"""The parts of a problem's file that its model needs: imports, helpers, and the class, to be written as `ModelNew`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from postlude.errors import PostludeError
from postlude.export.forward import ORIGINAL, literal
from postlude.export.syntax.layout import WIDTH, fold, laid_out, one_paragraph, parts_of
from postlude.export.syntax.plain_source import MODEL, NEW, first_row, is_docstring, plain_source

_TORCH = ("torch", "triton")
_FUNCTIONS = ("get_inputs", "get_init_inputs")
_SENTENCE = re.compile(r'(?m)^( +)"""\n\s*((?:[^"\\\n:]+\n)+)\s*"""$')


@dataclass(frozen=True)
class Original:
    """The parts of a file that its model needs, as text in the form of plain_source.py."""

    imports: tuple[str, ...]
    helpers: tuple[str, ...]  # assignments, functions and classes above the model, in order
    model: ast.ClassDef
    source: str
    names: frozenset[str]  # what the imports and helpers are called


def read(source: str) -> Original:
    before = ast.parse(source).body
    source = plain_source(source)
    tree = ast.parse(source)
    model = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == NEW), None)
    if model is None:
        raise PostludeError(f"{MODEL} is not a class of the file itself, so it cannot be written to another one.")
    defined: dict[str, ast.stmt] = {}
    for statement in tree.body:
        for name in _defined_names(statement):
            defined[name] = statement
    needed = _needed(source, model, defined)
    imports = [n for n in tree.body if n in needed and isinstance(n, ast.Import | ast.ImportFrom)]
    for statement in imports:
        _check_import(statement)
    others = [n for n in tree.body if n in needed and n not in imports and n is not model]
    for written, statement in zip(before, tree.body, strict=True):
        if statement is model or statement in others:
            _check_methods(written)  # in the user's own lines
    texts = tuple(fold(_text(source, n)) for n in others)
    names = frozenset(name for name, statement in defined.items() if statement in needed)
    return Original(tuple(_import_lines(imports, model, others, defined)), texts, model, source, names)


def _defined_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.split(".")[0] for alias in _imported(statement)]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [] if statement.name in _FUNCTIONS else [statement.name]
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _imported(statement: ast.Import | ast.ImportFrom) -> list[ast.alias]:
    """What an import statement imports. A star is every name that it stands for: the file has run, so its modules are
    there."""
    if not isinstance(statement, ast.ImportFrom) or statement.level or statement.names[0].name != "*":
        return statement.names
    module = importlib.import_module(str(statement.module))
    public = [name for name in vars(module) if not name.startswith("_")]
    return [ast.alias(name) for name in getattr(module, "__all__", public)]


def _needed(source: str, model: ast.stmt, defined: Mapping[str, ast.stmt]) -> set[ast.stmt]:
    """The statements that define names which the model reads, directly or indirectly."""
    found, left = set[ast.stmt](), [model]
    while left:
        table = symtable.symtable(_text(source, left.pop()), "", "exec")
        for name in _read_outside(table, is_file=True):
            statement = defined.get(name)
            if statement is not None and statement not in found and statement is not model:
                found.add(statement)
                left.append(statement)
    return found


def _read_outside(table: symtable.SymbolTable, is_file: bool = False) -> set[str]:
    """Names that a text reads but its functions do not bind."""
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_file or s.is_global())}
    return names.union(*(_read_outside(child) for child in table.get_children()))


def _check_import(statement: ast.Import | ast.ImportFrom) -> None:
    is_relative = isinstance(statement, ast.ImportFrom) and statement.level > 0
    names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [a.name for a in statement.names]
    for name in names:
        root = name.split(".")[0]
        if is_relative or (root not in _TORCH and root not in sys.stdlib_module_names):
            raise PostludeError(f"the model needs {root or 'its own package'}, which one file cannot hold.")


def _check_methods(statement: ast.stmt) -> None:
    """Refuses context managers and try blocks: a trace of the forward does not see them."""
    for function in ast.walk(statement):
        if isinstance(function, ast.FunctionDef) and function.name != "__init__":
            for node in ast.walk(function):
                if isinstance(node, ast.With | ast.Try):
                    word = "with" if isinstance(node, ast.With) else "try"
                    raise PostludeError(
                        f"{function.name} has a `{word}` block (line {node.lineno}), which calls in a row cannot hold."
                    )


def _import_lines(
    imports: Sequence[ast.stmt], model: ast.ClassDef, others: Sequence[ast.stmt], defined: Mapping[str, ast.stmt]
) -> list[str]:
    """One import per name, so that unused ones can be left out and the rest sorted."""
    read = {n.id for part in (model, *others) for n in ast.walk(part) if isinstance(n, ast.Name)}
    lines = []
    for statement in imports:
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in _imported(statement):
            name = alias.asname or alias.name.split(".")[0]
            if name in read and defined[name] is statement:
                end = f" as {alias.asname}" if alias.asname else ""
                start = f"from {statement.module} " if isinstance(statement, ast.ImportFrom) else ""
                line = f"{start}import {alias.name}{end}"
                lines.append("from torch import nn" if line == "import torch.nn as nn" else line)
    return lines


def _text(source: str, node: ast.stmt) -> str:
    return "\n".join(line.rstrip() for line in source.splitlines()[first_row(node) - 1 : node.end_lineno]) + "\n"


def model_text(
    original: Original, forward: Sequence[str], values: Mapping[str, Any], reads_settings: bool = False
) -> str:
    """The class with a new name and forward. It records whether it was built with the problem's arguments."""
    node, rows = original.model, original.source.splitlines()
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    if "forward" not in methods:
        raise PostludeError("Model has no forward of its own, so none can be written.")
    texts: dict[ast.stmt, list[str]] = {n: _text(original.source, n).splitlines() for n in node.body}
    texts[methods["forward"]] = _forward_text(texts[methods["forward"]], methods["forward"], forward, reads_settings)
    lines = [line.rstrip() for line in rows[first_row(node) - 1 : first_row(node.body[0]) - 1]]
    if "__init__" in methods:
        texts[methods["__init__"]] += _known(values)
    else:
        lines += ["    has_kernels = True", ""]
    for statement, after in zip(node.body, [*node.body[1:], None]):
        assert statement.end_lineno is not None
        lines += texts[statement]
        if after is not None:
            gap = [line.rstrip() for line in rows[statement.end_lineno : first_row(after) - 1]]
            is_apart = isinstance(statement, ast.FunctionDef) or is_docstring(statement)
            lines += ["", *gap] if is_apart and not (gap and not gap[0]) else gap
    return fold(_SENTENCE.sub(one_paragraph, "\n".join(lines) + "\n"))


def _known(values: Mapping[str, Any]) -> list[str]:
    """Statements that check whether the arguments are those for which the kernels were written."""
    names, wanted = list(values), [literal(value) for value in values.values()]
    if len(values) < 2:
        return [f"        self.has_kernels = {f'{names[0]} == {wanted[0]}' if values else True}"]
    line = f"        self.has_kernels = ({', '.join(names)}) == ({', '.join(wanted)})"
    if len(line) <= WIDTH:
        return [line]
    return [
        *laid_out("", names, "arguments = ", indent=8),
        *laid_out("", wanted, "self.has_kernels = arguments == ", indent=8),
    ]


def reads_settings(original: Original, model: nn.Module) -> bool:
    """Whether a method of the model reads attributes that are neither modules nor tensors, such as its arguments."""
    methods = [n for n in original.model.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
    nodes = [node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}
    held = {*model._modules, *model._parameters, *model._buffers}
    return any(name not in held and not callable(getattr(model, name, len)) for name in names)


def _forward_text(lines: list[str], old: ast.FunctionDef, body: Sequence[str], reads_settings: bool) -> list[str]:
    """The method with `body`, in which the original statements replace their placeholder."""
    start, head = first_row(old), _typed(old)
    first, *others = old.body
    if is_docstring(first) and others:
        head += lines[first.lineno - start : (first.end_lineno or first.lineno) - start + 1]
        first = others[0]
    own = textwrap.indent(textwrap.dedent("\n".join(lines[first.lineno - start :])), " " * 8).splitlines()
    own = [re.sub(r" *# (?:type: ignore|noqa).*", "", line) for line in own]
    own = [re.sub(r"(?<=\S) *#(?= )", "  #", line, count=1) if line.count("#") == 1 else line for line in own]
    whole = [line for part in body for line in (own if part == ORIGINAL else [part])]
    if ORIGINAL not in body and reads_settings:
        # The calls below contain the constructor's numbers. A model built with others runs its original forward.
        rest = [line.replace("if self.has_kernels and ", "if ", 1) for line in whole]
        whole = ["        if not self.has_kernels:", *(f"    {line}" if line else "" for line in own), *rest]
    return [*head, *whole]


def _typed(old: ast.FunctionDef) -> list[str]:
    """The method's signature; arguments without annotations become tensors."""
    arguments = old.args
    for argument in (*arguments.posonlyargs, *arguments.args[1:], *arguments.kwonlyargs):
        if argument.annotation is None:
            argument.annotation = ast.Name("Tensor", ast.Load())
    text = ast.unparse(arguments).replace(": torch.Tensor", ": Tensor")
    parts = [re.sub(r"(?<=\w)=", " = ", part, count=1) if ": " in part else part for part in parts_of(text)]
    result = "Tensor" if old.returns is None else ast.unparse(old.returns).replace("torch.Tensor", "Tensor")
    return laid_out("def forward", parts, after=f" -> {result}:", indent=4)


def arguments_of(init: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments by name, with defaults; refused if a file cannot hold one."""
    if init.__init__ is nn.Module.__init__ and not args and not kwargs:  # no constructor of its own
        return {}
    bound = inspect.signature(init).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PostludeError(f"the constructor takes *{name}: what it was built with cannot be compared in a file.")
    values = dict(bound.arguments)
    for value in values.values():
        literal(value)
    return values
