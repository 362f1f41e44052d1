"""What is known about a function's expressions: values, whole numbers, effects, and which assignments nobody reads."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

UNKNOWN = object()
SCALAR, WHOLE, ANYTHING = 2, 1, 0  # one whole number; whole numbers or a block of them; anything
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
RANGES = ("range", "tl.range", "tl.static_range")
_EFFECTS = ("store", "atomic", "device_", "static_", "debug_", "inline_asm", "assume")
_PURE_METHODS = ("to", "load", "sum", "max", "min", "reshape", "view", "trans", "permute", "broadcast_to", "cast")
_PURE_BUILTINS = ("range", "len", "min", "max", "abs", "int", "float", "bool")


def value_of(node: ast.expr, known: Mapping[str, object]) -> Any:
    """UNKNOWN where names other than the known ones decide it. No arithmetic but of whole numbers."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.Tuple | ast.List):
        values = [value_of(part, known) for part in node.elts]
        return UNKNOWN if UNKNOWN in values else tuple(values)
    if isinstance(node, ast.UnaryOp):
        value = value_of(node.operand, known)
        if isinstance(node.op, ast.Not) and value is not UNKNOWN:
            return not value
        return -value if isinstance(node.op, ast.USub) and type(value) in (int, float) else UNKNOWN
    if isinstance(node, ast.BinOp):
        return _arithmetic(node.op, value_of(node.left, known), value_of(node.right, known))
    if isinstance(node, ast.Compare):
        sides = [value_of(side, known) for side in (node.left, *node.comparators)]
        if UNKNOWN in sides:
            return UNKNOWN
        return all(_COMPARISONS[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:]))
    if isinstance(node, ast.BoolOp):
        return _all_or_any(node, known)
    return UNKNOWN


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    if type(left) is not int or type(right) is not int or type(op) not in _ARITHMETIC:
        return UNKNOWN
    if isinstance(op, ast.FloorDiv | ast.Mod | ast.LShift | ast.RShift) and (left < 0 or right < 0 or right == 0):
        return UNKNOWN  # the device cuts off towards 0, Python rounds down
    return _ARITHMETIC[type(op)](left, right)


def _all_or_any(node: ast.BoolOp, known: Mapping[str, object]) -> Any:
    stops: Any = isinstance(node.op, ast.Or)
    value: Any = not stops
    for part in node.values:
        value = value_of(part, known)
        if value is UNKNOWN or bool(value) is stops:
            return value
    return value


