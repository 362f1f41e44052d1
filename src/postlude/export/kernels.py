"""The kernels of a program, each specialised to its one call, with the device functions that they call."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from postlude.export.analysis import name_of
from postlude.export.device_text import Kernel, changed, cut, library
from postlude.export.helpers import kernel_of, shorter, with_helpers
from postlude.export.joined import join
from postlude.export.layout import fold
from postlude.export.repeats import pure_helpers, remove_repeats
from postlude.export.rules import leave_out, rewritten
from postlude.export.simplify import has_all_channels, simplified
from postlude.export.single import is_single, without_casts
from postlude.export.source import parse, written
from postlude.export.specialise import Inline, rename
from postlude.export.trees import walk
from postlude.plan.calls import Argument, Buffer, Descriptor, KernelCall, Steps

_INFIX = {"add": "{0} + {1}", "mul": "{0} * {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}"}
_INFIX |= {"div": "{0} / {1}", "rdiv": "{1} / {0}"}
# Spatial sizes and tile sizes that a kernel reads several times keep their names; other names become numbers.
_SIZE_WORDS = (
    "D H W S L OD OH OW ROW_PITCH SLICE_PITCH SLICE_ROWS SAMPLE_ROWS M_PER_SAMPLE ROWS PACKED_ROWS TAP_ROWS PRODUCT_M "
    "CHUNKS CHUNKS_FIRST PARTS SUM_STRIDE TILES TILES_H TILES_PER_PROGRAM"
)
_TILE_WORDS = (
    "BLOCK_M BLOCK_N BLOCK_K BLOCK_C BLOCK_S BLOCK_W BLOCK_H BLOCK_J BLOCK_L BLOCK_ROWS BLOCK_PARTS BLOCK_SAMPLES "
    "STAGES"
)
_SIZES, _TILES = frozenset(_SIZE_WORDS.split()), frozenset(_TILE_WORDS.split())
_FEW_READS = 2  # of tile sizes that need no names
_HINT = re.compile(r"(?m)^ +(\w+) = \1 // ALIGN \* ALIGN.*\n")


@dataclass(frozen=True)
class CutKernel:
    """A kernel for one call: its functions, the kernel itself last, and the arguments that it reads."""

    functions: tuple[Kernel, ...]
    arguments: tuple[Argument, ...]

    @property
    def kernel(self) -> Kernel:
        return self.functions[-1]

    def renamed(self, name: str, new: str) -> CutKernel:
        """The same with another name for one of the functions."""
        functions = []
        for f in self.functions:
            text = fold(re.sub(rf"(?<![\w.]){name}(?=\()", new, f.text))
            functions.append(Kernel(new if f.name == name else f.name, text, f.parameters))
        return CutKernel(tuple(functions), self.arguments)


def cut_kernel(call: KernelCall, words: Mapping[int, str], slots: Mapping[int, str], name: str) -> CutKernel:
    """A kernel specialised to a call. `words` names buffers by number, `slots` the chain's tensors by slot."""
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
    single = is_single(call, source)
    plain = [word for word in pointers if getattr(given[word], "dtype", "") == "float32"] if single else []
    functions: list[Kernel] = []
    for word, value in constants.items():
        if isinstance(value, Steps):
            text = value.text.replace(", mask=m_c, other=0.0", "") if has_all_channels(call) else value.text
            text = without_casts(text, plain)
            function, constants[word] = _steps(replace(value, text=text), pointers, slots, constants.get("C", 0))
            functions += [] if function is None else [function]
    keep, kernel = _named_sizes(source, constants, names)
    if len(functions) == 1 and (joined := inlined(kernel, functions[0])) is not None:
        functions, kernel = [], joined
    values = {word: constants[word] for word in keep}
    *functions, kernel = with_helpers([*functions, kernel], values, single)
    uses = _uses(kernel)
    unread = {word: values.pop(word) for word in keep if not uses[word]}  # except by a helper, which has the number now
    kernel = _with_defaults(cut(kernel.text, unread, {}), values)
    places = {names.get(word, word): value for word, value in given.items()}
    kernel = _joined(kernel)
    uses = _uses(kernel)
    tiles = {word: value for word, value in values.items() if word in _TILES}
    if tiles and all(uses[word] <= _FEW_READS for word in tiles):
        made = (*map(_joined, functions), _joined(cut(kernel.text, tiles, {})))
    else:
        made = (*map(_joined, functions), kernel)
    made = tuple(map(without_unread, made))
    return CutKernel(made, tuple(places[word] for word in kernel.parameters if word not in values))


def without_unread(kernel: Kernel) -> Kernel:
    """The kernel without values of device functions that it does not read, such as rows of taps that it has not."""
    function = parse(kernel.text)
    leave_out(function, pure_helpers())
    made = kernel_of(function)
    return kernel if made.text == kernel.text else shorter(made)


def _joined(kernel: Kernel) -> Kernel:
    """The kernel in fewer statements. What was joined may be simpler as a whole, and the same as a line above it."""
    text = ""
    while text != kernel.text:
        text, function = kernel.text, parse(kernel.text)
        join(function, pure_helpers())
        remove_repeats(function)
        kernel = shorter(kernel_of(function))
    return kernel


def _uses(kernel: Kernel) -> Counter[str]:
    """How often the statements of a kernel read each name."""
    names = (node for statement in parse(kernel.text).body for node in walk(statement))
    return Counter(node.id for node in names if isinstance(node, ast.Name))


