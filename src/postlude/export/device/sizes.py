"""Shapes in the remarks of a kernel's parameters, with the launch's numbers for names that are not in the kernel."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from postlude.export.device.library import Kernel, kernel_of
from postlude.export.syntax.source import parse, remark_of
from postlude.plan.program import Argument, Buffer, Descriptor

_SHAPE = re.compile(r"\[([^\]]+)\]")
_NAME = re.compile(r"[A-Z][A-Z\d_]*")


def with_sizes(kernel: Kernel, given: Mapping[str, Argument], numbers: Mapping[str, int]) -> Kernel:
    """The kernel with remarks for this launch. `numbers` are its own constants, which keep their names."""
    function, known = parse(kernel.text), dict(numbers)
    for _ in range(2):  # what one parameter tells of N, another one needs
        for arg in function.args.args:
            found = _SHAPE.search(remark_of(arg))
            value = given.get(arg.arg)
            if found is not None and isinstance(value, Buffer | Descriptor):
                words = _said(found[1].split(", "), value, known, numbers)
                vars(arg)["remark"] = f"{found.string[: found.start(1)]}{words}{found.string[found.end(1) :]}"
    return replace(kernel, remarks=tuple((arg.arg, remark_of(arg)) for arg in function.args.args))


def common(one: Kernel, other: Kernel) -> Kernel:
    """A kernel of two launches, with the remarks that hold for both."""
    return replace(one, remarks=tuple(remark for remark in one.remarks if remark in other.remarks))


def with_remarks(kernel: Kernel) -> Kernel:
    """The kernel with its remarks in its text."""
    function, remarks = parse(kernel.text), dict(kernel.remarks)
    for arg in function.args.args:
        vars(arg)["remark"] = remarks.get(arg.arg, remark_of(arg))
    return kernel_of(function)


def _said(sizes: list[str], value: Buffer | Descriptor, known: dict[str, int], own: Mapping[str, int]) -> str:
    """A shape in numbers, as far as the tensor's own shape tells them; what it tells is added to `known`."""
    factors = [size.split("·") for size in sizes]
    open_places = [place for place, parts in enumerate(factors) if any(_number(part, known) is None for part in parts)]
    if isinstance(value, Descriptor) and len(value.shape) == len(sizes):
        found = {place: value.shape[place] for place in open_places}
    elif len(open_places) == 1:
        count = math.prod(value.shape)
        rest = math.prod(_number(part, known) or 1 for parts in factors for part in parts)
        found = {open_places[0]: count // rest} if rest and count % rest == 0 else {}
        sure = math.prod(_number(part, known) or 1 for part in factors[open_places[0]])
        found = {place: number * sure for place, number in found.items()}
    else:
        found = {}
    for place, number in found.items():
        unknown = [part for part in factors[place] if _number(part, known) is None]
        rest = math.prod(_number(part, known) or 1 for part in factors[place])
        if len(unknown) == 1 and _NAME.fullmatch(unknown[0]) and number % rest == 0:
            known[unknown[0]] = number // rest
    return ", ".join("·".join(_shown(parts, known, own)) for parts in factors)


def _shown(parts: list[str], known: Mapping[str, int], own: Mapping[str, int]) -> list[str]:
    words = [part if part in own else str(known.get(part, part)) for part in parts]
    return [word for word in words if word != "1"] or ["1"]


def _number(part: str, known: Mapping[str, int]) -> int | None:
    return int(part) if part.isdigit() else known.get(part)
