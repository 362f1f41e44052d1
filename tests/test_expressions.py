"""Expressions: what is live, what is read, and that the printed text means the tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from cases import Builder, conv
from postlude import emit, reverse
from postlude.chain import Scalar, Slot, Value
from postlude.expressions import Apply, Assign, Expression, Gradient, Load, Name, Term, bound, call, leaves, live
from postlude.steps import pass_slots

A, B, C = map(Name, "abc")
OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: Fraction(x // y),
}
GIVEN = {"a": Fraction(7, 3), "b": Fraction(-5, 2), "c": Fraction(11, 4)}


def drawn(rng: random.Random, depth: int) -> Expression:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice((A, B, C))
    word = rng.choice((*OPERATORS, "negative"))
    operands = [drawn(rng, depth - 1) for _ in range(1 if word == "negative" else 2)]
    return Apply("-" if word == "negative" else word, tuple(operands))


def meant(term: Term) -> Fraction:
    """By the tree alone."""
    if isinstance(term, Name):
        return GIVEN[term.text]
    assert isinstance(term, Apply)
    first, *rest = map(meant, term.operands)
    return OPERATORS[term.word](first, rest[0]) if rest else -first


def wrong_texts(count: int = 500) -> int:
    """How many drawn trees are printed as something else than they mean."""
    rng, wrong = random.Random(0), 0
    for _ in range(count):
        term = drawn(rng, 4)
        try:
            right = meant(term)
        except ZeroDivisionError:
            continue
        wrong += eval(emit.text(term), dict(GIVEN)) != right
    return wrong


def test_the_text_means_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_texts() == 0
    monkeypatch.setitem(emit._BINDING, "-", 2)  # mutant: a - b * c
    assert wrong_texts() > 0


def test_parentheses_are_where_one_would_write_them() -> None:
    assert emit.text((A - B) * (C * A) + B) == "(a - b) * (c * a) + b"
    assert emit.text(-A * (B / C) + -B) == "-a * (b / c) + -b"
    assert emit.text(A - B - C) == "a - b - c"
    assert emit.text(A - (B - C)) == "a - (b - c)"


def test_only_what_leads_to_the_result_is_live() -> None:
    first, unread = Assign((A,), call("f", C)), Assign((B,), call("g", A))
    again, both = Assign((A,), call("h", A)), Assign((B, C), call("pair", C))
    assert live([first, unread, again], [A]) == (first, again)
    assert live([first, Assign((A,), C), unread], [B]) == (Assign((A,), C), unread)  # what is overwritten unread is not
    assert live([both], [C]) == (both,)
    assert live([first, both], [Scalar(1.0)]) == ()


def test_names_of_a_row_are_replaced_once() -> None:
    """By what may have the same names."""
    assert bound(A * B - C, {A: B, B: A}) == B * A - C


def test_a_gradient_loads_what_it_reads_and_no_more() -> None:
    chain = Builder(2, conv(2, (2, 4))).op("mul", "channel").op("add", "full").op("silu").chain()
    assert pass_slots(chain, 3) == (2, 3, 4)
    whole = reverse.gradient(chain, 3, frozenset({2, 3, 4}))
    assert whole.slots == (2, 3, 4)  # the pointers stay where the forward pass has them
    assert whole.loaded == {2, 3, 4}
    assert whole.returns == tuple(map(Gradient, (Value(0), Slot(2), Slot(3), Slot(4))))
    added = Builder(2).op("add", "full").op("mul", "channel").chain()
    assert reverse.gradient(added, 2, frozenset({1})).loaded == {2}
    assert reverse.gradient(added, 2, frozenset({1, 2})).loaded == {1, 2}  # by the channel's factor


def test_values_are_read_by_derivatives_alone() -> None:
    relu = Builder(2).op("add", "channel").op("relu").chain()
    body = reverse.gradient(relu, 2, frozenset({1}), from_result=True).body
    assert body[0] == Assign((Value(2),), Value(0))  # the block is the last value
    assert {leaf for line in body[1:] for leaf in leaves(line.value) if isinstance(leaf, Value)} == {Value(2)}
    assert not any(isinstance(line.value, Load) for line in body)
    assert reverse.needs_no_more_than_its_result(relu, 2)
    assert not reverse.needs_no_more_than_its_result(Builder(2).op("relu").op("silu").chain(), 2)
    assert reverse.reads_no_value(Builder(2).op("add", "channel").op("sub", "full").chain(), 2)
