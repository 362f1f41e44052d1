"""Writes the gradients of a pass's steps as the text of two Triton functions, in reverse over its straight line.

Both work on one block, compute the values again from the block v0 with emit's own lines, and go back from g, the
gradient of the last step's value; what else they take is as in emit.py:

    sums(v0, g, mean, rstd, o_c, base, o_x, m_c, m_x, a0 … a5)
        dn, dn · x̂, then the gradient of each vector of `sums`: blocks to be summed per channel
    gradient(v0, g, mean, rstd, A, B, o_c, base, o_x, m_c, m_x, a0 … a5)
        the gradient at v0, of each vector of `totals` (to be summed), of each tensor of `full`; where the last value is
        enough for them, the block may be that one

    x̂      (x − mean) · rstd, x being the norm's operand
    dn     the gradient at the norm's result γ · x̂ + β: its sums over a channel are β's gradient and, times x̂, γ's
    A, B   means of γ · dn and of γ · dn · x̂ over a group: the norm's operand gets rstd · (γ · dn − A − x̂ · B)

A layer_norm's group is a row of the block, so that one function does all of it:

    gradient(v0, g, o_l, L, o_c, base, o_x, m_c, m_x, a0 … a5)
        as above, then dn and dn · x̂, to be summed per place in the row
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from postlude.chain import Cast, Chain, Normalize, Operand, Pointwise, Reduce, Slot, Step, Value, values_of
from postlude.emit import call_of, emit, pass_slots, pointer_arguments, too_many_tensors, words_of
from postlude.words import POINTWISE as WORDS

FULL = 2  # gradients of whole tensors that the kernels store beside the value's
_NOTHING = "nothing({g})"
_BATCH_NORM = "batch_norm_slope({z}, {u}, {eps})"
# The gradient of each operand, from {g} of the step's value {v}; the functions are in kernels/triton/derivatives.py.
# A word of one operand whose function takes that is no row here.
DERIVATIVES: dict[str, tuple[str, ...]] = {
    word: (call_of(f"{word}_gradient", row, ("g",)),) for word, row in WORDS.items() if row.arity == 1
} | {
    "relu": ("relu_gradient({g}, {v})",),
    "gelu": ("{approximate}_gradient({g}, {x})",),
    "tanh": ("tanh_gradient({g}, {v})",),
    "sigmoid": ("sigmoid_gradient({g}, {v})",),
    "sqrt": ("sqrt_gradient({g}, {v})",),
    "reciprocal": ("reciprocal_gradient({g}, {v})",),
    "detach": (_NOTHING,),
    "add": ("{g}", "{g}"),
    "sub": ("{g}", "-{g}"),
    "rsub": ("-{g}", "{g}"),
    "mul": ("{g} * {y}", "{g} * {x}"),
    "div": ("{g} / {y}", "-{g} * ({v} / {y})"),
    "rdiv": ("-{g} * ({v} / {x})", "{g} / {x}"),
    "maximum": ("maximum_gradient({g}, {x}, {y})", "maximum_gradient({g}, {y}, {x})"),
    "minimum": ("minimum_gradient({g}, {x}, {y})", "minimum_gradient({g}, {y}, {x})"),
    "prelu": ("prelu_gradient({g}, {x}, {y})", "prelu_weight_gradient({g}, {x})"),
    # PyTorch has no gradient of running statistics.
    "batch_norm": (
        f"{{g}} * {_BATCH_NORM}",
        _NOTHING,
        _NOTHING,
        "{g} * batch_norm({x}, {y}, {z}, 1.0, 0.0, {eps})",
        "{g}",
    ),
}


@dataclass(frozen=True)
class Wanted:
    """What each pass gives beside dn, dn · x̂ and the gradient at the first value, as slots of the chain."""

    sums: tuple[int, ...]  # vectors, per channel or per sample and channel, that only steps after the norm read
    totals: tuple[int, ...]  # the convolution's bias, and the vectors that are not in `sums`
    full: tuple[int, ...]  # tensors of the value's size


@functools.lru_cache(maxsize=1024)
def wanted(chain: Chain, last: int, needs: frozenset[int]) -> Wanted:
    """Those of steps 1 to `last` whose gradient is needed; γ and β need nothing but dn and dn · x̂."""
    norm, uses = None if has_rows(chain, last) else norm_step(chain, last), _first_uses(chain, last)
    asked = [slot for slot in pass_slots(chain, last) if slot in needs]
    full = tuple(slot for slot in asked if chain.roles[slot] == "full")
    vectors = [slot for slot in asked if chain.roles[slot] in ("channel", "row", "one") and slot in uses]
    sums = tuple(slot for slot in vectors if norm is not None and uses[slot] > norm)
    totals = tuple(slot for slot in asked if chain.roles[slot] == "bias" or (slot in vectors and slot not in sums))
    return Wanted(sums, totals, full)


def unsupported_gradient(chain: Chain, last: int) -> str | None:
    """Why the gradients of steps 1 to `last` cannot be computed here, or None."""
    steps = chain.steps[:last]
    if not steps:
        return "no step is fused"
    if any(isinstance(step, Reduce) for step in steps):
        return "a reduction is among the steps"
    norms = [step for step in steps if isinstance(step, Normalize)]
    if len(norms) > 1:
        return "more than one norm is among the steps"
    if any(norm.axes > chain.dims for norm in norms):
        return "a layer_norm over whole samples, whose rows hold all channels"
    read = {value.index for step in steps for value in values_of(step)}
    unread = set(range(last)) - read
    if unread:
        return f"no fused step reads value {min(unread)}"
    if sum(chain.roles[slot] == "full" for slot in pass_slots(chain, last)) > FULL:
        return f"the steps read more than {FULL} tensors of the value's size"
    return too_many_tensors(chain, last)


def emit_sums(chain: Chain, last: int, needs: frozenset[int], pointers: tuple[int, ...], channels: int = 0) -> str:
    """The first pass, of a chain with a norm: from the last step back to the norm's result."""
    norm, slots = norm_step(chain, last), wanted(chain, last, needs).sums
    assert norm is not None
    back, parts = _backward(chain, norm + 1, last, norm, slots)
    back += [f"d{norm} = {_sum(parts[Value(norm)])}", *_slot_lines(slots, parts)]
    given = [f"d{norm}", f"d{norm} * x_hat", *map(_slot_name, slots)]
    return _function("sums", "mean, rstd, ", [*_forward(chain, last, pointers, channels), *back], given)


