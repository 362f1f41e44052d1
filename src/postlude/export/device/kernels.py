"""The kernels of a program, each specialised to its one call, with the device functions that they call."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from postlude.export.device.helpers import with_helpers
from postlude.export.device.library import Kernel, kernel_of
from postlude.export.device.prepared import prepared
from postlude.export.device.proved import Launch, given_facts
from postlude.export.device.repeats import writes
from postlude.export.device.single import is_single
from postlude.export.device.sizes import remarks_with_sizes
from postlude.export.device.special_cases import has_all_channels
from postlude.export.device.steps_text import steps_text
from postlude.export.syntax.analysis import calls_in, leftmost, name_of, times_read
from postlude.export.syntax.rules import rewritten
from postlude.export.syntax.source import parameter_names, parse
from postlude.export.syntax.specialise import drop_unread, rename, specialise
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
    kernel = prepared(call, given)
    single = is_single(call, kernel)
    constants: dict[str, Any] = dict(call.numbers) | dict(call.constants)
    constants |= {word: value for word, value in given.items() if isinstance(value, int)}
    functions: list[ast.FunctionDef] = []
    for word, steps in constants.items():
        if isinstance(steps, Steps):
            composed = parse(steps.text.replace(", mask=m_c, other=0.0", "") if has_all_channels(call) else steps.text)
            function, constants[word] = steps_text(composed, pointers, slots, constants.get("C", 0))
            functions += [] if function is None else [function]
    facts = {names.get(word, word): fact for word, fact in given_facts(given, constants).items()}
    launch = Launch(call, facts, functions)
    values = _decide_numbers(kernel, constants, names, launch)
    if len(functions) == 1 and is_inlined(kernel, functions[0]):
        functions = []
    *functions, kernel = with_helpers([*functions, kernel], values, single, launch)
    named = _settle(kernel, values, launch)
    places = {names.get(word, word): value for word, value in given.items()}
    arguments = tuple(places[word] for word in parameter_names(kernel) if word not in named)
    remarks = remarks_with_sizes(kernel, places, named)
    return CutKernel((*map(kernel_of, functions), replace(kernel_of(kernel), remarks=remarks)), arguments)


def _decide_numbers(
    kernel: ast.FunctionDef, constants: Mapping[str, Any], names: Mapping[str, str], launch: Launch
) -> dict[str, int]:
    """Decides constants and returns those that keep their names: tiles, and sizes that the text reads several times."""
    named = {word: value for word, value in constants.items() if word in _SIZES | _TILES and type(value) is int}
    named = {word: value for word, value in named.items() if value > 1}
    specialise(kernel, constants, names, named)
    launch.simplify(kernel)
    uses = times_read(*kernel.body)
    kept = {word: value for word, value in named.items() if uses[word] > (1 if word in _TILES else 3)}
    specialise(kernel, named, keep=kept)
    return kept


def _settle(kernel: ast.FunctionDef, values: Mapping[str, int], launch: Launch) -> dict[str, int]:
    """Gives the kernel its last form; returns those of its numbers that still have names, which become defaults in its
    signature, so that a launch need not pass them."""
    uses = times_read(*kernel.body)
    specialise(kernel, {word: value for word, value in values.items() if not uses[word]})  # helpers have it by now
    named = {word: value for word, value in values.items() if uses[word]}
    found = [arg for arg in kernel.args.args if arg.arg in named]
    for arg in found:
        arg.annotation = parsed("tl.constexpr")
    kernel.args.defaults = [ast.Constant(named[arg.arg]) for arg in found]
    launch.simplify(kernel)
    uses = times_read(*kernel.body)
    tiles = {word: value for word, value in named.items() if word in _TILES}
    if tiles and all(uses[word] <= _FEW_READS for word in tiles):
        specialise(kernel, tiles)
        launch.simplify(kernel)
    drop_unread(kernel)
    launch.say_what_holds(kernel)
    return named


def is_inlined(kernel: ast.FunctionDef, function: ast.FunctionDef) -> bool:
    """Inlines a function at its one call, `name = function(…)`, and says whether there is one."""
    *body, last = function.body
    calls = calls_in(kernel, function.name)
    around = [node for node in walk(kernel) if isinstance(node, ast.Assign) and node.value in calls]
    words = [argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)]
    if len(calls) != 1 or not around or not isinstance(last, ast.Return) or len(words) < len(calls[0].args):
        return False
    assert last.value is not None
    rename(function, dict(zip(parameter_names(function), words)))
    joined = [*body, ast.Assign(around[0].targets, last.value, lineno=0)]
    kernel.body = rewritten(kernel.body, lambda node: joined if node is around[0] else [node])
    return True


def written_places(kernel: Kernel) -> set[int]:
    """Indices of the parameters that a kernel stores to."""
    calls = [call for call in calls_in(parse(kernel.text)) if writes(name_of(call.func))]
    stored = {name_of(leftmost(call.args[0])) for call in calls}
    return {place for place, word in enumerate(kernel.parameters) if word in stored}
