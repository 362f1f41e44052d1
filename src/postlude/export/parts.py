"""What the text of one chain is made of, and small pieces of text that several passes use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from postlude.export.kernels import Kernel, Program
from postlude.export.layout import call
from postlude.plan import Plan


@dataclass
class Draft:
    """The text of one chain's launcher while it is written."""

    plan: Plan
    names: Mapping[int, str]  # a word for each slot
    kernels: list[Kernel] = field(default_factory=list)
    helpers: dict[str, str] = field(default_factory=dict)  # Python functions of the file, by name
    constants: dict[str, str] = field(default_factory=dict)  # its tile sizes: name to the line that sets it
    imports: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    launches: int = 0
    shared_bytes: int = 0  # that its kernels need of a card
    cuda: str = ""  # CUDA C++ of its convolution

    def add(self, *lines: str) -> None:
        self.lines += [f"    {line}" if line else "" for line in lines]

    def call(self, function: str, arguments: Sequence[str], before: str = "", after: str = "") -> None:
        self.lines += call(function, arguments, before, after)

    def launch(self, kernel: Kernel, grid: str, arguments: Mapping[str, str], warps: int = 4) -> None:
        """One launch: the kernel's parameters as expressions of the launcher."""
        given = [arguments.get(name, name) for name in kernel.parameters]
        last = [f"num_warps={warps}"] if warps != 4 else []
        self.kernels.append(kernel)
        function = f"{kernel.name}[{grid}]"
        lines = call(function, given + last)
        if len(lines) > 3:  # one argument a line would be twenty of them: tensors and sizes go by a name each
            lines = self._grouped(function, kernel, given, last)
        self.lines += lines
        self.launches += 1

    def _grouped(self, function: str, kernel: Kernel, given: list[str], last: list[str]) -> list[str]:
        tensors = [expression for name, expression in zip(kernel.parameters, given) if name[:2] in ("p_", "d_")]
        rest = given[len(tensors) :]
        if len(call("", tensors, "tensors = ")) > 1:
            return call(function, given + last)
        sizes, tiles = [e for e in rest if not e.isupper()], [e for e in rest if e.isupper()]
        if len(tensors) > 6 or sizes + tiles != rest:
            self.call("", tensors, "tensors = ")
            tensors = ["*tensors"]
        if sizes + tiles == rest and len(call(function, [*tensors, *rest, *last])) > 3:
            self.call("", _unpacked(sizes), "sizes = ")
            rest = ["*sizes", *tiles]
        return call(function, [*tensors, *rest, *last])

    def use(self, program: Program) -> object:
        if program.function is not None:
            self.kernels.append(program.function)
        return program.inline

    def constant(self, name: str, value: int, why: str) -> str:
        self.constants[name] = f"{name} = {value}  # {why}"
        return name


def _unpacked(expressions: list[str]) -> list[str]:
    """`*out` in place of out[0], out[1] and so on."""
    text = re.sub(r"out\[0\](?:, out\[\d\])+", "*out", ", ".join(expressions))
    return text.split(", ")


def launcher_sizes(draft: Draft) -> list[str]:
    """`batch` and the sizes of space set; the names of depth, height and width, a depth of 1 where there is none."""
    dims, axes = draft.plan.chain.dims, ("depth", "height", "width")
    draft.add(f"batch, _, {', '.join(axes[3 - dims :])} = x.shape")
    return list(axes) if dims == 3 else ["1", *axes[1:]]


def plus(name: str, number: int) -> str:
    """`name + number` as a person writes it."""
    if number == 0:
        return name
    return f"{name} {'+' if number > 0 else '-'} {abs(number)}"


def times(*factors: object) -> str:
    """A product, without the factors that are 1, sums in brackets."""
    words = [str(factor) for factor in factors if str(factor) != "1"]
    return " * ".join(f"({word})" if " + " in word or " - " in word else word for word in words) or "1"
