"""The kernels of a program, each cut down to its one call, with the device functions that they call."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from postlude.export.device_text import Kernel, changed, cut, library
from postlude.export.helpers import with_helpers
from postlude.export.layout import fold
from postlude.export.simplify import has_all_channels, simplified
from postlude.export.specialise import Inline, Name
from postlude.plan.calls import Argument, Buffer, Descriptor, KernelCall, Steps, Word

_INFIX = {"add": Inline("{0} + {1}"), "mul": Inline("{0} * {1}")}
# Sizes of space and of tiles that a kernel reads several times keep their names; all other numbers are put in.
_SIZES = frozenset(
    [
        "D",
        "H",
        "W",
        "S",
        "L",
        "OD",
        "OH",
        "OW",
        "PITCH",
        "PLANE",
        "PLANE_ROWS",
        "SAMPLE_ROWS",
        "ROWS",
        "CHUNKS",
        "PARTS",
        "TILES",
        "TILES_H",
        "TILES_W",
        "POSITIONS",
    ]
)
_TILES = frozenset(
    ["BM", "BC", "BK", "BN", "BH", "BJ", "STAGES", "BLOCK", "BLOCK_C", "BLOCK_R", "BLOCK_L", "BLOCK_N", "BLOCK_P"]
)
_HINT = re.compile(r"(?m)^ +(\w+) = \1 // ALIGN \* ALIGN.*\n")


@dataclass(frozen=True)
class CutKernel:
    """A kernel for one call: the functions that it consists of, it being the last, and the arguments that it reads."""

    functions: tuple[Kernel, ...]
    arguments: tuple[Argument, ...]

    @property
    def kernel(self) -> Kernel:
        return self.functions[-1]

    def renamed(self, names: Mapping[str, str]) -> CutKernel:
        """With other names for some of the functions."""
        pattern = re.compile(r"\b(" + "|".join(names) + r")(?=\()")
        functions = [
            Kernel(names.get(f.name, f.name), fold(pattern.sub(lambda m: names[m[1]], f.text)), f.parameters)
            for f in self.functions
        ]
        return CutKernel(tuple(functions), self.arguments)


def cut_kernel(call: KernelCall, words: Mapping[int, str], slots: Mapping[int, str], name: str) -> CutKernel:
    """`words` names buffers by their number, `slots` the chain's tensors, as the emitted steps count them."""
    given = dict(zip(call.parameters, call.arguments))
    source = _prepared(call, given)
    constants: dict[str, Any] = dict(call.numbers) | dict(call.constants)
    constants |= {word: value for word, value in given.items() if isinstance(value, int)}
    pointers = {
        word: f"p_{words[value.number]}"
        for word, value in given.items()
        if re.fullmatch(r"a\d", word) and isinstance(value, Buffer)
    }
    names = {**pointers, call.kernel: name}
    functions: list[Kernel] = []
    for word, value in constants.items():
        if isinstance(value, Steps):
            text = value.text.replace(", mask=m_c, other=0.0", "") if has_all_channels(call) else value.text
            function, constants[word] = _steps(replace(value, text=text), pointers, slots, constants.get("C", 0))
            functions += [] if function is None else [function]
        elif isinstance(value, Word):
            constants[word] = Name(value.text)
    keep, kernel = _named_sizes(source, constants, names)
    if len(functions) == 1 and (joined := inlined(kernel, functions[0])) is not None:
        functions, kernel = [], joined
    values = {word: constants[word] for word in keep}
    *functions, kernel = with_helpers([*functions, kernel], values)
    left = set(re.findall(r"\w+", re.sub(r"#.*", "", kernel.text.split("):\n", 1)[1])))
    unread = [word for word in keep if word not in left]  # but by a helper, which has the number now
    kernel = cut(kernel.text, {word: values[word] for word in unread}, {}) if unread else kernel
    keep = tuple(word for word in keep if word not in unread)
    kernel = _with_defaults(kernel, {word: constants[word] for word in keep})
    read = [word for word in kernel.parameters if word not in keep]
    places = {names.get(word, word): value for word, value in given.items()}
    return CutKernel((*functions, kernel), tuple(places[word] for word in read))


def _prepared(call: KernelCall, given: Mapping[str, Argument]) -> str:
    """The library's text with what this call alone decides: dtypes, the axes of the grid, one unit a program."""
    source = simplified(call, library()[call.kernel])
    for word, value in given.items():
        if isinstance(value, Buffer | Descriptor):
            buffer = value if isinstance(value, Buffer) else value.buffer
            source = re.sub(rf"\b{word}\.dtype\.element_ty\b", f"tl.{buffer.dtype}", source)
    for axis, size in enumerate((*call.grid, 1, 1)[1:3], 1):
        if size == 1:
            source = source.replace(f"tl.program_id({axis})", "0")
    source = re.sub(r"(tl\.store\(p_\w+ .*?, \w+)\.to\(tl\.\w+\)", r"\1", source)  # a store converts by itself
    source = re.sub(r"(?m)^ *# fmt: (?:on|off)\n|  # noqa: .*$", "", source)
    if dict(call.numbers).get("UNITS") == call.grid[0]:
        source = _one_unit(source)
    return _HINT.sub("", source)  # sizes are compile-time constants: the compiler sees what divides them


def _one_unit(source: str) -> str:
    """A program for each unit: no loop over them."""
    loop = "    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):\n"
    head, body = changed(source, {loop: "\f"}).split("\f")
    return f"{head}    unit = tl.program_id(0)\n" + re.sub(r"(?m)^    (?=    )", "", body)


