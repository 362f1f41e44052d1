"""Leaves out what the facts prove to change nothing: masks that always hold, conversions to the dtype that a value has,
remainders of what is smaller, terms that are 0.

The facts are those of one launch, for whose shapes alone an exported file runs its kernels.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence

from postlude.export.syntax.analysis import calls_in, name_of, reads, stored_names
from postlude.export.syntax.facts import REAL, WHOLE, Fact, Shape, broadcast
from postlude.export.syntax.known import Known
from postlude.export.syntax.rules import rewritten, single_values
from postlude.export.syntax.source import Comment
from postlude.export.syntax.trees import walk

MASKED = ("tl.load", "tl.store", "tl.atomic_add", "tl.atomic_max", "tl.atomic_min")
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
# Elements of a tile for each thread. Without masks ptxas moves the loads and stores of larger ones: packing tiles of
# 64×64 by 128 threads then takes 80 registers and spills 16 bytes, instead of 68 registers (sm_90, Triton 3.6).
_LARGE = 32
_HELD = "# The masks of this tile always hold. They keep loads and stores in order, which takes fewer registers."
_DIGITS = 10  # 1.0 - 0.1 is 0.9, but 1.0 - 0.9 is not written as one number
_EXACT = 1 << 24  # up to which fp32 holds every whole number


def leave_out_proven(function: ast.FunctionDef, facts: Known, first: Known, threads: int) -> None:
    """Changes the function in place. `first` are the facts of each block's first element."""
    function.body = rewritten(function.body, lambda node: _apart(node, facts))
    proven = _Proven(function, facts, first, _large_tiles(function, facts, threads))
    proven.visit(function)
    said = any(isinstance(node, Comment) and node.text == _HELD for node in walk(function))
    if proven.held and not said:
        first_held = next(node for node in walk(function) if isinstance(node, _SIMPLE) and proven.held[0] in walk(node))
        function.body = rewritten(function.body, lambda node: [Comment(_HELD), node] if node is first_held else [node])


def _large_tiles(function: ast.FunctionDef, facts: Known, threads: int) -> set[tuple[int, ...]]:
    """The sizes of tiles that are loaded and stored with so many elements for each thread that their masks stay."""
    loaded, stored = (
        {_sizes(facts(call.args[0]).shape or ()) for call in calls_in(function, name)}
        for name in ("tl.load", "tl.store")
    )
    return {sizes for sizes in loaded & stored if len(sizes) > 1 and math.prod(sizes) >= _LARGE * threads}


def _sizes(shape: Shape) -> tuple[int, ...]:
    """The sizes of a tile, whether it is transposed or not."""
    return tuple(sorted(size for size in shape if size > 1))


