"""The kernels of a program, each specialised to its one call, with the device functions that they call."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from postlude.export.device.helpers import with_helpers
from postlude.export.device.library import Kernel, cut, kernel_of, shorter
from postlude.export.device.prepared import prepared
from postlude.export.device.proved import Launch, given_facts
from postlude.export.device.repeats import pure_helpers, remove_repeats, stores
from postlude.export.device.simplify import has_all_channels
from postlude.export.device.single import is_single, without_casts
from postlude.export.device.sizes import with_sizes
from postlude.export.device.steps_text import steps_text
from postlude.export.syntax.analysis import calls_in, leftmost, name_of, times_read
from postlude.export.syntax.joined import join
from postlude.export.syntax.rules import leave_out, rewritten
from postlude.export.syntax.source import parse
from postlude.export.syntax.specialise import rename
from postlude.export.syntax.trees import parsed, walk
from postlude.plan.program import Argument, Buffer, KernelCall, Steps

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
        functions = [parse(function.text) for function in self.functions]
        for function in functions:
            rename(function, {name: new})
        made = [replace(kernel_of(tree), remarks=old.remarks) for tree, old in zip(functions, self.functions)]
        return CutKernel(tuple(made), self.arguments)


def cut_kernel(call: KernelCall, words: Mapping[int, str], slots: Mapping[int, str], name: str) -> CutKernel:
    """A kernel specialised to a call. `words` names buffers by number, `slots` the chain's tensors by slot."""
    given = dict(zip(call.parameters, call.arguments))
    pointers = {
        word: f"p_{words[value.number]}"
        for word, value in given.items()
        if re.fullmatch(r"a\d", word) and isinstance(value, Buffer)
    }
    names = {**pointers, call.kernel: name}
    source = prepared(call, given)
    single = is_single(call, source)
    constants: dict[str, Any] = dict(call.numbers) | dict(call.constants)
    constants |= {word: value for word, value in given.items() if isinstance(value, int)}
    plain = [word for word in pointers if getattr(given[word], "dtype", "") == "float32"] if single else []
    functions: list[Kernel] = []
    for word, steps in constants.items():
        if isinstance(steps, Steps):
            text = steps.text.replace(", mask=m_c, other=0.0", "") if has_all_channels(call) else steps.text
            text = without_casts(text, plain)
            function, constants[word] = steps_text(replace(steps, text=text), pointers, slots, constants.get("C", 0))
            functions += [] if function is None else [function]
    facts = {names.get(word, word): fact for word, fact in given_facts(given, constants).items()}
    launch = Launch(call, facts, functions)
    keep, kernel = _named_sizes(source, constants, names, launch)
    if len(functions) == 1 and (joined := inlined(kernel, functions[0])) is not None:
        functions, kernel = [], joined
    values = {word: constants[word] for word in keep}
    *functions, kernel = with_helpers([*functions, kernel], values, single, launch)
    kernel, named = _settled(kernel, values, launch)
    places = {names.get(word, word): value for word, value in given.items()}
    arguments = tuple(places[word] for word in kernel.parameters if word not in named)
    functions = [*map(without_unread, map(_joined, functions)), launch.said(without_unread(kernel))]
    functions[-1] = with_sizes(functions[-1], places, {word: values[word] for word in named})
    return CutKernel(tuple(functions), arguments)


def _settled(kernel: Kernel, values: Mapping[str, int], launch: Launch) -> tuple[Kernel, Collection[str]]:
    """The kernel in its last form, and those of its numbers that still have names: they are defaults."""
    uses = _uses(kernel)
    unread = {word: value for word, value in values.items() if not uses[word]}  # helpers have the number by now
    named = {word: value for word, value in values.items() if uses[word]}
    kernel = _joined(launch.shorter(_joined(_with_defaults(cut(kernel.text, unread, {}), named))))
    uses = _uses(kernel)
    tiles = {word: value for word, value in named.items() if word in _TILES}
    if tiles and all(uses[word] <= _FEW_READS for word in tiles):
        kernel = _joined(cut(kernel.text, tiles, {}))
    return kernel, named


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
    return times_read(*parse(kernel.text).body)


def _named_sizes(
    source: str, constants: Mapping[str, object], names: Mapping[str, str], launch: Launch
) -> tuple[tuple[str, ...], Kernel]:
    """The kernel, and the numbers that keep their names: tiles, and sizes that the text reads several times."""
    numbers = {word: value for word, value in constants.items() if type(value) is int}
    named = tuple(word for word in numbers if word in _SIZES | _TILES and numbers[word] > 1)
    kernel = launch.shorter(_joined(launch.shorter(cut(source, constants, names, named))))
    uses = _uses(kernel)
    keep = tuple(word for word in named if uses[word] > (1 if word in _TILES else 3))
    return keep, cut(kernel.text, {word: numbers[word] for word in named}, {}, keep)


def _with_defaults(kernel: Kernel, values: Mapping[str, Any]) -> Kernel:
    """The kernel with named numbers as defaults in its signature, so that a launch need not pass them."""
    function = parse(kernel.text)
    found = [arg for arg in function.args.args if arg.arg in values]
    for arg in found:
        arg.annotation = parsed("tl.constexpr")
    function.args.defaults = [ast.Constant(values[arg.arg]) for arg in found]
    return kernel_of(function)


def inlined(kernel: Kernel, function: Kernel) -> Kernel | None:
    """The kernel with a function inlined at its one call, `name = function(…)`."""
    outer, inner = parse(kernel.text), parse(function.text)
    *body, last = inner.body
    calls = calls_in(outer, function.name)
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
    calls = [call for call in calls_in(parse(kernel.text)) if stores(name_of(call.func))]
    stored = {name_of(leftmost(call.args[0])) for call in calls}
    return {place for place, word in enumerate(kernel.parameters) if word in stored}
