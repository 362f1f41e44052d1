"""Writes the steps of a pass as the text of one Triton function, for the library and for exported files alike.

The function works on one block of a value and loads what else it needs itself:

    v0              the block as loaded        mean, rstd   the norm's, in `whole`
    o_c, m_c        channel of each element and its mask
    base, o_x, m_x  where the row or sample begins, each element's offset from there, and its mask
    a0 … a5         pointers to the other tensors of the pass; where one of them has a number per sample and channel,
                    a5 is how many elements a sample has: with the number of channels, in the text, it tells from
                    `base` which sample this is, and the kernels need not say it to chains that do not ask
    o_l, L          in `rows`, where each row of the block is one of a layer_norm: place in it, and its length

Where a chain needs only moments, a second function carries them (`emit_moments`): mean, var [BLOCK_C] per channel of
one sample, each over `count` positions. It runs in one program for each sample.
"""

from __future__ import annotations

import functools
import math

from postlude.chain import Cast, Chain, Normalize, Operand, Pointwise, Reduce, Scalar, Slot, Step, operands_of
from postlude.words import POINTWISE as WORDS
from postlude.words import PointwiseRow

OPERANDS = 6  # pointers that the kernels take
_SAMPLE = f"a{OPERANDS - 1}"  # elements of a sample, where a step asks for them
NAMES = ("x", "y", "z", "u", "w")  # a step's operands in the texts below, by their order


def call_of(function: str, row: PointwiseRow, first: tuple[str, ...] = ()) -> str:
    """The text that calls a word's device function: its operands, then its settings, left open."""
    names = (*first, *NAMES[: row.arity], *row.settings)
    return f"{function}({', '.join('{' + name + '}' for name in names)})"


# Device functions are named as their words are (kernels/triton/pointwise.py); one setting chooses between two.
POINTWISE: dict[str, str] = {word: call_of(word, row) for word, row in WORDS.items()} | {"gelu": "{approximate}({x})"}
# What an affine word makes of a variance, where it is not left as it is.
VARIANCE: dict[str, str | None] = {
    "add": None,
    "sub": None,
    "rsub": None,
    "mul": "mul({x}, {y} * {y})",
    "div": "div({x}, {y} * {y})",
    "batch_norm": "batch_norm_variance({x}, {z}, {u}, {eps})",
}
_SUM = "tl.sum(tl.where(m_c, mean, 0.0))"  # over channels; lanes past the last one may hold NaN
REDUCTIONS: dict[tuple[str, str], str] = {
    ("mean", "space"): "mean",
    ("adaptive_avg_pool", "space"): "mean",
    ("sum", "space"): "mean * count",
    ("mean", "sample"): f"{_SUM} / C",
    ("sum", "sample"): f"{_SUM} * count",
}
_BIAS = 2  # the slot of a convolution's bias
_WORDS = {"none": "gelu", "tanh": "gelu_tanh"}  # settings that name a device function


@functools.lru_cache(maxsize=1024)
def pass_slots(chain: Chain, last: int, first: int = 0) -> tuple[int, ...]:
    """The slots that steps up to `last` read, in the order of their pointers; `first` as for `emit`."""
    read = _read_by(chain, max(first, 1), last)
    return tuple(dict.fromkeys([_BIAS, *read] if _has_bias(chain) and not first else read))


@functools.lru_cache(maxsize=1024)
def reads_rows(chain: Chain, last: int, first: int = 0) -> bool:
    """True where a step up to `last` reads a number per sample and channel."""
    return any(chain.roles[slot] == "row" for slot in pass_slots(chain, last, first))


def too_many_tensors(chain: Chain, last: int) -> str | None:
    most = OPERANDS - reads_rows(chain, last)
    return f"the steps read more than {most} tensors" if len(pass_slots(chain, last)) > most else None


@functools.lru_cache(maxsize=1024)
def moments_slots(chain: Chain, first: int, last: int) -> tuple[int, ...]:
    """The slots that steps `first` to `last` read, in the order of their pointers."""
    return tuple(dict.fromkeys(_read_by(chain, first, last)))


def emit(
    chain: Chain,
    name: str,
    last: int,
    pointers: tuple[int, ...],
    channels: int = 0,
    first: int = 0,
    spread: str = "",
) -> str:
    """Steps up to `last`; a norm among them takes its mean and rstd as arguments of `whole`, or finds them in `rows`.

    They begin with the convolution's bias where `first` is 0; else with step `first`, on what the one before it gave.
    `channels` of the value are asked for where a step reads a number per sample and channel. `spread` brings a number
    per channel to the block's shape where `o_c` has one axis: a kernel whose block is a product's accumulator wants
    it so, for with a load of two axes the compiler moved the whole block into the layout of that load, three times.
    """
    if reads_rows(chain, last, first) and not channels:
        raise ValueError("a number per sample and channel cannot be found without the number of channels")
    given = {"whole": "mean, rstd, ", "rows": "o_l, L, "}.get(name, "")
    start = max(first, 1)
    given_value = f"v{start - 1}"
    lines = ["@triton.jit", f"def {name}({given_value}, {given}o_c, base, o_x, m_c, m_x, {pointer_arguments()}):"]
    loaded: set[int] = set()
    if _has_bias(chain) and not first:  # the library's convolution adds it in a pass of its own over the whole result
        lines += [f"    {_load(chain, Slot(_BIAS), pointers, spread=spread)}", f"    v0 = v0 + t{_BIAS}"]
    # A tile of `rows` may hold rows of several samples.
    where, mask = ("(base + o_x)", "m_x") if name == "rows" else ("base", "m_c")
    row = (f"{where} // {_SAMPLE} * {channels} + o_c", mask)
    for number, step in enumerate(chain.steps[start - 1 : last], start):
        for operand in operands_of(step):
            if isinstance(operand, Slot) and operand.index not in loaded:
                loaded.add(operand.index)
                lines.append(f"    {_load(chain, operand, pointers, row, given_value, spread)}")
        if isinstance(step, Normalize) and step.over == "row":
            lines.append(f"    mean, rstd = row_statistics(v{step.operand.index}, m_x, L, {step.eps!r})")
        lines.append(f"    v{number} = {_expression(step)}")
    lines.append(f"    return v{last}")
    return "\n".join(lines) + "\n"