def emit_gradient(
    chain: Chain,
    last: int,
    needs: frozenset[int],
    pointers: tuple[int, ...],
    channels: int = 0,
    from_result: bool = False,
) -> str:
    """The second pass: from the last step back to the first value. `from_result`: the block is the last one's value."""
    want = wanted(chain, last, needs)
    slots = want.totals + want.full
    back, parts = _backward(chain, 1, last, 0, slots)
    back.append(f"d0 = {_sum(parts[Value(0)])}")
    for slot in slots:
        if chain.roles[slot] == "bias":
            parts.setdefault(Slot(slot), []).append("d0")
    back += _slot_lines(slots, parts)
    given = ["d0", *map(_slot_name, slots)]
    takes = "mean, rstd, A, B, "
    if has_rows(chain, last):
        norm, takes = norm_step(chain, last), "o_l, L, "
        given += [f"d{norm}", f"d{norm} * x_hat"]
    forward = _forward(chain, last, pointers, channels)
    if from_result:
        forward = [f"v{last} = v0", *(line for line in forward if not line.startswith("v"))]
    return _function("gradient", takes, [*forward, *back], given)


def slots_read(text: str) -> set[int]:
    """The slots whose tensors an emitted function loads: gradients need fewer than values do."""
    return {int(slot) for slot in re.findall(r"^    t(\d+) = tl.load", text, re.MULTILINE)}


def slots_needed(chain: Chain, last: int, from_result: bool = False) -> frozenset[int]:
    """The slots that a backward pass may read: all but running statistics, and tensors of the value's size that no
    gradient depends on."""
    needs, pointers = frozenset(range(len(chain.roles))), pass_slots(chain, last)
    channels = 1  # any number: it does not change which tensors are read
    read = slots_read(emit_gradient(chain, last, needs, pointers, channels, from_result))
    if norm_step(chain, last) is not None and not has_rows(chain, last):
        read |= slots_read(emit_sums(chain, last, needs, pointers, channels))
    return frozenset(s for s, role in enumerate(chain.roles) if role != "running" and (role != "full" or s in read))


def keeps_inside(chain: Chain, last: int) -> bool:
    """Whether PyTorch's own backward pass keeps a value from inside steps 1 to `last`: its derivatives read what ours
    read. The last step's value does not count: it is there for whoever comes next."""
    return bool(_values_read(chain, last, ()) - {last})


def needs_no_more_than_its_result(chain: Chain, last: int) -> bool:
    """Whether the gradients of steps 1 to `last` can be told from the last one's value alone, as those of relu and of
    what is added before it."""
    plain = all(isinstance(step, Pointwise) for step in chain.steps[:last])
    return plain and _values_read(chain, last, range(len(chain.roles))) <= {last}


def reads_no_value(chain: Chain, last: int) -> bool:
    """Whether the gradients of steps 1 to `last` depend on none of their values, as those of sums."""
    return not _values_read(chain, last, range(len(chain.roles)))


def _values_read(chain: Chain, last: int, slots: Iterable[int]) -> set[int]:
    """By the derivatives of steps 1 to `last`, for the first value and these slots."""
    dependent, read = _dependent(chain, 1, last, 0, slots), set()
    for number, step in enumerate(chain.steps[:last], 1):
        texts = " ".join(text for operand, text in _parts(step, number) if operand in dependent)
        read |= {int(value) for value in re.findall(r"\bv(\d+)\b", texts)}
    return read


