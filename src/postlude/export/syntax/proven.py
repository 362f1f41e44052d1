"""Leaves out what the facts prove to change nothing: masks that always hold, conversions to the dtype that a value has,
remainders of what is smaller, terms that are 0.

The facts are those of one launch, for whose shapes alone an exported file runs its kernels.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence

from postlude.export.syntax.analysis import calls_in, name_of
from postlude.export.syntax.facts import Fact, Shape, broadcast
from postlude.export.syntax.known import Known, in_order
from postlude.export.syntax.proven_numbers import ProvenNumbers
from postlude.export.syntax.rules import rewritten
from postlude.export.syntax.source import Comment
from postlude.export.syntax.trees import walk

MASKED = ("tl.load", "tl.store", "tl.atomic_add", "tl.atomic_max", "tl.atomic_min")
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
# Elements of a tile for each thread. Without masks ptxas moves the loads and stores of larger ones: packing tiles of
# 64×64 by 128 threads then takes 80 registers and spills 16 bytes, instead of 68 registers (sm_90, Triton 3.6).
_LARGE = 32
_HELD = "# The masks of this tile always hold. They keep loads and stores in order, which takes fewer registers."


def leave_out_proven(function: ast.FunctionDef, facts: Known, threads: int) -> None:
    """Changes the function in place."""
    function.body = rewritten(function.body, lambda node: [] if _stores_nothing(node, facts) else [node])
    _Proven(function, facts, _large_tiles(function, facts, threads)).visit(function)


def say_what_holds(function: ast.FunctionDef, facts: Known, threads: int) -> None:
    """Says of the first mask that always holds and stays why it does."""
    large = _large_tiles(function, facts, threads)

    def is_held(call: ast.Call) -> bool:
        masks = [word.value for word in call.keywords if word.arg == "mask"]
        return bool(masks) and facts(masks[0]).is_true and _sizes(facts(call.args[0]).shape or ()) in large

    places = [node for node in in_order(function.body) if isinstance(node, _SIMPLE)]
    places = [node for node in places if any(map(is_held, calls_in(node)))]
    function.body = rewritten(function.body, lambda node: [Comment(_HELD), node] if node in places[:1] else [node])


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


def _stores_nothing(node: ast.stmt, facts: Known) -> bool:
    """Whether a statement is a store whose mask holds in no lane."""
    if (
        not isinstance(node, ast.Expr)
        or not isinstance(call := node.value, ast.Call)
        or name_of(call.func) != "tl.store"
    ):
        return False
    return any(word.arg == "mask" and facts(word.value).number == 0 for word in call.keywords)


class _Proven(ProvenNumbers, ast.NodeTransformer):
    """Masks and choices as well."""

    def __init__(self, function: ast.FunctionDef, facts: Known, large: set[tuple[int, ...]]) -> None:
        super().__init__(function, facts)
        self.function, self.large = function, large

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = name_of(node.func)
        if name in MASKED:
            self._mask(node)
            if name == "tl.store":
                node.args[1] = self._unconverted(node)
        elif name == "tl.where" and (found := self._where(node, self.facts(node))) is not node:
            return self.visit(found)  # type: ignore[no-any-return]
        return super().visit_Call(node)

    def _mask(self, node: ast.Call) -> None:
        words = [word for word in node.keywords if word.arg == "mask"]
        if not words:
            return
        pointer, left = self.facts(node.args[0]).shape, self._left(words[0].value)
        if _sizes(pointer or ()) in self.large:
            return
        if not left:
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
        if self.facts(condition).number == 0:
            return no if self._stands_for(no, fact) else node
        arms = [self.facts(part).shape for part in (*left, yes, no)]
        if len(left) < len(self._parts(condition)) and fact.shape is not None and broadcast(arms) == fact.shape:
            node.args[0] = _conjunction(left)
        return node

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