def _prepared(call: KernelCall, given: Mapping[str, Argument]) -> str:
    """The library's text with what this call determines: dtypes, axes of the grid, one unit per program."""
    source = simplified(call, library()[call.kernel])
    for word, value in given.items():
        if isinstance(value, Buffer | Descriptor):
            buffer = value if isinstance(value, Buffer) else value.buffer
            source = re.sub(rf"\b{word}\.dtype\.element_ty\b", f"tl.{buffer.dtype}", source)
    for axis, size in enumerate((*call.grid, 1, 1)[1:3], 1):
        if size == 1:
            source = source.replace(f"tl.program_id({axis})", "0")
    source = re.sub(r"(tl\.store\(p_\w+ .*?, \w+)\.to\(tl\.\w+\)", r"\1", source)  # a store converts by itself
    if dict(call.numbers).get("UNITS") == call.grid[0]:
        source = _one_unit(source)
    return _HINT.sub("", source)  # sizes are compile-time constants: the compiler sees what divides them


def _one_unit(source: str) -> str:
    """The text without the loop over units, because each program has one."""
    loop = "    for unit in range(tl.program_id(0), UNITS, tl.num_programs(0)):\n"
    head, body = changed(source, {loop: "\f"}).split("\f")
    return head + re.sub(r"\bunit\b", "tl.program_id(0)", re.sub(r"(?m)^    (?=    )", "", body))


def _named_sizes(
    source: str, constants: Mapping[str, object], names: Mapping[str, str]
) -> tuple[tuple[str, ...], Kernel]:
    """The kernel, and the numbers that keep their names: tiles, and sizes that the text reads several times."""
    numbers = {word: value for word, value in constants.items() if type(value) is int}
    named = tuple(word for word in numbers if word in _SIZES | _TILES and numbers[word] > 1)
    kernel = cut(source, constants, names, named)
    uses = _uses(kernel)
    keep = tuple(word for word in named if uses[word] > (1 if word in _TILES else 3))
    return keep, cut(kernel.text, {word: numbers[word] for word in named}, {}, keep)


def _with_defaults(kernel: Kernel, values: Mapping[str, Any]) -> Kernel:
    """The kernel with named numbers as defaults in its signature, so that a launch need not pass them."""
    function = parse(kernel.text)
    found = [arg for arg in function.args.args if arg.arg in values]
    for arg in found:
        arg.annotation = ast.parse("tl.constexpr", mode="eval").body
    function.args.defaults = [ast.Constant(values[arg.arg]) for arg in found]
    return kernel_of(function)


def _steps(
    steps: Steps, pointers: Mapping[str, str], slots: Mapping[int, str], channels: object
) -> tuple[Kernel | None, Inline]:
    """The steps of a pass, as a function if they are more than one expression, and the text of its call."""
    renamed = {f"t{slot}": word for slot, word in slots.items()} | dict(pointers)
    text = re.sub(r"    (\w+) = (.+)\n    return \1\n$", r"    return \2\n", steps.text)
    if _is_straight(text):
        renamed |= dict.fromkeys(re.findall(r"\bv\d+\b", text), "v")
    renamed[steps.name] = {"before": "before_norm", "whole": "normalize", "moments": "finish"}.get(
        steps.name, f"{steps.name}_steps"
    )
    order = [arg.arg for arg in parse(steps.text).args.args]
    constants: dict[str, object] = {"C": channels} if steps.name == "moments" else {}
    made = cut(text, {**constants, **{word: Inline(form) for word, form in _INFIX.items()}}, renamed)
    places = {renamed.get(name, name): f"{{{number}}}" for number, name in enumerate(order)}
    first = parse(made.text).body[0]
    if isinstance(first, ast.Return) and first.value is not None and not isinstance(first.value, ast.Tuple):
        return None, Inline(re.sub(r"\b[a-z_]\w*\b", lambda m: places.get(m[0], m[0]), written(first.value)))
    return made, Inline(f"{made.name}({', '.join(places[name] for name in made.parameters)})")


def _is_straight(text: str) -> bool:
    """Whether each line reads only the value of the line before it, so that all values can have one name."""
    made = [(m[1], m[2]) for m in re.finditer(r"(?m)^    (?:(v\d+) = |return )(.+)$", text)]
    previous = ""
    for place, (word, expression) in enumerate(made):
        read = set(re.findall(r"\bv\d+\b", re.sub(r"v\d+\.dtype", "", expression)))
        if len(read) > 1 or (place and read != {previous}):
            return False
        previous = word
    return True


def inlined(kernel: Kernel, function: Kernel) -> Kernel | None:
    """The kernel with a function inlined at its one call, `name = function(…)`."""
    outer, inner = parse(kernel.text), parse(function.text)
    *body, last = inner.body
    calls = [node for node in walk(outer) if isinstance(node, ast.Call) and name_of(node.func) == function.name]
    around = [node for node in walk(outer) if isinstance(node, ast.Assign) and node.value in calls]
    words = [argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)]
    if len(calls) != 1 or not around or not isinstance(last, ast.Return) or len(words) < len(calls[0].args):
        return None
    assert last.value is not None
    rename(inner, dict(zip(function.parameters, words)))
    joined = [*body, ast.Assign(around[0].targets, last.value, lineno=0)]
    outer.body = rewritten(outer.body, lambda node: joined if node is around[0] else [node])
    return kernel_of(outer)


def written_places(kernel: Kernel) -> set[int]:
    """Indices of the parameters that a kernel stores to."""
    stored = set(re.findall(r"(?:tl\.store|tl\.atomic_\w+|flag_infinity)\(\s*(p_\w+)", kernel.text))
    return {place for place, word in enumerate(kernel.parameters) if word in stored}