def _apart(node: ast.stmt, facts: Known) -> list[ast.stmt]:
    """One assignment for each number of several, so that each is known by its name."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return [node]
    names, values = stored_names(node), node.value.elts
    is_known = all(facts(value).shape == () and facts(value).dtype == WHOLE for value in values)
    targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else []
    if not values or not is_known or len(targets) != len(values) or names & reads(node.value):
        return [node]
    return [ast.Assign([target], value, lineno=0) for target, value in zip(targets, values)]


class _Proven(ast.NodeTransformer):
    """Asks for the facts of a node before its parts change."""

    def __init__(self, function: ast.FunctionDef, facts: Known, first: Known, large: set[tuple[int, ...]]) -> None:
        self.function, self.facts, self.first, self.large = function, facts, first, large
        self.held: list[ast.Call] = []  # whose masks stay although they hold
        self.singles = single_values(function)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name, fact = name_of(node.func), self.facts(node)
        if name in MASKED:
            self._mask(node)
            if name == "tl.store":
                node.args[1] = self._unconverted(node)
        elif name == "tl.where":
            node = self._where(node, fact)  # type: ignore[assignment]
        elif name in ("tl.minimum", "tl.maximum") and len(node.args) == 2:
            node = self._extreme(node, fact, is_least=name == "tl.minimum")  # type: ignore[assignment]
        elif name == "tl.sum" and (number := self._count(node)) is not None:
            return ast.Constant(number)
        elif name == ".to" and (found := self._converted(node, fact)) is not None:
            node = found  # type: ignore[assignment]
        return self.generic_visit(node) if isinstance(node, ast.Call) else self.visit(node)  # type: ignore

    def _mask(self, node: ast.Call) -> None:
        words = [word for word in node.keywords if word.arg == "mask"]
        if not words:
            return
        pointer, left = self.facts(node.args[0]).shape, self._left(words[0].value)
        if _sizes(pointer or ()) in self.large:
            self.held += [] if left else [node]
        elif not left:
            node.keywords = [word for word in node.keywords if word.arg not in ("mask", "other")]
        elif len(left) < len(self._parts(words[0].value)) and self._has_rank(left, words[0].value, pointer):
            words[0].value = _conjunction(left)

    def _unconverted(self, node: ast.Call) -> ast.expr:
        """What a store stores, which converts to the pointer's dtype by itself."""
        pointer, value = node.args
        is_cast = isinstance(value, ast.Call) and name_of(value.func) == ".to" and not value.keywords
        is_same = is_cast and self.facts(pointer).dtype == f"*{self.facts(value).dtype}"
        is_real = is_same and self.facts(value.func.value).dtype.startswith("float")  # type: ignore[attr-defined]
        return value.func.value if is_real else value  # type: ignore[attr-defined]

    def _left(self, mask: ast.expr) -> list[ast.expr]:
        """The parts of a condition that may be false."""
        return [part for part in self._parts(mask) if not self.facts(part).is_true]

    def _parts(self, mask: ast.expr) -> list[ast.expr]:
        """The parts of a condition that must all hold; those of one that is indexed as a whole are indexed each."""
        if not isinstance(mask, ast.Subscript):
            return list(conjuncts(mask))
        parts = list(conjuncts(mask.value))
        return [part if self.facts(part).shape == () else ast.Subscript(part, mask.slice, ast.Load()) for part in parts]

    def _has_rank(self, parts: Sequence[ast.expr], mask: ast.expr, target: Shape | None) -> bool:
        """Whether a condition of these parts alone can be broadcast as the whole mask was."""
        shape = broadcast([self.facts(part).shape for part in parts])
        is_alike = target is not None and shape is not None and len(shape) in (0, len(target))
        return shape is not None and (shape == self.facts(mask).shape or is_alike)

    def _where(self, node: ast.Call, fact: Fact) -> ast.expr:
        condition, yes, no = node.args
        left = self._left(condition)
        if not left:
            return yes if self._stands_for(yes, fact) else node
        arms = [self.facts(part).shape for part in (*left, yes, no)]
        if len(left) < len(self._parts(condition)) and fact.shape is not None and broadcast(arms) == fact.shape:
            node.args[0] = _conjunction(left)
        return node

    def _stands_for(self, node: ast.expr, fact: Fact) -> bool:
        """Whether an expression has the shape and the dtype of the one that it is a part of."""
        own = self.facts(node)
        is_alike = own.dtype == fact.dtype or (own.dtype == WHOLE and fact.dtype == "int32" and own.shape == ())
        return own.shape is not None and own.shape == fact.shape and own.dtype != "" and is_alike

    def _extreme(self, node: ast.Call, fact: Fact, is_least: bool) -> ast.expr:
        one, other = node.args
        if not is_least and isinstance(other, ast.Constant) and other.value == 1.0 and self._is_counted(one):
            return one
        if not is_least and self._is_zeros(one) and self.facts(other).is_magnitude and self._stands_for(other, fact):
            return other
        least, most = (one, other) if self.facts(one).high <= self.facts(other).low else (other, one)
        below, above = self.facts(least), self.facts(most)
        chosen = least if is_least else most
        is_known = below.is_bounded and above.is_bounded and below.high <= above.low
        return chosen if is_known and self._stands_for(chosen, fact) else node

    def _is_counted(self, node: ast.expr) -> bool:
        """Whether a value is how many lanes a mask has that holds at least in the first."""
        node = self.singles.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Constant):
            return isinstance(node.value, float) and node.value >= 1.0
        mask = _counted_mask(node)
        return mask is not None and self.first(mask).is_true

    def _is_zeros(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and name_of(node.func) == "tl.zeros"

    def _count(self, node: ast.Call) -> float | None:
        """How many lanes a mask that always holds has."""
        mask = _counted_mask(node)
        fact = Fact() if mask is None else self.facts(mask)
        is_known = fact.is_true and fact.shape is not None and len(fact.shape) == 1 and fact.shape[0] <= _EXACT
        return float(fact.shape[0]) if is_known else None  # type: ignore[index]

    def _converted(self, node: ast.Call, fact: Fact) -> ast.expr | None:
        """The value without a conversion to its own dtype; a number that is converted."""
        value = node.func.value  # type: ignore[attr-defined]
        own = self.facts(value)
        if node.keywords:
            return None
        if own.number is not None and own.shape == () and fact.dtype == "float32" and abs(own.low) <= _EXACT:
            return ast.Constant(float(own.number))
        return value if own.dtype == fact.dtype and own.dtype not in ("", WHOLE, REAL) else None

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if (number := _sum_of_numbers(node)) is not None:
            return ast.Constant(number)
        found = self._operation(node, self.facts(node))
        return self.generic_visit(node) if found is node else self.visit(found)

    def _operation(self, node: ast.BinOp, fact: Fact) -> ast.expr:
        left, right = self.facts(node.left), self.facts(node.right)
        is_smaller = isinstance(node.op, ast.FloorDiv | ast.Mod) and left.low >= 0 and left.high < right.low
        if (
            is_smaller
            and isinstance(node.op, ast.FloorDiv)
            and fact.shape == ()
            and not isinstance(node.left, ast.Constant)
        ):
            return ast.Constant(0)
        drops_right = isinstance(node.op, ast.Mod) and is_smaller
        drops_right |= isinstance(node.op, ast.Add | ast.Sub) and right.number == 0
        drops_right |= isinstance(node.op, ast.BitAnd) and right.is_true
        drops_left = isinstance(node.op, ast.Add) and left.number == 0
        drops_left |= isinstance(node.op, ast.BitAnd) and left.is_true
        if drops_right and self._stands_for(node.left, fact):
            return node.left
        return node.right if drops_left and self._stands_for(node.right, fact) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        fact = self.facts(node)
        if fact.shape == () and fact.number is not None:
            return ast.Constant(bool(fact.number))
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """A name that is only read as a mask may lose conditions that it is broadcast with."""
        before, left = self.facts(node.value).shape, self._left(node.value)
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
        if left and len(left) < len(self._parts(node.value)) and name in self.singles and before is not None:
            after = broadcast([self.facts(part).shape for part in left])
            readings = self._as_mask(name)
            if after is not None and len(after) in (0, len(before)) and readings is not None:
                node.value = _conjunction(left)
                if after == ():
                    _Bare(readings).visit(self.function)
        return self.generic_visit(node)

    def _as_mask(self, name: str) -> list[ast.expr] | None:
        """The readings of a name, indexed or not, if all are masks of blocks, or conditions between blocks, whose shape
        does not come from the name."""
        places = list[ast.expr]()
        for call in (part for part in walk(self.function) if isinstance(part, ast.Call)):
            masks = [word.value for word in call.keywords if word.arg == "mask"] if name_of(call.func) in MASKED else []
            blocks = call.args[:1] if masks else []
            if name_of(call.func) == "tl.where":
                masks, blocks = call.args[:1], call.args[1:]
            whole = broadcast([self.facts(block).shape for block in blocks])
            if masks and _sizes(whole or ()) in self.large:
                return None
            for part in (part for mask in masks for part in conjuncts(mask)):
                own = self.facts(part).shape
                if whole is not None and own is not None and broadcast((whole, own)) == whole != ():
                    places.append(part)
        inner = [part.value if isinstance(part, ast.Subscript) else part for part in places]
        read = [part for part in walk(self.function) if isinstance(part, ast.Name) and part.id == name]
        is_all = all(part in inner for part in read if isinstance(part.ctx, ast.Load))
        return [part for part, value in zip(places, inner) if value in read] if is_all else None


class _Bare(ast.NodeTransformer):
    """Takes the index off these readings."""

    def __init__(self, readings: Sequence[ast.expr]) -> None:
        self.readings = readings

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return node.value if node in self.readings else self.generic_visit(node)


def conjuncts(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of a condition that must all hold."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield from conjuncts(node.left)
        yield from conjuncts(node.right)
    else:
        yield node


def _conjunction(parts: Sequence[ast.expr]) -> ast.expr:
    whole = parts[0]
    for part in parts[1:]:
        whole = ast.BinOp(whole, ast.BitAnd(), part)
    return whole


def _sum_of_numbers(node: ast.BinOp) -> float | None:
    """A sum or difference of two numbers, which Triton works out in Python too, where it has few digits."""
    parts = (node.left, node.right)
    if not all(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in parts):
        return None
    if not isinstance(node.op, ast.Add | ast.Sub):
        return None
    one, other = (float(part.value) for part in parts)  # type: ignore[attr-defined]
    number = one + other if isinstance(node.op, ast.Add) else one - other
    return number if len(repr(number)) <= _DIGITS else None


def _counted_mask(node: ast.expr) -> ast.expr | None:
    """The mask whose lanes a sum in fp32 counts."""
    if not isinstance(node, ast.Call) or name_of(node.func) != "tl.sum" or len(node.args) != 1 or node.keywords:
        return None
    to = node.args[0]
    if not isinstance(to, ast.Call) or name_of(to.func) != ".to" or [name_of(arg) for arg in to.args] != ["tl.float32"]:
        return None
    return to.func.value  # type: ignore[attr-defined, no-any-return]