def _named_sizes(
    source: str, constants: Mapping[str, object], names: Mapping[str, str]
) -> tuple[tuple[str, ...], Kernel]:
    """The kernel, and its numbers that stay under their names: tiles, and sizes that the text reads several times."""
    numbers = {word: value for word, value in constants.items() if type(value) is int}
    named = tuple(word for word in numbers if word in _SIZES | _TILES and numbers[word] > 1)
    kernel = cut(source, constants, names, named)
    body = re.sub(r"#.*", "", kernel.text[kernel.text.index("):\n") :])
    uses = {word: len(re.findall(rf"\b{word}\b", body)) for word in named}
    keep = tuple(word for word in named if uses[word] > (0 if word in _TILES else 2))
    others = {word: numbers[word] for word in named if word not in keep}
    return keep, cut(kernel.text, {**others, **{word: numbers[word] for word in keep}}, {}, keep)


def _with_defaults(kernel: Kernel, values: Mapping[str, object]) -> Kernel:
    """The numbers that go by names stand in the signature, where a launch need not give them."""
    text = kernel.text
    for word, value in values.items():
        place = rf"(?m)^(    |def \w+\(.*?){word}(?:: tl\.constexpr)?(?=,|\))"
        text, count = re.subn(place, rf"\g<1>{word}: tl.constexpr = {value}", text, count=1)
        assert count == 1, (word, text)
    return Kernel(kernel.name, fold(text), kernel.parameters)


def _steps(
    steps: Steps, pointers: Mapping[str, str], slots: Mapping[int, str], channels: object
) -> tuple[Kernel | None, Inline]:
    """The steps of a pass: a function of its own where they are more than one expression, and how they are called."""
    renamed = {f"t{slot}": word for slot, word in slots.items()} | dict(pointers)
    text = re.sub(r"    (\w+) = (.+)\n    return \1\n$", r"    return \2\n", steps.text)
    text = re.sub(r"(, .+?),\)\n", r"\1)\n", text)  # a tuple of several needs no comma at its end
    if _is_straight(text):
        renamed |= dict.fromkeys(re.findall(r"\bv\d+\b", text), "v")
    renamed[steps.name] = {"before": "before_norm", "whole": "normalize", "moments": "finish"}.get(
        steps.name, f"{steps.name}_steps"
    )
    order = [arg.arg for arg in ast.parse(steps.text).body[0].args.args]  # type: ignore[attr-defined]
    constants: dict[str, object] = {"C": channels} if steps.name == "moments" else {}
    made = cut(text, {**constants, **_INFIX}, renamed)
    places = {renamed.get(name, name): f"{{{number}}}" for number, name in enumerate(order)}
    body = _body(made.text)
    result = re.fullmatch(r"    return (.+)", body[0]) if len(body) == 1 else None
    if result is not None and not _is_tuple(result[1]):
        parameters = "|".join(re.escape(name) for name in made.parameters)
        inline = re.sub(rf"\b(?:{parameters})\b", lambda m: places[m[0]], result[1]) if parameters else result[1]
        return None, Inline(inline)
    return made, Inline(f"{made.name}({', '.join(places[name] for name in made.parameters)})")


def _body(text: str) -> list[str]:
    """The lines of a function after its signature."""
    return text.splitlines()[ast.parse(text).body[0].body[0].lineno - 1 :]  # type: ignore[attr-defined]


def _is_tuple(expression: str) -> bool:
    return isinstance(ast.parse(expression, mode="eval").body, ast.Tuple)


def _is_straight(text: str) -> bool:
    """Where each line reads just the value that the line before it made, all can go by one name."""
    made = [(m[1], m[2]) for m in re.finditer(r"(?m)^    (?:(v\d+) = |return )(.+)$", text)]
    previous = ""
    for place, (word, expression) in enumerate(made):
        read = set(re.findall(r"\bv\d+\b", re.sub(r"v\d+\.dtype", "", expression)))
        if len(read) > 1 or (place and read != {previous}):
            return False
        previous = word
    return True


def inlined(kernel: Kernel, function: Kernel) -> Kernel | None:
    """The kernel with the statements of a function in place of its one call, `name = function(…)`."""
    calls = re.findall(rf"\b{function.name}\(", kernel.text)
    call = re.search(rf"\n( +)(\w+) = {function.name}\(\s*([\w,\s]+?),?\s*\)\n", kernel.text)
    if call is None or len(calls) > 1 or function.text.count("return ") != 1:
        return None
    words = dict(zip(function.parameters, re.split(r",\s*", call[3])))
    body = re.sub(r"\b\w+\b", lambda m: words.get(m[0], m[0]), "\n".join(_body(function.text)))
    body = re.sub(r"(?m)^    return (.+)$", rf"    {call[2]} = \1", body).replace("\n    ", f"\n{call[1]}")
    body = call[1][4:] + body
    text = kernel.text[: call.start()] + "\n" + body + "\n" + kernel.text[call.end() :]
    return Kernel(kernel.name, fold(text), kernel.parameters)


def written_places(kernel: Kernel) -> set[int]:
    """Places of the parameters that a kernel's text stores to."""
    stored = set(re.findall(r"(?:tl\.store|tl\.atomic_\w+|flag_infinity)\(\s*(p_\w+)", kernel.text))
    return {place for place, word in enumerate(kernel.parameters) if word in stored}
