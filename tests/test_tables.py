"""Every table of the vocabulary has a row for every word: a new word cannot be half there."""

from __future__ import annotations

from cases import CASES
from postlude import chain, emit, reference
from postlude.chain import Normalize, Pointwise, Reduce
from postlude.export import plain
from postlude.graph import spellings
from postlude.run import cpu, moments


def test_pointwise_tables_have_equal_keys() -> None:
    words = set(chain.POINTWISE)
    assert set(reference.POINTWISE) == words
    assert set(spellings.POINTWISE) == words
    assert set(cpu.IN_PLACE) == words
    assert set(emit.POINTWISE) == words
    assert set(plain.POINTWISE) == words


def test_norm_and_reduction_tables_have_equal_keys() -> None:
    assert set(reference.NORMS) == set(spellings.NORMS) == set(chain.NORMS)
    assert set(reference.REDUCTIONS) == set(spellings.REDUCTIONS) == set(chain.REDUCTIONS)


def test_affine_words_go_through_moments() -> None:
    assert set(moments.AFFINE) == {word for word, row in chain.POINTWISE.items() if row.affine}


def test_every_word_is_in_the_table_of_cases() -> None:
    steps = [step for case in CASES for step in case.chain.steps]
    assert {s.op for s in steps if isinstance(s, Pointwise)} == set(chain.POINTWISE)
    assert {s.op for s in steps if isinstance(s, Normalize)} == set(chain.NORMS)
    assert {s.op for s in steps if isinstance(s, Reduce)} == set(chain.REDUCTIONS)
    assert {case.chain.producer.name for case in CASES if case.chain.producer} == {
        "conv2d",
        "conv3d",
        "conv_transpose2d",
        "conv_transpose3d",
    }
