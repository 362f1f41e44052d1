"""The steps of a pass in reverse: the gradients of its first value and of its tensors, as expressions of one block.

Both functions recompute the values from the block v0 and go back from g, the gradient of the last step's value. Their
other arguments are as in steps.py:

    sums(v0, g, mean, rstd, …)
        returns dn, dn · x̂, then the gradient of each vector in `sums`: blocks to be summed per channel
    gradient(v0, g, mean, rstd, A, B, …)
        returns the gradients at v0, of each vector in `totals` (to be summed), and of each tensor in `full`; the block
        may be the last value instead of v0 if that is enough for them

    x̂      (x − mean) · rstd, x being the norm's operand
    dn     the gradient at the norm's result γ · x̂ + β: its sums over a channel are β's gradient and, times x̂, γ's
    A, B   means of γ · dn and of γ · dn · x̂ over a group: the norm's operand gets rstd · (γ · dn − A − x̂ · B)

After a pool or a reduction over channels, g has another size: `given` are lines that compute it, and load what else
its reverse reads. With a step over channels a block has all channels.

A layer_norm's group is a row of the block, and so is what a linear layer's barriers go over, so one function computes
everything:

    gradient(v0, g, o_l, L, …)
        as above, then dn and dn · x̂, to be summed per place in the row; after a linear layer the vectors' gradients as
        well, which come after those of whole tensors
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from postlude import steps
from postlude.chain import (
    Cast,
    Chain,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    Slot,
    Softmax,
    Step,
    Value,
    values_of,
)
from postlude.derivatives import CHOICES, ROW_DERIVATIVES, TAP, G, V, derivatives
from postlude.expressions import Assign, Expression, Function, Gradient, Load, Name, Term, bound, call, leaves, live
from postlude.steps import M_X, MEAN, O_C, PLACE, ROW, RSTD, C, L, X, pass_slots

MOST_FULL = 2  # gradients of full-size tensors that the kernels can store besides the value's
X_HAT, A, B, ROW_A, ROW_B = map(Name, ("x_hat", "A", "B", "row_a", "row_b"))


@dataclass(frozen=True)
class Wanted:
    """What each pass returns besides dn, dn · x̂ and the gradient at the first value, as slots of the chain."""

    sums: tuple[int, ...]  # vectors, per channel or per sample and channel, that only steps after the norm read
    totals: tuple[int, ...]  # the convolution's bias, and the vectors that are not in `sums`
    full: tuple[int, ...]  # tensors of the value's size


@functools.lru_cache(maxsize=1024)
def wanted(chain: Chain, last: int, needs: frozenset[int]) -> Wanted:
    """The slots of steps 1 to `last` whose gradient is needed; γ's and β's follow from dn and dn · x̂."""
    norm = None if has_rows(chain, last) else chain.first(Normalize, last)
    asked = [slot for slot in pass_slots(chain, last) if slot in needs]
    full = tuple(slot for slot in asked if chain.roles[slot] == "full")
    vectors = {slot for slot in _read_pointwise(chain, last) if chain.roles[slot] in ("channel", "row", "one")}
    late = vectors - _read_pointwise(chain, last if norm is None else norm)
    early = vectors - late | {slot for slot in asked if chain.roles[slot] == "bias"}
    return Wanted(tuple(s for s in asked if s in late), tuple(s for s in asked if s in early), full)


def unsupported_gradient(chain: Chain, last: int, pool: Pool | None = None) -> str | None:
    """Why the gradients of steps 1 to `last`, and of a pool after them, cannot be computed here, or None."""
    fused = chain.steps[:last]
    if not fused and pool is None:
        return "no step is fused"
    if chain.dims and any(isinstance(step, Reduce) and step.over != "channels" for step in fused):
        return "a reduction is among the steps"
    norms = [step for step in fused if isinstance(step, Normalize)]
    if len(norms) > 1:
        return "more than one norm is among the steps"
    if chain.dims and any(norm.axes > chain.dims for norm in norms):
        return "a layer_norm over whole samples, whose rows hold all channels"
    unread = set(range(last)) - {value.index for step in fused for value in values_of(step)}
    if unread:
        return f"no fused step reads value {min(unread)}"
    if sum(chain.roles[slot] == "full" for slot in pass_slots(chain, last)) > MOST_FULL:
        return f"the steps read more than {MOST_FULL} tensors of the value's size"
    # Those of the pooled value's gradient and of a max_pool's taps; of a reduction's gradient, result and taps.
    more = 0 if pool is None else 1 + (pool.op == "max_pool")
    if chain.dims and chain.first(Reduce, last) is not None:
        more += 1 + len(kept_of_reduction(chain, last))
    return steps.too_many_tensors(chain, last, more)


def sums(chain: Chain, last: int, needs: frozenset[int], given: tuple[Assign, ...] = ()) -> Function:
    """The first pass, of a chain with a norm: from the last step back to the norm's result."""
    norm, slots = chain.first(Normalize, last), wanted(chain, last, needs).sums
    assert norm is not None
    body = [*given, *_forward(chain, last), *_backward(chain, norm, last, slots)]
    dn = Gradient(Value(norm))
    returns = (dn, dn * X_HAT, *(Gradient(Slot(slot)) for slot in slots))
    takes = (Value(0), G, MEAN, RSTD, *PLACE)
    return Function("sums", takes, live(body, returns), returns, pass_slots(chain, last))


