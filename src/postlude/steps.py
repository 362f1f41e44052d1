"""The steps of a pass as expressions of one block, and the tensors that they read.

A function of steps reads the block v0, or the value of the step before its first one. Its other arguments:

    mean, rstd      the norm's, in `whole`
    o_l, L          in `rows`, where each row of the block is a row of layer_norm: position in the row, and its length
    o_c, m_c        channel of each element and its mask
    base, o_x, m_x  start of the row or sample, each element's offset from there, and its mask

If a chain needs only moments, `moments` applies the steps to them: mean, var [BLOCK_C] per channel of one sample, each
over `count` positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from postlude.chain import (
    LENGTHS,
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
    operands_of,
)
from postlude.expressions import Apply, Assign, Expression, Function, Load, Name, Term, bound, call, live

OPERANDS = 6  # pointers that the kernels take
_BIAS = Slot(2)  # of a convolution
X, Y, Z, U, W = OPERAND_NAMES = tuple(map(Name, "xyzuw"))  # a step's operands in the tables, by their order
MEAN, RSTD, VAR, COUNT = map(Name, ("mean", "rstd", "var", "count"))
O_C, M_C, M_X, C, L = map(Name, ("o_c", "m_c", "m_x", "C", "L"))
EPS = Name("eps")
ROW = (Name("o_l"), L)
PLACE = (O_C, Name("base"), Name("o_x"), M_C, M_X)
# The variance after an affine word.
VARIANCE: dict[str, Expression] = {
    "add": X,
    "sub": X,
    "rsub": X,
    "mul": call("mul", X, Y * Y),
    "div": call("div", X, Y * Y),
    "batch_norm": call("batch_norm_variance", X, Z, U, EPS),
}
_SUM = call("tl.sum", call("tl.where", M_C, MEAN, Scalar(0.0)))  # over channels; lanes past the last may hold NaN
REDUCTIONS: dict[tuple[str, str], Expression] = {
    ("mean", "space"): MEAN,
    ("adaptive_avg_pool", "space"): MEAN,
    ("sum", "space"): MEAN * COUNT,
    ("mean", "sample"): _SUM / C,
    ("sum", "sample"): _SUM * COUNT,
}

# Reductions over a linear layer's features, in a pass by rows. max and amax differ only in their gradients.
ROW_REDUCTIONS: dict[str, Callable[[Value], Apply]] = {
    "sum": lambda x: call("row_sum", x, M_X),
    "mean": lambda x: call("row_mean", x, M_X, L),
    "logsumexp": lambda x: call("row_log_sum_exp", x, M_X),
    **dict.fromkeys(("max", "amax"), lambda x: call("row_max", x, M_X)),
    **dict.fromkeys(("min", "amin"), lambda x: call("row_min", x, M_X)),
}


@functools.lru_cache(maxsize=1024)
def pass_slots(chain: Chain, last: int, first: int = 0) -> tuple[int, ...]:
    """The slots that steps up to `last` read, in the order of their pointers; `first` as for `forward`."""
    read = [operand for step in chain.steps[max(first, 1) - 1 : last] for operand in operands_of(step)]
    bias = [_BIAS] if _has_bias(chain) and not first else []
    return tuple(dict.fromkeys(operand.index for operand in [*bias, *read] if isinstance(operand, Slot)))


@functools.lru_cache(maxsize=1024)
def reads_rows(chain: Chain, last: int, first: int = 0) -> bool:
    """Whether a step up to `last` reads a number per sample and channel."""
    return any(chain.roles[slot] == "row" for slot in pass_slots(chain, last, first))


def too_many_tensors(chain: Chain, last: int, more: int = 0) -> str | None:
    """Why steps up to `last` read too many tensors for one pass, or None. `more` tensors are read besides theirs."""
    most = OPERANDS - more - reads_rows(chain, last)  # the size of a sample takes one pointer's place
    return f"the steps read more than {most} tensors" if len(pass_slots(chain, last)) > most else None


def forward(chain: Chain, name: str, last: int, first: int = 0) -> Function:
    """The steps up to `last`. A norm among them takes its mean and rstd as arguments in `whole` and `given`, or
    computes them in `rows`. In `given` softmaxes go over the rows of the block, and a reduction's result is loaded.

    If `first` is 0, they begin with the convolution's bias; otherwise with step `first`, on the value before it. A
    tensor is loaded before the first step that reads it.
    """
    start, body = max(first, 1), []
    loaded: set[Slot] = set()
    if _has_bias(chain) and not first:  # PyTorch's convolution would add it in another pass
        body += [_load(chain, _BIAS), Assign((Value(0),), call("+", Value(0), _BIAS))]
    for number, step in enumerate(chain.steps[start - 1 : last], start):
        for operand in operands_of(step):
            if isinstance(operand, Slot) and operand not in loaded:
                loaded.add(operand)
                body.append(_load(chain, operand))
        if isinstance(step, Normalize) and _has_row_statistics(step, name):
            body.append(Assign((MEAN, RSTD), call("row_statistics", step.operand, M_X, L, Scalar(step.eps))))
        if isinstance(step, Reduce) and name == "rows":
            body.append(Assign((Value(number),), ROW_REDUCTIONS[step.op](step.operand)))
        elif isinstance(step, Reduce) and name == "given":
            continue
        elif isinstance(step, Softmax) and name in ("rows", "given"):
            body.append(Assign((Value(number),), call(f"row_{step.op}", step.operand, M_X, *eps_of(step).values())))
        else:
            body.append(Assign((Value(number),), _value(step)))
    takes = (Value(start - 1), *{"whole": (MEAN, RSTD), "rows": ROW}.get(name, ()), *PLACE)
    return Function(name, takes, tuple(body), Value(last), pass_slots(chain, last, first))


def _has_row_statistics(step: Normalize, name: str) -> bool:
    """Whether the norm goes over rows of the tile: layer_norm's, or groups of a linear layer's features."""
    return step.over == "row" or name == "rows"


def moments(chain: Chain, first: int, last: int) -> Function:
    """Steps `first` to `last`, the reduction, on moments: the mean of an affine function is the function of the
    mean."""
    slots = pass_slots(chain, last, first)
    body = [_load(chain, Slot(slot)) for slot in slots]
    *before, end = chain.steps[first - 1 : last]
    body += [line for step in before for line in _moments(step)]
    assert isinstance(end, Reduce)
    result = REDUCTIONS[end.op, end.over]
    return Function("moments", (MEAN, VAR, COUNT, O_C, M_C, C), live(body, [result]), result, slots)


def device_function(step: Pointwise) -> str:
    """The name of a word's device function (kernels/triton/pointwise.py): the word itself, except where a setting
    chooses between two."""
    return "gelu_tanh" if ("approximate", "tanh") in step.settings else step.op


def meanings(step: Pointwise) -> dict[Term, Term]:
    """What the placeholders in a table's row stand for: the operands x, y, …, and the settings by name."""
    meant: dict[Term, Term] = dict(zip(OPERAND_NAMES, step.operands))
    return meant | {Name(name): Scalar(value) for name, value in step.settings if not isinstance(value, str)}


