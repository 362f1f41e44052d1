"""How a chain can be divided into passes, and where moments are all that is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

from postlude.chain import (
    POINTWISE,
    Cast,
    Chain,
    Normalize,
    Pointwise,
    Pool,
    Reduce,
    Scalar,
    Slot,
    Softmax,
    Step,
    Value,
    values_of,
)
from postlude.steps import too_many_tensors


@dataclass(frozen=True)
class MomentsOnly:
    """Only the moments of the value after step `before` matter, up to the reduction, which is step `reduce`."""

    before: int
    reduce: int
    squares: bool


@dataclass(frozen=True)
class FusedPool:
    """The pool that the last pass ends in, made of steps `first` to `last`."""

    first: int
    last: int
    pool: Pool


BARRIERS = (Normalize, Reduce, Pool, Softmax)


def first_barrier(chain: Chain) -> int | None:
    """The number (from 1) of the first barrier: a step that needs more than one element, so a pass ends before it."""
    return chain.first(BARRIERS)


@dataclass(frozen=True)
class OverChannels:
    """Steps up to `last` for a pass whose tiles have all channels: softmaxes, elementwise steps, and a reduction (step
    `reduce`) with the steps after it."""

    reduce: int | None
    last: int


def over_channels(chain: Chain) -> OverChannels | None:
    """The steps over channels directly after the last fused step; None for a linear layer, whose features are rows."""
    if not chain.dims:
        return None
    first = last = last_fused_step(chain)
    reduce: int | None = None
    for number, step in enumerate(chain.steps[first:], first + 1):
        is_reduction = isinstance(step, Reduce) and step.over == "channels"
        is_new = number > first + 1 and isinstance(step, Pointwise | Cast) and not _goes_back(step, reduce)
        is_over = reduce is None and (is_reduction or isinstance(step, Softmax))
        if not (is_new or is_over) or too_many_tensors(chain, number) is not None:
            break
        reduce, last = number if is_reduction else reduce, number
    return None if last == first else OverChannels(reduce, last)


def is_over_channels(step: Step) -> TypeGuard[Softmax | Reduce]:
    return isinstance(step, Softmax) or (isinstance(step, Reduce) and step.over == "channels")


def _goes_back(step: Step, reduce: int | None) -> bool:
    """Whether a step reads a value from before the reduction."""
    return reduce is not None and any(value.index < reduce for value in values_of(step))


def channels_end(chain: Chain) -> Reduce | None:
    """A chain's reduction over channels; None for a linear layer, whose features are rows."""
    found = (step for step in chain.steps if isinstance(step, Reduce) and step.over == "channels")
    return next(found, None) if chain.dims else None


def fused_pool(chain: Chain) -> FusedPool | None:
    """The first pool, merged with pools directly after it where that is possible.

    None if a reduction, a second norm or a layer_norm, whose tiles are rows, comes before it, or if it goes over a
    linear layer's features.
    """
    seen_norm = False
    if not chain.dims:
        return None
    for number, step in enumerate(chain.steps, 1):
        if isinstance(step, Reduce | Softmax) or (isinstance(step, Normalize) and (seen_norm or step.over == "row")):
            return None
        seen_norm |= isinstance(step, Normalize)
        if isinstance(step, Pool):
            pool, last = step, number
            while last < len(chain.steps) and (both := joined(pool, chain.steps[last], last)) is not None:
                pool, last = both, last + 1
            return FusedPool(number, last, pool)
    return None


def joined(pool: Pool, step: Step, number: int) -> Pool | None:
    """One pool that equals `pool` followed by `step`, which reads value `number`; None if there is none.

    Two max_pools merge, and so do two avg_pools whose windows do not overlap.
    """
    if not isinstance(step, Pool) or step.op != pool.op or step.operand != Value(number):
        return None
    if pool.divisor is not None or step.divisor is not None:
        return None
    windows = pool.windows.joined(step.windows, may_overlap=pool.op == "max_pool")
    return None if windows is None else replace(pool, windows=windows)


def last_before_pool(chain: Chain) -> int:
    """The last fused step whose value has the first value's size: the last before the pool, or the last of all."""
    pool, last = fused_pool(chain), last_fused_step(chain)
    return last if pool is None else min(last, pool.first - 1)


def has_norm(chain: Chain) -> bool:
    """Whether a norm is fused. Only one before a pool counts; PyTorch runs one after it."""
    pool = fused_pool(chain)
    return any(isinstance(step, Normalize) for step in chain.steps[: None if pool is None else pool.first])


def norm_hides_infinities(chain: Chain) -> bool:
    """Whether an infinity in the convolution's result reaches a norm, which turns its whole group into NaN.

    If so, our convolution may turn it into NaN as well. A relu before the norm removes only one of the two signs, and
    the taps of a kernel give infinities of both.
    """
    lost = 0
    for step in chain.steps:
        if isinstance(step, Pool):  # its windows may skip the last positions
            return False
        if isinstance(step, Normalize):
            return lost < 2 and step.over != "row"  # an infinity affects more than one row
        lost += POINTWISE[step.op].finite_at if isinstance(step, Pointwise) else 0
    return False


