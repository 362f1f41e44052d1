"""Expressions: what a pass computes on one block, and all that is to be known about it before it is printed.

The leaves are a chain's own operands (`Value`, `Slot`, `Scalar`), gradients of them, and names that the kernel gives.
A `Function` is a straight line of assignments and what it returns. Liveness, the tensors that it loads and the values
that it reads are computed here; emit.py prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from postlude.chain import Operand, Role, Scalar, Slot, Value


class Expression:
    """Python's operators make calls of the same name."""

    def __add__(self, other: Term) -> Call:
        return Call("+", (self, other))

    def __sub__(self, other: Term) -> Call:
        return Call("-", (self, other))

    def __rsub__(self, other: Operand) -> Call:
        return Call("-", (other, self))

    def __mul__(self, other: Term) -> Call:
        return Call("*", (self, other))

    def __truediv__(self, other: Term) -> Call:
        return Call("/", (self, other))

    def __floordiv__(self, other: Term) -> Call:
        return Call("//", (self, other))

    def __neg__(self) -> Call:
        return Call("-", (self,))


@dataclass(frozen=True)
class Name(Expression):
    """What the kernel gives, as its mean, or an operand that a table's row leaves open."""

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
class Call(Expression):
    word: str  # a device function, or an operator
    operands: tuple[Term, ...]


Term = Operand | Expression
Leaf = Operand | Name | Gradient


@dataclass(frozen=True)
class Assign:
    targets: tuple[Leaf, ...]
    value: Term


@dataclass(frozen=True)
class Function:
    name: str
    takes: tuple[Leaf, ...]  # before the pointers; the first one has the dtype that loads are converted to
    body: tuple[Assign, ...]
    returns: Term | tuple[Term, ...]
    slots: tuple[int, ...]  # in the order of their pointers

    @property
    def loaded(self) -> frozenset[int]:
        return frozenset(line.value.slot.index for line in self.body if isinstance(line.value, Load))


def call(word: str, *operands: Term) -> Call:
    return Call(word, operands)


def leaves(term: Term) -> Iterator[Leaf]:
    if isinstance(term, Call):
        for operand in term.operands:
            yield from leaves(operand)
    elif isinstance(term, (Value, Slot, Scalar, Name, Gradient)):
        yield term


def bound(term: Term, meant: Mapping[Name, Term]) -> Term:
    """A row of a table with its names replaced by what they stand for."""
    if isinstance(term, Call):
        return Call(term.word, tuple(bound(operand, meant) for operand in term.operands))
    return meant.get(term, term) if isinstance(term, Name) else term


def live(body: Iterable[Assign], returns: Iterable[Term]) -> tuple[Assign, ...]:
    """The assignments that lead to what is returned, and no others."""
    read = {leaf for term in returns for leaf in leaves(term)}
    kept = []
    for line in reversed(list(body)):
        if not read.isdisjoint(line.targets):
            read = read.difference(line.targets).union(leaves(line.value))
            kept.append(line)
    return tuple(reversed(kept))


def values_read(body: Iterable[Assign]) -> set[int]:
    return {leaf.index for line in body for leaf in leaves(line.value) if isinstance(leaf, Value)}