def eps_of(step: Softmax | Reduce) -> dict[Term, Term]:
    """What `eps` stands for, where a step over channels has one."""
    return {EPS: Scalar(step.eps)} if isinstance(step, Softmax) and step.op in LENGTHS else {}


def _value(step: Step) -> Term:
    if isinstance(step, Cast):
        return step.operand  # blocks stay in the accumulator's dtype; only what is stored is rounded
    if isinstance(step, Normalize):
        scale = RSTD if step.weight is None else RSTD * step.weight
        scaled = call("-", step.operand, MEAN) * scale
        return scaled if step.bias is None else scaled + step.bias
    if isinstance(step, Softmax):  # the block has all channels
        return call(f"channel_{step.op}", step.operand, M_C, *eps_of(step).values())
    if isinstance(step, Reduce | Pool):
        raise ValueError("a reduction or a pool is no step of a block")
    if (inverse := _exact_inverse(step)) is not None:
        return call("mul", step.operands[0], Scalar(inverse))
    return Apply(device_function(step), tuple(meanings(step).values()))


def _exact_inverse(step: Pointwise) -> float | None:
    """The factor that replaces a division by a power of two exactly; a division takes eight instructions."""
    divisor = step.operands[1] if step.op == "div" else None
    if not isinstance(divisor, Scalar) or abs(math.frexp(divisor.value)[0]) != 0.5:
        return None
    if not 2.0**-64 <= abs(divisor.value) <= 2.0**64:  # else the inverse may be infinite or subnormal
        return None
    return 1.0 / divisor.value


def _moments(step: Step) -> list[Assign]:
    """The effect of one step on mean and var."""
    if isinstance(step, Pointwise):
        return _affine(step.op, meanings(step))
    if not isinstance(step, Normalize):
        return []
    per_group = Scalar(1) if step.groups is None else call("//", C, Scalar(step.groups))
    body = [Assign((MEAN, VAR), call("normalize_moments", MEAN, VAR, O_C, per_group, Scalar(step.eps)))]
    for word, slot in (("mul", step.weight), ("add", step.bias)):
        body += [] if slot is None else _affine(word, {X: MEAN, Y: slot})
    return body


def _affine(word: str, meant: dict[Term, Term]) -> list[Assign]:
    mean = Assign((MEAN,), Apply(word, tuple({**meant, X: MEAN}.values())))
    variance = Assign((VAR,), bound(VARIANCE[word], {**meant, X: VAR}))
    return [mean] if variance.value == VAR else [mean, variance]


def _load(chain: Chain, slot: Slot) -> Assign:
    return Assign((slot,), Load(slot, chain.roles[slot.index]))


def _has_bias(chain: Chain) -> bool:
    return chain.producer is not None and chain.producer.has_bias
