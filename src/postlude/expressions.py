"""Expressions: what a pass computes on one block, before it is printed.

The leaves are a chain's operands (`Value`, `Slot`, `Scalar`), their gradients, and names that the kernel defines. A
`Function` is straight-line code: assignments and what is returned. Liveness, the tensors that it loads and the values
that it reads are computed here; emit.py prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from postlude.chain import Operand, Role, Slot, Value


def _operator(word: str) -> Callable[[Expression, Term], Apply]:
    return lambda left, right: Apply(word, (left, right))


class Expression:
    """Base of expressions. Python's operators on them build calls of the same name."""

    __add__, __sub__, __mul__, __truediv__ = _operator("+"), _operator("-"), _operator("*"), _operator("/")

    def __neg__(self) -> Apply:
        return Apply("-", (self,))


@dataclass(frozen=True)
class Name(Expression):
    """A name that the kernel defines, such as its mean, or a placeholder for an operand in a table's row."""

    text: str


@dataclass(frozen=True)
class Gradient(Expression):
    of: Value | Slot


@dataclass(frozen=True)
class Load(Expression):
    """The tensor of a slot, in the shape of the block or one that broadcasts to it."""

    slot: Slot
    role: Role


@dataclass(frozen=True)
class Apply(Expression):
    word: str  # a device function, or an operator
    operands: tuple[Term, ...]


Term = Operand | Expression


@dataclass(frozen=True)
class Assign:
    targets: tuple[Term, ...]
    value: Term


@dataclass(frozen=True)
class Function:
    name: str
    takes: tuple[Term, ...]  # before the pointers; the first one has the dtype that loads are converted to
    body: tuple[Assign, ...]
    returns: Term | tuple[Term, ...]
    slots: tuple[int, ...]  # in the order of their pointers

    @property
    def loaded(self) -> frozenset[int]:
        return frozenset(line.value.slot.index for line in self.body if isinstance(line.value, Load))


def call(word: str, *operands: Term) -> Apply:
    return Apply(word, operands)


def leaves(term: Term) -> Iterator[Term]:
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from leaves(operand)
    elif not isinstance(term, Load):
        yield term


def bound(term: Term, meant: Mapping[Term, Term]) -> Term:
    """The term with its leaves replaced by what they stand for."""
    if isinstance(term, Apply):
        return Apply(term.word, tuple(bound(operand, meant) for operand in term.operands))
    return meant.get(term, term)


def live(body: Iterable[Assign], returns: Iterable[Term]) -> tuple[Assign, ...]:
    """Only the assignments on which the returned terms depend."""
    read = {leaf for term in returns for leaf in leaves(term)}
    kept = []
    for line in reversed(list(body)):
        if not read.isdisjoint(line.targets):
            read = read.difference(line.targets).union(leaves(line.value))
            kept.append(line)
    return tuple(reversed(kept))
