"""Prints a function of expressions as the text of one Triton function, for the library and for exported files alike.

Its names, besides those that the function takes:

    v0, t3, d2, dt3  a value, the tensor of a slot, and their gradients
    a0 … a5          pointers to the tensors. If one of them has a number per sample and channel, a5 is the number of
                     elements in a sample: with it and the number of channels the text computes the sample from `base`,
                     so kernels need no extra argument for it
"""

from __future__ import annotations

from postlude.chain import Scalar, Slot, Value
from postlude.expressions import Apply, Function, Gradient, Load, Name, Term
from postlude.steps import COUNT, OPERANDS, L

POINTERS = [f"a{number}" for number in range(OPERANDS)]
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2}
_SIGN = 3  # precedence of a sign, above the binary operators


def emit(function: Function, channels: int = 0, spread: str = "") -> str:
    """The text of a Triton function.

    Args:
        function: What it computes.
        channels: The value's channels, needed if a number per sample and channel is loaded.
        spread: An index such as "[None, :]" that broadcasts a number per channel to the block. A GEMM's epilogue needs
            it: with a two-dimensional load the compiler converted the whole accumulator to that load's layout, three
            times.
    """
    lines = ["@triton.jit", f"def {function.name}({', '.join([*map(text, function.takes), *POINTERS])}):"]
    for line in function.body:
        value = line.value
        written = _load(value, function, channels, spread) if isinstance(value, Load) else text(value)
        lines.append(f"    {', '.join(map(text, line.targets))} = {written}")
    given = function.returns
    returned = f"({', '.join(map(text, given))},)" if isinstance(given, tuple) else text(given)
    lines.append(f"    return {returned}")
    return "\n".join(lines) + "\n"


def text(term: Term, binding: int = 0) -> str:
    """A term as text, in parentheses if the operator around it binds tighter."""
    if isinstance(term, Apply):
        return _call(term, binding)
    if isinstance(term, Scalar):
        return repr(term.value)
    if isinstance(term, Name):
        return term.text
    if isinstance(term, Gradient):
        return f"d{'' if isinstance(term.of, Value) else 't'}{term.of.index}"
    if isinstance(term, (Value, Slot)):
        return f"{'v' if isinstance(term, Value) else 't'}{term.index}"
    raise ValueError(f"{term} is no part of an expression")


def _call(term: Apply, binding: int) -> str:
    if term.word not in _BINDING:
        return f"{term.word}({', '.join(map(text, term.operands))})"
    if len(term.operands) == 1:
        return f"{term.word}{text(term.operands[0], _SIGN)}"
    own, (left, right) = _BINDING[term.word], term.operands
    written = f"{text(left, own)} {term.word} {text(right, own + 1)}"  # (a - b) - c needs none, a - (b - c) does
    return f"({written})" if own < binding else written


def _load(load: Load, function: Function, channels: int, spread: str) -> str:
    pointer, dtype = f"a{function.slots.index(load.slot.index)}", f"{text(function.takes[0])}.dtype"
    if load.role == "one":
        return f"tl.load({pointer}).to({dtype})"
    if load.role == "full":
        where, mask, spread = "base + o_x", "m_x", ""
    elif load.role == "last":
        where, mask, spread = "o_l", "o_l < L", ""
    elif load.role == "row":
        where, mask = _row(function, channels)
    else:
        where, mask = "o_c", "m_c"
    return f"tl.load({pointer} + {where}, mask={mask}, other=0.0){spread}.to({dtype})"


def _row(function: Function, channels: int) -> tuple[str, str]:
    """The offset of a number per sample and channel, and its mask."""
    if COUNT in function.takes:  # a program has one sample
        return "tl.program_id(0).to(tl.int64) * C + o_c", "m_c"
    if not channels:
        raise ValueError("a number per sample and channel cannot be found without the number of channels")
    # A tile of rows may hold rows of several samples.
    base, mask = ("(base + o_x)", "m_x") if L in function.takes else ("base", "m_c")
    return f"{base} // {POINTERS[-1]} * {channels} + o_c", mask
