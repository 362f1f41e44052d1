"""Kernels without float64: what the library's words do for its sake is left out.

The words make constants in the dtype of their block, because Triton would round a Python number to fp32. In a kernel
that computes in fp32 the number alone is the same.
"""

from __future__ import annotations

import ast

from postlude.export.syntax.analysis import name_of
from postlude.plan.program import KernelCall, Word, buffers_in

_DOUBLE = "tl.float64"
_EXTREMES = ("tl.maximum", "tl.minimum")


def is_single(call: KernelCall, function: ast.FunctionDef) -> bool:
    """Whether a kernel computes in fp32 only."""
    texts = [ast.unparse(function), *(value.text for _, value in call.constants if isinstance(value, Word))]
    dtypes = {buffer.dtype for buffer in buffers_in(call.arguments)}
    return "float64" not in dtypes and all(_DOUBLE not in text for text in texts)


def make_single(function: ast.FunctionDef) -> None:
    """Makes a device function one for blocks that are not float64."""
    _Single().visit(function)


class _Single(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.comparators[-1]) == _DOUBLE:
            return ast.Constant(False)
        node.left, node.comparators = _number(node.left), [_number(part) for part in node.comparators]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        node.left, node.right = _number(node.left), _number(node.right)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if name_of(node.func) in _EXTREMES:
            node.args = [_number(part) for part in node.args]
        return node


def _number(node: ast.expr) -> ast.expr:
    """The number that fills a block of another block's shape and dtype; what is added to such zeros."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _is_like(node.left, "tl.zeros", 2):
        return node.right
    return node.args[1] if _is_like(node, "tl.full", 3) else node  # type: ignore[attr-defined]


def _is_like(node: ast.expr, name: str, count: int) -> bool:
    if not isinstance(node, ast.Call) or name_of(node.func) != name or len(node.args) != count:
        return False
    ends = (node.args[0], node.args[-1])
    return [part.attr for part in ends if isinstance(part, ast.Attribute)] == ["shape", "dtype"]