def norm_step(chain: Chain, last: int) -> int | None:
    steps = enumerate(chain.steps[:last], 1)
    return next((number for number, step in steps if isinstance(step, Normalize)), None)


def has_rows(chain: Chain, last: int) -> bool:
    """True where the norm of steps 1 to `last` goes over rows."""
    return any(isinstance(step, Normalize) and step.over == "row" for step in chain.steps[:last])


def _first_uses(chain: Chain, last: int) -> dict[int, int]:
    """Slot → the first pointwise step that reads it; γ and β have none, as a rule."""
    uses: dict[int, int] = {}
    for number, step in enumerate(chain.steps[:last], 1):
        for operand in step.operands if isinstance(step, Pointwise) else ():
            if isinstance(operand, Slot):
                uses.setdefault(operand.index, number)
    return uses


def _dependent(chain: Chain, first: int, last: int, root: int, slots: Iterable[int]) -> set[Operand]:
    """The operands of steps `first` to `last` that have a gradient: value `root`, these slots and what they make."""
    found: set[Operand] = {Value(root), *map(Slot, slots)}
    for number, step in enumerate(chain.steps[first - 1 : last], first):
        if any(operand in found for operand, _ in _parts(step, number)):
            found.add(Value(number))
    return found


def _backward(
    chain: Chain, first: int, last: int, root: int, slots: Iterable[int]
) -> tuple[list[str], dict[Operand, list[str]]]:
    """The gradients d{number} of steps `last` back to `first`, and the terms of every operand's gradient.

    A value's readers come after it, so that its terms are complete when its own step is reached.
    """
    dependent = _dependent(chain, first, last, root, slots)
    lines: list[str] = []
    parts: dict[Operand, list[str]] = {Value(last): ["g"]}
    for number in range(last, first - 1, -1):
        if Value(number) not in dependent:
            continue
        lines.append(f"d{number} = {_sum(parts[Value(number)])}")
        step = chain.steps[number - 1]
        if isinstance(step, Normalize) and step.over == "row":
            lines += [f"row_a = row_mean({_scaled(step, number)}, m_x, L)"]
            lines += [f"row_b = row_mean({_scaled(step, number)} * x_hat, m_x, L)"]
        for operand, text in _parts(step, number):
            if operand in dependent:
                parts.setdefault(operand, []).append(text)
    return lines, parts


def _parts(step: Step, number: int) -> list[tuple[Operand, str]]:
    """What a step passes back to each of its operands; a norm's weight and bias get theirs from the sums."""
    g = f"d{number}"
    if isinstance(step, Normalize):
        a, b = ("row_a", "row_b") if step.over == "row" else ("A", "B")
        return [(step.operand, f"rstd * ({_scaled(step, number)} - {a} - x_hat * {b})")]
    if isinstance(step, Pointwise):
        words = {"g": g, "v": f"v{number}", **words_of(step)}
        return [(operand, text.format(**words)) for operand, text in zip(step.operands, DERIVATIVES[step.op])]
    if isinstance(step, Cast):
        return [(step.operand, g)]  # blocks stay in the accumulator's dtype
    raise ValueError("a reduction is no step of a block")


def _scaled(step: Normalize, number: int) -> str:
    """γ · dn"""
    return f"d{number}" if step.weight is None else f"t{step.weight.index} * d{number}"


def _forward(chain: Chain, last: int, pointers: tuple[int, ...], channels: int) -> list[str]:
    """The lines that compute v1, v2, …: emit's own, without its signature and its return."""
    norm, form = norm_step(chain, last), "rows" if has_rows(chain, last) else "whole"
    lines = [line.strip() for line in emit(chain, form, last, pointers, channels).splitlines()[2:-1]]
    if norm is not None:
        (operand,) = values_of(chain.steps[norm - 1])
        lines.append(f"x_hat = (v{operand.index} - mean) * rstd")
    return lines


def _function(name: str, takes: str, lines: list[str], given: list[str]) -> str:
    """With the lines that lead to what is given, and no others."""
    kept: list[str] = []
    used = set(_names(" ".join(given)))
    for line in reversed(lines):
        target, text = line.split(" = ", 1)
        if not used.isdisjoint(target.split(", ")):
            used.update(_names(text))
            kept.append(line)
    head = f"def {name}(v0, g, {takes}o_c, base, o_x, m_c, m_x, {pointer_arguments()}):"
    body = "".join(f"    {line}\n" for line in reversed(kept))
    return f"@triton.jit\n{head}\n{body}    return ({', '.join(given)},)\n"


def _names(text: str) -> list[str]:
    return re.findall(r"\b[a-z]\w*\b(?!\.dtype)", text)  # a dtype is v0's whether or not its bias was added


def _slot_lines(slots: Iterable[int], parts: dict[Operand, list[str]]) -> list[str]:
    return [f"{_slot_name(slot)} = {_sum(parts[Slot(slot)])}" for slot in slots]


def _slot_name(slot: int) -> str:
    return f"dt{slot}"


def _sum(terms: list[str]) -> str:
    return " + ".join(terms)