def last_fused_step(chain: Chain) -> int:
    """The last fused step. PyTorch runs the steps from a second barrier on, and steps after a pool that read more
    tensors than a pass can."""
    seen_norm, in_rows, pool = False, has_whole_rows(chain), fused_pool(chain)
    for number, step in enumerate(chain.steps, 1):
        if in_rows and _is_of_whole_rows(step):
            continue  # a program has a whole row, so any number of barriers over rows fuse
        is_pooled = pool is not None and number > pool.last
        is_second = isinstance(step, Normalize) and (seen_norm or in_rows or is_pooled)
        if isinstance(step, Reduce | Softmax) or is_second:
            return number - 1
        if is_pooled and too_many_tensors(chain, number) is not None and too_many_tensors(chain, number - 1) is None:
            return number - 1
        if isinstance(step, Pool) and (pool is None or not pool.first <= number <= pool.last):
            return number - 1
        seen_norm |= isinstance(step, Normalize)
    return len(chain.steps)


def fused_norm(chain: Chain) -> Normalize | None:
    """The norm among the fused steps; there is at most one."""
    return next((step for step in chain.steps[: last_fused_step(chain)] if isinstance(step, Normalize)), None)


def row_norm(chain: Chain) -> int | None:
    """The number of the first norm, if it is a layer_norm."""
    barrier = first_barrier(chain)
    step = None if barrier is None else chain.steps[barrier - 1]
    return barrier if isinstance(step, Normalize) and step.over == "row" else None


def rows_from(chain: Chain) -> int | None:
    """The number of the first barrier, if a pass by rows can run it: over the last axes, or over a linear layer's
    features or groups of them."""
    barrier = first_barrier(chain)
    if barrier is None or chain.dims:
        return row_norm(chain)
    step = chain.steps[barrier - 1]
    return None if isinstance(step, Pool) or (isinstance(step, Normalize) and step.over == "batch") else barrier


def has_whole_rows(chain: Chain) -> bool:
    """Whether a program of the pass by rows has all features of a sample: later barriers over them fuse as well."""
    barrier = first_barrier(chain)
    return not chain.dims and barrier is not None and _is_of_whole_rows(chain.steps[barrier - 1])


def _is_of_whole_rows(step: Step) -> bool:
    if isinstance(step, Normalize):
        return step.over == "row" or (step.over == "sample" and step.groups == 1)
    return isinstance(step, Reduce | Softmax)


def row_parts(chain: Chain) -> int:
    """Rows per sample in the pass by rows, for a linear layer: the number of groups of features, or one."""
    barrier = rows_from(chain)
    step = None if barrier is None else chain.steps[barrier - 1]
    return (step.groups or 1) if isinstance(step, Normalize) and step.over == "sample" else 1


def takes_the_batch(chain: Chain) -> bool:
    """Whether a norm's statistics go over all samples, as batch_norm's do in training."""
    return any(isinstance(step, Normalize) and step.over == "batch" for step in chain.steps)


def is_all_that_is_read(chain: Chain, number: int) -> bool:
    """Whether step `number` and those after it read no value earlier than the one directly before it."""
    return all(chain.last_uses.get(earlier, 0) < number for earlier in range(number - 1))


def moments_only(chain: Chain) -> MomentsOnly | None:
    """The steps for which moments are enough, or None.

    They are enough if the result depends on the first barrier's input only through its moments per sample and channel.
    That is so if every step from there to a reduction is affine per sample and channel: norms, and additions of or
    multiplications by numbers and per-channel tensors. The mean of an affine function is the function of the mean. Such
    steps directly before a norm are applied to moments as well.
    """
    start = first_barrier(chain)
    if start is None or not chain.dims:  # a linear layer has one position, so moments are the values themselves
        return None
    is_norm = isinstance(chain.steps[start - 1], Normalize)
    while is_norm and start > 1 and _carries(chain, start - 1):
        start -= 1
    for number in range(start, len(chain.steps) + 1):
        step = chain.steps[number - 1]
        if not _follows(step, number, start) or (isinstance(step, Normalize) and step.over == "row"):
            return None
        if isinstance(step, Reduce) and step.over == "channels":
            return None
        if isinstance(step, Reduce):
            squares = any(isinstance(other, Normalize) for other in chain.steps[start - 1 : number - 1])
            return MomentsOnly(start - 1, number, squares) if _is_last_need(chain, start, number) else None
        if not isinstance(step, (Normalize, Cast)) and not _is_affine(chain, step):
            return None
    return None


def _carries(chain: Chain, number: int) -> bool:
    """Whether a step can be applied to moments, and no step after the next one reads its input."""
    step = chain.steps[number - 1]
    return _is_affine(chain, step) and _follows(step, number, number) and chain.last_uses.get(number - 1) == number


def _follows(step: Step, number: int, start: int) -> bool:
    """Whether a step reads only the value directly before it."""
    operand = step.operands[0] if isinstance(step, Pointwise) else step.operand
    return isinstance(operand, Value) and operand.index == number - 1 >= start - 1


def _is_affine(chain: Chain, step: Step) -> bool:
    if not isinstance(step, Pointwise) or not POINTWISE[step.op].affine:
        return False
    return all(
        isinstance(other, Scalar) or (isinstance(other, Slot) and chain.roles[other.index] != "full")
        for other in step.operands[1:]
    )


def _is_last_need(chain: Chain, start: int, reduce: int) -> bool:
    """True where no step after the reduction reads a value from before it."""
    uses = chain.last_uses
    return all(uses.get(index, 0) <= reduce for index in range(start - 1, reduce))