def name_of(node: ast.expr) -> str:
    """`tl.zeros` of such an expression; of a method of anything else `.to`."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    owner = name_of(node.value)
    return f"{owner if owner.split('.')[0] in ('tl', 'triton') else ''}.{node.attr}"


def is_pure(node: ast.AST) -> bool:
    """Nobody sees whether it was evaluated: no store, no call of a function that is not the language's."""
    for part in ast.walk(node):
        if isinstance(part, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(part, ast.Call):
            owner, _, last = name_of(part.func).rpartition(".")
            if owner:
                allowed = not last.startswith(_EFFECTS)
            else:
                allowed = last in (_PURE_METHODS if isinstance(part.func, ast.Attribute) else _PURE_BUILTINS)
            if not allowed:
                return False
    return True


def never_runs(node: ast.For) -> bool:
    """A loop over a range that is known to be empty."""
    if not isinstance(node.iter, ast.Call) or name_of(node.iter.func) not in RANGES or node.iter.keywords:
        return False
    limits = [value_of(argument, {}) for argument in node.iter.args]
    return all(type(limit) is int for limit in limits) and len(limits) < 3 and not range(*limits)


@functools.lru_cache(maxsize=64)
def stores(function: ast.FunctionDef) -> dict[str, list[tuple[ast.stmt, ast.expr | None]]]:
    """Names that the body assigns: each time the statement, and the value where it is that of the one name."""
    found: dict[str, list[tuple[ast.stmt, ast.expr | None]]] = {}
    for statement in ast.walk(ast.Module(function.body, [])):
        if isinstance(statement, ast.stmt):
            for part in ast.iter_child_nodes(statement):
                for name in set() if isinstance(part, ast.stmt) else _stored_names(part):
                    found.setdefault(name, []).append((statement, _one_value(statement)))
    return found


def _one_value(node: ast.stmt) -> ast.expr | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.value
    return node.value if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None


class Kinds:
    """Which expressions are whole numbers: `x % 1` is 0 only of these, and a 0 for a block only of one number."""

    def __init__(self, function: ast.FunctionDef, known: Mapping[str, object]) -> None:
        self.names: dict[str, int] = {}
        for arg in function.args.args:
            # Parameters of the kernels in capitals are numbers, pointers are written p_x.
            is_number = arg.annotation is None and arg.arg.isupper()
            self.names[arg.arg] = SCALAR if type(known.get(arg.arg, 0 if is_number else "")) is int else ANYTHING
        assigned = stores(function)
        for name in assigned:
            self.names.setdefault(name, SCALAR)
        before = None
        while before != self.names:
            before = dict(self.names)
            for name, places in assigned.items():
                self.names[name] = min(self.names[name], *[self._stored(*place) for place in places])

    def _stored(self, statement: ast.stmt, value: ast.expr | None) -> int:
        if value is not None:
            return self(value)
        if isinstance(statement, ast.AugAssign):
            return self(statement.value) if type(statement.op) in _ARITHMETIC else ANYTHING
        is_count = isinstance(statement, ast.For) and isinstance(statement.iter, ast.Call)
        return SCALAR if is_count and ast.unparse(statement.iter.func) in RANGES else ANYTHING  # type: ignore

    def __call__(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return SCALAR if type(node.value) is int else ANYTHING
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ANYTHING)
        if isinstance(node, ast.BinOp):
            return min(self(node.left), self(node.right)) if type(node.op) in _ARITHMETIC else ANYTHING
        if isinstance(node, ast.UnaryOp):
            return ANYTHING if isinstance(node.op, ast.Not) else self(node.operand)
        if isinstance(node, ast.Subscript):
            return min(self(node.value), WHOLE)
        if isinstance(node, ast.IfExp):
            return min(self(node.body), self(node.orelse))
        return self._call(node) if isinstance(node, ast.Call) else ANYTHING

    def _call(self, node: ast.Call) -> int:
        name = name_of(node.func)
        if name in ("tl.program_id", "tl.num_programs"):
            return SCALAR
        if name in ("tl.minimum", "tl.maximum", "tl.cdiv", "min", "max"):
            return min([self(arg) for arg in node.args], default=ANYTHING)
        if name == ".to" and node.args and isinstance(node.func, ast.Attribute):
            is_whole = ast.unparse(node.args[0]) in ("tl.int32", "tl.int64")
            return max(WHOLE, self(node.func.value)) if is_whole else ANYTHING
        return WHOLE if name == "tl.arange" else ANYTHING


class Liveness:
    """Assignments that nobody reads before they are overwritten, and the names that the function starts with."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.dead: list[ast.stmt] = []
        self._all = {part.id for part in ast.walk(function) if isinstance(part, ast.Name)}
        self.at_start = self._block(function.body, set())

    def _block(self, block: list[ast.stmt], after: set[str]) -> set[str]:
        for statement in reversed(block):
            after = self._statement(statement, after)
        return after

    def _statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        if isinstance(node, ast.If):
            return reads(node.test) | self._block(node.body, after) | self._block(node.orelse, after)
        if isinstance(node, ast.For | ast.While) and not node.orelse:
            return self._loop(node, after)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            return self._assignment(node, after)
        if isinstance(node, ast.Return):
            return reads(node)
        if isinstance(node, ast.Expr | ast.Assert | ast.Pass):
            return after | reads(node)
        return after | self._all  # a jump, or what kernels do not have

    def _loop(self, node: ast.For | ast.While, after: set[str]) -> set[str]:
        head = reads(node.iter if isinstance(node, ast.For) else node.test)
        targets = _stored_names(node.target) if isinstance(node, ast.For) else set()
        round_again, mark = after | (head if isinstance(node, ast.While) else set()), len(self.dead)
        while True:
            del self.dead[mark:]
            grown = round_again | (self._block(node.body, round_again) - targets)
            if grown == round_again:
                return grown | head
            round_again = grown

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, after: set[str]) -> set[str]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {name for target in targets for name in _stored_names(target)}
        plain = all(isinstance(t, ast.Name | ast.Tuple) for t in targets)
        value = node.value
        assert value is not None
        if plain and not names & after and is_pure(value):
            self.dead.append(node)
            return after
        is_both = isinstance(node, ast.AugAssign)
        return (after if is_both else after - names) | reads(node) | (names if is_both else set())


def reads(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _stored_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
