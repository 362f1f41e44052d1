"""A kernel of the library as one call needs it, before it is specialised: what the call's dtypes and grid determine."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from postlude.export.device.special_cases import with_special_cases
from postlude.export.syntax.analysis import name_of
from postlude.export.syntax.rules import Replaced, rewritten
from postlude.export.syntax.trees import parsed
from postlude.plan.program import Argument, Buffer, Descriptor, KernelCall

_UNITS = "range(tl.program_id(0), UNITS, tl.num_programs(0))"


def prepared(call: KernelCall, given: Mapping[str, Argument]) -> ast.FunctionDef:
    """The library's function with the dtypes of this call's arguments, without axes of the grid that have one program,
    and without the loop over units where each program has one."""
    function = with_special_cases(call)
    buffers = {word: value for word, value in given.items() if isinstance(value, Buffer | Descriptor)}
    dtypes = {word: (one if isinstance(one, Buffer) else one.buffer).dtype for word, one in buffers.items()}
    single = {axis for axis, size in enumerate((*call.grid, 1, 1)[:3]) if axis and size == 1}
    _Prepared(dtypes, single).visit(function)
    function.body = rewritten(function.body, lambda node: [] if _is_hint(node) else [node])
    if dict(call.numbers).get("UNITS") == call.grid[0]:
        _leave_loop(function)
    return function


class _Prepared(ast.NodeTransformer):
    def __init__(self, dtypes: Mapping[str, str], single: set[int]) -> None:
        self.dtypes, self.single = dtypes, single  # of pointers and descriptors; axes of one program

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        word, _, what = ast.unparse(node).partition(".")
        return parsed(f"tl.{self.dtypes[word]}") if what == "dtype.element_ty" and word in self.dtypes else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = name_of(node.func)
        if name == "tl.program_id" and isinstance(axis := node.args[0], ast.Constant) and axis.value in self.single:
            return ast.Constant(0)
        return node


def _is_hint(node: ast.stmt) -> bool:
    """Whether a statement says what divides a size. Sizes are constants here, so the compiler sees that itself."""
    if not isinstance(node, ast.Assign) or not isinstance(target := node.targets[0], ast.Name):
        return False
    return ast.unparse(node.value) == f"{target.id} // ALIGN * ALIGN"


def _leave_loop(function: ast.FunctionDef) -> None:
    """Replaces the loop over units by its body."""
    loops = [node for node in function.body if isinstance(node, ast.For) and ast.unparse(node.iter) == _UNITS]
    if len(loops) != 1:
        raise ValueError(f"{function.name} has {len(loops)} loops over units, not one")
    (loop,) = loops
    place = function.body.index(loop)
    Replaced({ast.unparse(loop.target): parsed("tl.program_id(0)")}).visit(loop)
    function.body[place : place + 1] = loop.body