def gradient(
    chain: Chain, last: int, needs: frozenset[int], from_result: bool = False, given: tuple[Assign, ...] = ()
) -> Function:
    """The second pass: from the last step back to the first value. `from_result`: the block is the last value."""
    want = wanted(chain, last, needs)
    by_rows, norm = has_rows(chain, last), chain.first(Normalize, last)
    slots = want.full + want.totals if by_rows and not chain.dims else want.totals + want.full
    returns: tuple[Term, ...] = (Gradient(Value(0)), *(Gradient(Slot(slot)) for slot in slots))
    takes: tuple[Name, ...] = ROW if by_rows else (MEAN, RSTD, A, B)
    if by_rows and norm is not None:
        dn = Gradient(Value(norm))
        returns += (dn, dn * X_HAT)
    forward = _forward(chain, last)
    if from_result:
        loads = [line for line in forward if isinstance(line.value, Load)]
        forward = [Assign((Value(last),), Value(0)), *loads]
    body = live([*given, *forward, *_backward(chain, 0, last, slots)], returns)
    return Function("gradient", (Value(0), G, *takes, *PLACE), body, returns, pass_slots(chain, last))


def keeps_inside(chain: Chain, last: int) -> bool:
    """Whether PyTorch's own backward pass would keep a value inside steps 1 to `last`; its derivatives read what ours
    do.

    The last step's value does not count, because the next operator reads it anyway.
    """
    return bool(_values_read(chain, last, ()) - {last})


def needs_no_more_than_its_result(chain: Chain, last: int) -> bool:
    """Whether the gradients of steps 1 to `last` can be told from the last one's value alone, as those of relu and of
    what is added before it."""
    plain = all(isinstance(step, Pointwise | Softmax) for step in chain.steps[:last])
    return plain and _values_read(chain, last, range(len(chain.roles))) <= {last}


def reads_no_value(chain: Chain, last: int) -> bool:
    """Whether the gradients of steps 1 to `last` depend on none of their values, as for additions."""
    return not _values_read(chain, last, range(len(chain.roles)))


def needs_first_value(chain: Chain, last: int) -> bool:
    """Whether the gradients of steps 1 to `last` read a value of the first one's size, from before a reduction over
    channels; the reduction's own result is saved in any case."""
    reduce = chain.first(Reduce, last)
    read = _values_read(chain, last, range(len(chain.roles)))
    return chain.first(Normalize, last) is not None or any(reduce is None or index < reduce for index in read)


def kept_of_reduction(chain: Chain, last: int) -> tuple[Value | Name, ...]:
    """What the gradients of steps 1 to `last` read of a reduction over channels: its result, or the chosen channel."""
    number = chain.first(Reduce, last)
    if number is None:
        return ()
    body = _backward(chain, 0, last, range(len(chain.roles)))
    read = {leaf for line in body for leaf in leaves(line.value)}
    is_given = any(isinstance(leaf, Value) and leaf.index >= number for leaf in read)
    return (*((Value(number),) if is_given else ()), *((TAP,) if TAP in read else ()))


def chooses(chain: Chain) -> bool:
    """Whether a gradient goes to the one of several values that was chosen in the forward pass."""
    return any(isinstance(step, Reduce | Pool) and step.op in (*CHOICES, "max_pool") for step in chain.steps)


def has_rows(chain: Chain, last: int) -> bool:
    """True where the norm of steps 1 to `last` goes over rows, or anything over a linear layer's features."""
    if not chain.dims:
        found = (step for step in chain.steps[:last] if isinstance(step, Normalize | Reduce | Softmax))
        first = next(found, None)
        return first is not None and not (isinstance(first, Normalize) and first.over == "batch")
    return any(isinstance(step, Normalize) and step.over == "row" for step in chain.steps[:last])


