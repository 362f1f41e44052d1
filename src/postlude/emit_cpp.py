"""Prints a function of expressions as C++: emit.py's printer, with the numbers and loads of kernels/cpp."""

from __future__ import annotations

import math
from collections.abc import Sequence

from postlude.chain import Scalar
from postlude.emit import text
from postlude.expressions import Apply, Function, Load, Name, Term
from postlude.steps import O_C, PLACE

OPERATORS = frozenset("+-*/")


def emit_cpp(function: Function, name: str, slots: Sequence[int]) -> str:
    """As a struct `name` with a function `run` of the place (kernels/cpp/operands.h), the number of lanes that count,
    and vectors; several results are an array. `slots` are the kernel's operands in their order: those of all of its
    functions."""
    taken = [term for term in function.takes if term not in PLACE]
    given = ", ".join(["const At& at", "int64_t count", *(f"V {text(term)}" for term in taken)])
    lines, known = [], set(taken)
    for line in function.body:
        (target,) = line.targets
        lines.append(f"{'' if target in known else 'V '}{text(target)} = {_written(line.value, slots)};")
        known.add(target)
    if isinstance(function.returns, tuple):
        several = ", ".join(_written(term, slots) for term in function.returns)
        result, returned = f"std::array<V, {len(function.returns)}>", f"{{{{{several}}}}}"
    else:
        result, returned = "V", _written(function.returns, slots)
    body = "\n".join(f"    {line}" for line in [*lines, f"return {returned};"])
    return f"struct {name} {{\n  template <class At> static {result} run({given}) {{\n{body}\n  }}\n}};\n"


def emit_cpp_end(function: Function, result: str, slots: Sequence[int]) -> str:
    """The same for a function of moments (steps.moments) on all channels of one sample, which returns `result`."""
    lines = []
    for line in function.body:
        if isinstance(line.value, Load):
            lines.append(f"Many {text(line.targets[0])} = at.template get<{slots.index(line.value.slot.index)}>();")
        else:
            names = ", ".join(map(text, line.targets))
            into = names if len(line.targets) == 1 else f"std::tie({names})"
            lines.append(f"{into} = {text(_of_channels(line.value))};")
    assert not isinstance(function.returns, tuple)
    body = "\n".join(f"    {line}" for line in [*lines, f"return {text(_of_channels(function.returns))};"])
    given = "const At& at, Many mean, Many var, double count, int64_t C"
    head = f"struct End {{\n  using Result = {result};\n  template <class At> static Many run({given}) {{"
    return f"{head}\n{body}\n  }}\n}};\n"


def _of_channels(term: Term) -> Term:
    """The term as in kernels/cpp/moments_end.h, where every lane has a channel and nothing is masked."""
    if not isinstance(term, Apply):
        return Name(repr(term.value)) if isinstance(term, Scalar) else term
    if term.word == "tl.where":
        return _of_channels(term.operands[1])
    operands = tuple(_of_channels(operand) for operand in term.operands if operand != O_C)
    return Apply({"tl.sum": "sum", "//": "/"}.get(term.word, term.word), operands)


def _written(term: Term, slots: Sequence[int]) -> str:
    if isinstance(term, Load):
        return f"at.template get<{slots.index(term.slot.index)}>(count)"
    return text(_spelled(term))


def _spelled(term: Term) -> Term:
    """With numbers as C++ writes them; beside an operator they are vectors."""
    if isinstance(term, Apply):
        operands = (Name(f"V({_number(o.value)})") if isinstance(o, Scalar) else o for o in term.operands)
        return Apply(term.word, tuple(map(_spelled, operands if term.word in OPERATORS else term.operands)))
    return Name(_number(term.value)) if isinstance(term, Scalar) else term


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value!r}f" if isinstance(value, float) else repr(value)
    return "NAN" if math.isnan(value) else f"{'-' * (value < 0)}INFINITY"
