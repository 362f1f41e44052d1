"""Shapes in the remarks of a kernel's parameters, with the launch's numbers for names that are not in the kernel."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import replace

from postlude.export.device.library import Kernel
from postlude.export.syntax.source import parse, remark_of
from postlude.plan.program import Argument, Buffer, Descriptor

_SHAPE = re.compile(r"\[([^\]]+)\]")
_NAME = re.compile(r"[A-Z][A-Z\d_]*")


def remarks_with_sizes(
    kernel: ast.FunctionDef, given: Mapping[str, Argument], numbers: Mapping[str, int]
) -> tuple[tuple[str, str], ...]:
    """The remarks of the parameters, for this launch. `numbers` are the kernel's constants, which keep their names."""
    known, remarks = dict(numbers), {arg.arg: remark_of(arg) for arg in kernel.args.args}
    for _ in range(2):  # what one parameter tells of N, another one needs
        for word, remark in remarks.items():
            found, value = _SHAPE.search(remark), given.get(word)
            if found is not None and isinstance(value, Buffer | Descriptor):
                words = _said(found[1].split(", "), value, known, numbers)
                remarks[word] = f"{remark[: found.start(1)]}{words}{remark[found.end(1) :]}"
    return tuple(remarks.items())


def common(one: Kernel, other: Kernel) -> Kernel:
    """A kernel of two launches, with the remarks that hold for both."""
    return replace(one, remarks=tuple(remark for remark in one.remarks if remark in other.remarks))


def with_remarks(kernel: Kernel) -> ast.FunctionDef:
    """The kernel with its remarks."""
    function, remarks = parse(kernel.text), dict(kernel.remarks)
    for arg in function.args.args:
        vars(arg)["remark"] = remarks.get(arg.arg, remark_of(arg))
    return function


def _said(sizes: list[str], value: Buffer | Descriptor, known: dict[str, int], own: Mapping[str, int]) -> str:
    """A shape in numbers, as far as the tensor's own shape tells them; what it tells is added to `known`."""
    factors = [size.split("·") for size in sizes]
    for place, number in _open_sizes(factors, value, known).items():
        unknown = [part for part in factors[place] if _number(part, known) is None]
        rest = math.prod(_number(part, known) or 1 for part in factors[place])
        if len(unknown) == 1 and _NAME.fullmatch(unknown[0]) and number % rest == 0:
            known[unknown[0]] = number // rest
    numbers = [math.prod(_number(part, known) or 0 for part in parts) for parts in factors]
    axes = _axes(numbers, value.shape) if isinstance(value, Buffer) else [()] * len(factors)
    shown = []
    for parts, sizes_of in zip(factors, axes):
        is_several = len(parts) == 1 and parts[0] not in own and len(sizes_of) > 1
        shown.append("·".join(map(str, sizes_of) if is_several else _shown(parts, known, own)))
    return ", ".join(shown)


def _open_sizes(factors: list[list[str]], value: Buffer | Descriptor, known: Mapping[str, int]) -> dict[int, int]:
    """The numbers for those places of a shape where a name is unknown, if the tensor tells them."""
    places = [place for place, parts in enumerate(factors) if any(_number(part, known) is None for part in parts)]
    if isinstance(value, Descriptor) and len(value.shape) == len(factors):
        return {place: value.shape[place] for place in places}
    if len(places) != 1:
        return {}
    count = math.prod(value.shape)
    rest = math.prod(_number(part, known) or 1 for place, parts in enumerate(factors) if place not in places
                     for part in parts)  # fmt: skip
    return {places[0]: count // rest} if count % rest == 0 else {}


def _axes(numbers: list[int], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The axes of a tensor that each number is the product of, without those of 1; nothing if they are not in order."""
    left, found = list(shape), list[tuple[int, ...]]()
    for number in numbers:
        taken: list[int] = []
        while left and math.prod(taken) < number:
            taken.append(left.pop(0))
        if math.prod(taken) != number:
            return [()] * len(numbers)
        found.append(tuple(size for size in taken if size != 1))
    return found


def _shown(parts: list[str], known: Mapping[str, int], own: Mapping[str, int]) -> list[str]:
    words = [part if part in own else str(known.get(part, part)) for part in parts]
    return [word for word in words if word != "1"] or ["1"]


def _number(part: str, known: Mapping[str, int]) -> int | None:
    return int(part) if part.isdigit() else known.get(part)
