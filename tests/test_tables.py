"""Every table of the vocabulary has a row for every word: a new word cannot be half there."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import postlude
from cases import CASES, LINEAR, WORDS
from postlude import derivatives, moments, reference, reverse, steps, words
from postlude.chain import Chain, Normalize, Pointwise, Reduce, Scalar, Value
from postlude.check import tensors_for
from postlude.expressions import Apply, Term, leaves
from postlude.graph import spellings
from postlude.run import cpu, differentiable

STEPS = [step for case in WORDS for step in case.chain.steps if isinstance(step, Pointwise)]
DEVICE = Path(postlude.__file__).parent / "kernels" / "triton"


def test_pointwise_tables_have_equal_keys() -> None:
    vocabulary = set(words.POINTWISE)
    assert set(reference.POINTWISE) == vocabulary
    assert set(spellings.POINTWISE) == vocabulary
    assert set(cpu.IN_PLACE) <= vocabulary
    assert set(derivatives.DERIVATIVES) <= vocabulary


def test_every_word_and_derivative_has_its_device_function() -> None:
    known = {name: set(re.findall(r"^def (\w+)", (DEVICE / name).read_text(), re.MULTILINE)) for name in _FILES}
    for step in STEPS:
        assert steps.device_function(step) in known["pointwise.py"]
        called = {name for term in derivatives.derivatives(step) for name in _functions(term)}
        assert called <= known["pointwise.py"] | known["derivatives.py"]


_FILES = ("pointwise.py", "derivatives.py")


def _functions(term: Term) -> Iterator[str]:
    if isinstance(term, Apply):
        yield from [term.word] if term.word.isidentifier() else []
        for operand in term.operands:
            yield from _functions(operand)


def test_every_word_has_its_function_on_the_cpu() -> None:
    """And every affine one, which moments go through, a second one."""
    texts = [(DEVICE.parent / "cpp" / name).read_text() for name in ("pointwise.h", "moments_end.h")]
    one, many = (set(re.findall(r"^inline (?:V|Many) (\w+)\(", text, re.MULTILINE)) for text in texts)
    assert {steps.device_function(step) for step in STEPS} <= one
    assert {word for word, row in words.POINTWISE.items() if row.affine} <= many


def test_every_derivative_has_its_functions_on_the_cpu() -> None:
    texts = "".join((DEVICE.parent / "cpp" / name).read_text() for name in ("pointwise.h", "derivatives.h"))
    there = set(re.findall(r"^inline V (\w+)\(", texts, re.MULTILINE))
    assert {word for step in STEPS for term in reverse.derivatives(step) for word in _functions(term)} <= there


def test_every_operand_has_a_derivative() -> None:
    assert all(len(derivatives.derivatives(step)) == words.POINTWISE[step.op].arity for step in STEPS)


def test_two_operands_in_the_other_order_are_a_word_too() -> None:
    for word, row in words.POINTWISE.items():
        if row.swapped is not None:
            assert words.POINTWISE[row.swapped].swapped == word
    assert {word for word, row in words.POINTWISE.items() if row.arity == 2 and row.swapped is None} == {"prelu"}


def test_usual_settings_are_settings() -> None:
    assert all(len(row.usual) in (0, len(row.settings)) for row in words.POINTWISE.values())


def test_the_rows_say_which_infinities_become_finite() -> None:
    """A norm hides what a convolution of ours makes of an infinity, unless a step before it has made it a number."""
    for case in WORDS:
        tensors = tensors_for(case.chain, case.shape, torch.float64, "cpu", 0, "normal", "contiguous")
        results = [
            reference.evaluate(case.chain, [torch.full_like(tensors[0], sign * math.inf), *tensors[1:]])
            for sign in (1, -1)
        ]
        (step,) = case.chain.steps
        assert isinstance(step, Pointwise)
        lost = sum(bool(result.isfinite().any()) for result in results)
        assert words.POINTWISE[step.op].finite_at == lost, case.name


def test_the_derivatives_tell_whether_pytorch_keeps_a_value_inside_a_chain() -> None:
    """A word at the end of a chain, and before its end: relu keeps its result, which at the end is there anyway."""
    then = Pointwise("add", (Value(1), Scalar(1.0)))
    for case in WORDS:
        for program in (case.chain.steps, (*case.chain.steps, then)):
            chain = dataclasses.replace(case.chain, steps=program)
            kept = _kept_by_pytorch(chain, tensors_for(chain, case.shape, torch.float32))
            says = reverse.keeps_inside(chain, len(program))
            # batch_norm in evaluation keeps its operand for γ's gradient even where that is a constant
            assert says == bool(kept) or (not says and "batch_norm" in case.name), (str(chain), kept)


def test_every_word_whose_value_tells_its_gradient_can_be_differentiated_again() -> None:
    """By PyTorch's operators, where the value is all that was kept."""
    rows = {word: (derivatives.ROW_DERIVATIVES[word],) for word in words.SOFTMAXES}
    told = {
        word
        for word, terms in {**derivatives.DERIVATIVES, **rows}.items()
        if any(derivatives.V in leaves(term) and {steps.X, steps.Y}.isdisjoint(leaves(term)) for term in terms)
    }
    assert set(differentiable.FROM_VALUE) == told


def _kept_by_pytorch(chain: Chain, tensors: Sequence[Tensor]) -> set[int]:
    """The chain's values, but for its last one, whose memory PyTorch saves for its backward pass."""
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    values: list[Tensor | None] = [tensors[0].detach().requires_grad_() * 1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for step in chain.steps:
            values.append(reference.apply(chain, step, values, tensors))
    inside = [value.untyped_storage().data_ptr() for value in values[:-1] if value is not None]
    return {number for number, memory in enumerate(inside) if memory in saved}


def test_norm_and_reduction_tables_have_equal_keys() -> None:
    assert set(reference.NORMS) == set(spellings.NORMS) == set(words.NORMS)
    assert set(reference.REDUCTIONS) == set(spellings.REDUCTIONS) == set(words.REDUCTIONS)


def test_affine_words_go_through_moments() -> None:
    affine = {word for word, row in words.POINTWISE.items() if row.affine}
    assert set(moments.AFFINE) == set(steps.VARIANCE) == affine


def test_every_word_is_in_the_table_of_cases() -> None:
    assert {s.op for case in WORDS for s in case.chain.steps if isinstance(s, Pointwise)} == set(words.POINTWISE)
    every = [step for case in (*CASES, *LINEAR) for step in case.chain.steps]
    assert {s.op for s in every if isinstance(s, Normalize)} == set(words.NORMS)
    assert {s.op for s in every if isinstance(s, Reduce)} == set(words.REDUCTIONS)
    assert {case.chain.producer.name for case in (*CASES, *LINEAR) if case.chain.producer} == {
        "conv2d",
        "conv3d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
    }


def test_every_reduction_over_channels_and_softmax_has_a_gradient() -> None:
    over = {op for op, spans in words.REDUCTIONS.items() if "channels" in spans}
    assert set(derivatives.ROW_DERIVATIVES) == over | set(words.SOFTMAXES) | set(words.LENGTHS)
    text = (Path(postlude.__file__).parent / "kernels" / "triton" / "row_derivatives.py").read_text("utf-8")
    called = {name for term in derivatives.ROW_DERIVATIVES.values() for name in _functions(term)}
    assert called <= set(re.findall(r"(?m)^def (\w+)", text))
