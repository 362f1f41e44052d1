"""The device functions that a kernel calls, each specialised to what the kernel's calls of it have in common."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence

from postlude.export.device_text import Kernel, cut, library
from postlude.export.layout import WIDTH, fold
from postlude.export.rules import Replaced, rewritten
from postlude.export.simplify import simplified_helper
from postlude.export.single import in_single
from postlude.export.source import Comment, parse, text_of, written
from postlude.export.trees import copied, walk
from postlude.plan.program import Word
from postlude.words import POINTWISE

_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)


def kernel_of(function: ast.FunctionDef) -> Kernel:
    return Kernel(function.name, fold(text_of(function)), tuple(arg.arg for arg in function.args.args))


def shorter(kernel: Kernel) -> Kernel:
    """The function with what it says simplified. It keeps its parameters, because its callers pass them all."""
    made = cut(kernel.text, {}, {})
    return made if made.parameters == kernel.parameters else kernel


def with_helpers(functions: Sequence[Kernel], values: Mapping[str, object], single: bool) -> list[Kernel]:
    """The functions with their helpers before them. `values` are the kernel's numbers that keep their names; with
    `single` nothing is float64."""
    trees = {function.name: parse(function.text) for function in functions}
    helpers: list[str] = []
    while (helper := _next_helper(trees)) is not None:
        parameters = [arg.arg for arg in parse(library()[helper]).args.args]
        calls = [call for tree in trees.values() for call in _calls(tree, helper)]
        shared = {word: value for place, word in enumerate(parameters)
                  if (value := _shared([call.args[place] for call in calls], values)) is not None}  # fmt: skip
        source = simplified_helper(helper, library()[helper], shared)
        made = cut(in_single(source) if single else source, shared, {})
        for call in calls:
            call.args = [call.args[parameters.index(word)] for word in made.parameters]
        trees[helper] = parse(made.text)
        helpers.insert(0, helper)
    for helper in list(helpers):
        if _is_put_in(helper, trees, {function.name for function in functions}):
            helpers.remove(helper)
            del trees[helper]
    return [kernel_of(trees[name]) for name in (*helpers, *(function.name for function in functions))]


def _is_put_in(helper: str, trees: Mapping[str, ast.FunctionDef], kernels: set[str]) -> bool:
    """Whether the one call of a helper of one expression has become that expression, with what is said of it above. A
    step of a chain keeps its name in a kernel."""
    *comments, last = trees[helper].body
    calls = [(owner, call) for owner, tree in trees.items() for call in _calls(tree, helper)]
    if len(calls) != 1 or not isinstance(last, ast.Return) or last.value is None:
        return False
    (owner, call), parameters = calls[0], [arg.arg for arg in trees[helper].args.args]
    names = [node.id for node in walk(last.value) if isinstance(node, ast.Name)]
    is_once = (isinstance(a, ast.Name | ast.Constant) or names.count(p) == 1 for p, a in zip(parameters, call.args))
    if helper in POINTWISE or owner not in kernels or not all(is_once) or call.keywords:
        return False
    said = [node.text.strip('"# ') for node in comments if isinstance(node, Comment)]
    statements = [node for node in walk(trees[owner]) if isinstance(node, _SIMPLE)]
    around = next((node for node in statements if call in walk(node)), None)
    if around is None or len(said) < len(comments):
        return False
    expression = Replaced(dict(zip(parameters, call.args))).visit(copied(last.value))
    if len(written(around)) + len(written(expression)) - len(written(call)) > WIDTH - 12:
        return False
    _Put(call, expression).visit(around)
    above = [Comment(f"# {text}") for text in said]
    trees[owner].body = rewritten(trees[owner].body, lambda node: [*above, node] if node is around else [node])
    return True


class _Put(ast.NodeTransformer):
    def __init__(self, call: ast.Call, expression: ast.expr) -> None:
        self.call, self.expression = call, expression

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.expression if node is self.call else self.generic_visit(node)


def _next_helper(trees: Mapping[str, ast.FunctionDef]) -> str | None:
    """A device function that is called but not included yet, and that no other such function calls."""
    nodes = (node for tree in trees.values() for node in walk(tree) if isinstance(node, ast.Call))
    wanted = {node.func.id for node in nodes if isinstance(node.func, ast.Name)} & library().keys() - trees.keys()
    return next((name for name in sorted(wanted) if not any(name in _reached(other) for other in wanted)), None)


@functools.cache
def _reached(name: str) -> set[str]:
    """The functions that a function calls, directly or indirectly."""
    calls = (node.func for node in walk(parse(library()[name])) if isinstance(node, ast.Call))
    found = {func.id for func in calls if isinstance(func, ast.Name)} & library().keys() - {name}
    return found.union(*(_reached(other) for other in found))


def _calls(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    nodes = [node for node in walk(function) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id == name]


def _shared(arguments: Sequence[ast.expr], values: Mapping[str, object]) -> object | None:
    """The constant that an argument has in every call, if there is one."""
    if len({ast.unparse(argument) for argument in arguments}) != 1:
        return None
    argument = arguments[0]
    if isinstance(argument, ast.Name):
        return values.get(argument.id)
    if isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "tl":
        return Word(ast.unparse(argument))
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, int | str) else None
