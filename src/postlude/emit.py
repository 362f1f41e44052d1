"""Writes the steps of a pass as the text of one Triton function, for the library and for exported files alike.

The function works on one block of a value and loads what else it needs itself:

    v0              the block as loaded        mean, rstd   the norm's, in `whole`
    o_c, m_c        channel of each element and its mask
    base, o_x, m_x  where the row or sample begins, each element's offset from there, and its mask
    a0 … a5         pointers to the other tensors of the pass
"""

from __future__ import annotations

import functools

from postlude.chain import Cast, Chain, Normalize, Operand, Pointwise, Reduce, Scalar, Slot, Step, operands_of

OPERANDS = 6  # pointers that the kernels take
POINTWISE: dict[str, str] = {
    "relu": "relu({x})",
    "clamp_min": "clamp_min({x}, {bound})",
    "leaky_relu": "leaky_relu({x}, {slope})",
    "silu": "silu({x})",
    "gelu": "{approximate}({x})",
    "add": "add({x}, {y})",
    "mul": "mul({x}, {y})",
}
_BIAS = 2  # the slot of a convolution's bias
_WORDS = {"none": "gelu", "tanh": "gelu_tanh"}  # settings that name a device function


@functools.lru_cache(maxsize=1024)
def pass_slots(chain: Chain, last: int) -> tuple[int, ...]:
    """The slots that steps 1 to `last` read, in the order of their pointers; the convolution's bias is one of them."""
    read = [operand.index for step in chain.steps[:last] for operand in operands_of(step) if isinstance(operand, Slot)]
    return tuple(dict.fromkeys([_BIAS, *read] if _has_bias(chain) else read))


def emit(chain: Chain, name: str, last: int, pointers: tuple[int, ...]) -> str:
    """Steps 1 to `last`; a norm among them takes its mean and rstd as arguments (only `whole` has them)."""
    moments = "mean, rstd, " if name == "whole" else ""
    lines = ["@triton.jit", f"def {name}(v0, {moments}o_c, base, o_x, m_c, m_x, {_arguments()}):"]
    loaded: set[int] = set()
    if _has_bias(chain):  # the library's convolution adds it in a pass of its own over the whole result
        lines += [f"    {_load(chain, Slot(_BIAS), pointers)}", f"    v0 = v0 + t{_BIAS}"]
    for number, step in enumerate(chain.steps[:last], 1):
        for operand in operands_of(step):
            if isinstance(operand, Slot) and operand.index not in loaded:
                loaded.add(operand.index)
                lines.append(f"    {_load(chain, operand, pointers)}")
        lines.append(f"    v{number} = {_expression(step)}")
    lines.append(f"    return v{last}")
    return "\n".join(lines) + "\n"


def _has_bias(chain: Chain) -> bool:
    return chain.producer is not None and chain.producer.has_bias


def _arguments() -> str:
    return ", ".join(f"a{number}" for number in range(OPERANDS))


def _load(chain: Chain, slot: Slot, pointers: tuple[int, ...]) -> str:
    pointer = f"a{pointers.index(slot.index)}"
    where, mask = ("base + o_x", "m_x") if chain.roles[slot.index] == "full" else ("o_c", "m_c")
    return f"t{slot.index} = tl.load({pointer} + {where}, mask={mask}, other=0.0).to(v0.dtype)"


def _expression(step: Step) -> str:
    if isinstance(step, Cast):
        return f"v{step.operand.index}"  # blocks stay in the accumulator's dtype: what is stored is rounded once
    if isinstance(step, Normalize):
        scale = "rstd" if step.weight is None else f"(rstd * t{step.weight.index})"
        shift = "" if step.bias is None else f" + t{step.bias.index}"
        return f"(v{step.operand.index} - mean) * {scale}{shift}"
    if isinstance(step, Reduce):
        raise ValueError("a reduction is no step of a block")
    return _pointwise(step)


def _pointwise(step: Pointwise) -> str:
    settings = {name: _WORDS.get(str(value), repr(value)) for name, value in step.settings}
    x, *others = (_operand(operand) for operand in step.operands)
    return POINTWISE[step.op].format(x=x, y=others[0] if others else "", **settings)


def _operand(operand: Operand) -> str:
    if isinstance(operand, Scalar):
        return repr(operand.value)
    return f"t{operand.index}" if isinstance(operand, Slot) else f"v{operand.index}"