def emit_moments(chain: Chain, first: int, last: int, pointers: tuple[int, ...]) -> str:
    """Steps `first` to `last`, the reduction, on moments: the mean of an affine image is the image of the mean."""
    lines = ["@triton.jit", f"def moments(mean, var, count, o_c, m_c, C, {pointer_arguments()}):"]
    row = ("tl.program_id(0).to(tl.int64) * C + o_c", "m_c")
    lines += [f"    {_load(chain, Slot(index), pointers, row, 'mean')}" for index in pointers]
    for number, step in enumerate(chain.steps[first - 1 : last], first):
        squares = any(isinstance(later, Normalize) for later in chain.steps[number:last])
        lines += [f"    {line}" for line in _moments(step, squares)]
    return "\n".join(lines) + "\n"


def _moments(step: Step, squares: bool) -> list[str]:
    """What one step makes of mean and var; `squares`: a later norm reads the variance."""
    if isinstance(step, Cast):
        return []
    if isinstance(step, Reduce):
        return [f"return {REDUCTIONS[step.op, step.over]}"]
    if isinstance(step, Pointwise):
        return _affine(step.op, words_of(step), squares)
    per_group = 1 if step.groups is None else f"C // {step.groups}"
    lines = [f"mean, var = normalize_moments(mean, var, o_c, {per_group}, {step.eps!r})"]
    for op, slot in (("mul", step.weight), ("add", step.bias)):
        lines += [] if slot is None else _affine(op, {"y": _operand(slot)}, squares)
    return lines


def _affine(op: str, words: dict[str, str], squares: bool) -> list[str]:
    variance = VARIANCE[op]
    lines = [f"mean = {POINTWISE[op].format(**{**words, 'x': 'mean'})}"]
    return lines + ([f"var = {variance.format(**{**words, 'x': 'var'})}"] if squares and variance else [])


def _read_by(chain: Chain, first: int, last: int) -> list[int]:
    steps = chain.steps[first - 1 : last]
    return [operand.index for step in steps for operand in operands_of(step) if isinstance(operand, Slot)]


def _has_bias(chain: Chain) -> bool:
    return chain.producer is not None and chain.producer.has_bias


def pointer_arguments() -> str:
    return ", ".join(f"a{number}" for number in range(OPERANDS))


def _load(
    chain: Chain,
    slot: Slot,
    pointers: tuple[int, ...],
    row: tuple[str, str] = ("", ""),
    like: str = "v0",
    spread: str = "",
) -> str:
    """`row` is where a number per sample and channel lies, and its mask."""
    pointer, role = f"a{pointers.index(slot.index)}", chain.roles[slot.index]
    if role == "one":
        return f"t{slot.index} = tl.load({pointer}).to({like}.dtype)"
    by_role = {"full": ("base + o_x", "m_x"), "last": ("o_l", "o_l < L"), "row": row}
    where, mask = by_role.get(role, ("o_c", "m_c"))
    spread = spread if role not in ("full", "last") else ""
    return f"t{slot.index} = tl.load({pointer} + {where}, mask={mask}, other=0.0){spread}.to({like}.dtype)"


def _expression(step: Step) -> str:
    if isinstance(step, Cast):
        return f"v{step.operand.index}"  # blocks stay in the accumulator's dtype: what is stored is rounded once
    if isinstance(step, Normalize):
        scale = "rstd" if step.weight is None else f"(rstd * t{step.weight.index})"
        shift = "" if step.bias is None else f" + t{step.bias.index}"
        return f"(v{step.operand.index} - mean) * {scale}{shift}"
    if isinstance(step, Reduce):
        raise ValueError("a reduction is no step of a block")
    if (inverse := _exact_inverse(step)) is not None:
        return POINTWISE["mul"].format(x=_operand(step.operands[0]), y=repr(inverse))
    return POINTWISE[step.op].format(**words_of(step))


def _exact_inverse(step: Pointwise) -> float | None:
    """By what a division by a power of two can be multiplied instead: a division takes eight instructions."""
    divisor = step.operands[1] if step.op == "div" else None
    if not isinstance(divisor, Scalar) or abs(math.frexp(divisor.value)[0]) != 0.5:
        return None
    if not 2.0**-64 <= abs(divisor.value) <= 2.0**64:  # else the inverse may be infinite, or no normal number
        return None
    return 1.0 / divisor.value


def words_of(step: Pointwise) -> dict[str, str]:
    """What the tables' texts leave open: the operands x, y, …, and the settings by their names."""
    settings = {name: _WORDS.get(str(value), repr(value)) for name, value in step.settings}
    return {**dict(zip(NAMES, map(_operand, step.operands))), **settings}


def _operand(operand: Operand) -> str:
    if isinstance(operand, Scalar):
        return repr(operand.value)
    return f"t{operand.index}" if isinstance(operand, Slot) else f"v{operand.index}"