def _values_read(chain: Chain, last: int, slots: Iterable[int]) -> set[int]:
    """The values that the derivatives of steps 1 to `last` read, for the first value and these slots; a norm reads
    x̂."""
    returns = [Gradient(Value(0)), *(Gradient(Slot(slot)) for slot in slots)]
    body = live(_backward(chain, 0, last, slots), returns)
    return {leaf.index for line in body for leaf in leaves(line.value) if isinstance(leaf, Value)}


def _read_pointwise(chain: Chain, last: int) -> set[int]:
    """The slots that steps 1 to `last` read, except a norm's γ and β."""
    operands = [operand for step in chain.steps[:last] if isinstance(step, Pointwise) for operand in step.operands]
    return {operand.index for operand in operands if isinstance(operand, Slot)}


def _forward(chain: Chain, last: int) -> list[Assign]:
    """The values again, and x̂."""
    by_rows, norm, reduce = has_rows(chain, last), chain.first(Normalize, last), chain.first(Reduce, last)
    body = [*steps.forward(chain, "rows" if by_rows else "given", last).body]
    if by_rows and reduce is not None:
        step = chain.steps[reduce - 1]
        assert isinstance(step, Reduce)
        body.append(Assign((C,), L))
        if step.op in CHOICES:
            body.append(Assign((TAP,), call(f"{step.op}_place", step.operand, O_C, M_X)))
    if norm is not None:
        (operand,) = values_of(chain.steps[norm - 1])
        body.append(Assign((X_HAT,), call("-", operand, MEAN) * RSTD))
    return body


def _backward(chain: Chain, root: int, last: int, slots: Iterable[int]) -> list[Assign]:
    """The gradients of the values of steps `last` back to `root`, then those of `slots`.

    Going backwards, all readers of a value come before its own step, so the terms of its gradient are complete there.
    """
    body: list[Assign] = []
    terms: dict[Operand, Term] = {Value(last): G}
    reduce, by_rows = chain.first(Reduce, last), has_rows(chain, last)

    def add(operand: Operand, term: Term) -> None:
        terms[operand] = call("+", terms[operand], term) if operand in terms else term

    for number in range(last, root - 1, -1):
        if Value(number) in terms:
            body.append(Assign((Gradient(Value(number)),), terms[Value(number)]))
            if number > root:
                step = chain.steps[number - 1]
                body += _row_means(step, number) if by_rows else []
                for operand, term in _passed_back(step, number, by_rows):
                    is_once = isinstance(operand, Slot) and reduce is not None and number > reduce
                    add(operand, call("in_first", term, O_C) if is_once else term)
    for slot in map(Slot, slots):
        if chain.roles[slot.index] == "bias":  # added to the first value
            add(slot, Gradient(Value(0)))
        if slot in terms:
            body.append(Assign((Gradient(slot),), terms[slot]))
    return body


def _passed_back(step: Step, number: int, by_rows: bool) -> list[tuple[Operand, Term]]:
    """What a step passes back to each of its operands; a norm's weight and bias get theirs from the sums."""
    g = Gradient(Value(number))
    if isinstance(step, Normalize):
        a, b = (ROW_A, ROW_B) if by_rows else (A, B)
        return [(step.operand, RSTD * (_scaled(step, g) - a - X_HAT * b))]
    if isinstance(step, Pointwise):
        meant = {G: g, V: Value(number), **steps.meanings(step)}
        return [(operand, bound(term, meant)) for operand, term in zip(step.operands, derivatives(step))]
    if isinstance(step, Softmax | Reduce):
        meant = {G: g, V: Value(number), X: step.operand, **steps.eps_of(step)}
        return [(step.operand, bound(ROW_DERIVATIVES[step.op], meant))]
    if isinstance(step, Cast):
        return [(step.operand, g)]  # blocks stay in the accumulator's dtype
    raise ValueError("a pool is no step of a block")


def _row_means(step: Step, number: int) -> list[Assign]:
    """A and B of a norm whose group is a row of the block."""
    if not isinstance(step, Normalize):
        return []
    scaled = _scaled(step, Gradient(Value(number)))
    means = {ROW_A: scaled, ROW_B: scaled * X_HAT}
    return [Assign((name,), call("row_mean", term, M_X, L)) for name, term in means.items()]


def _scaled(step: Normalize, dn: Gradient) -> Expression:
    """γ · dn"""
    return dn if step.weight is None else call("*", step.weight, dn)
