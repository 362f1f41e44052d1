"""The kernels of a plan, each cut down to the plan's case, with the device functions that they call."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources

from postlude.chain import Chain, Normalize, Scalar, Value, values_of
from postlude.emit import POINTERS, emit, text
from postlude.export.layout import fold
from postlude.export.specialise import Inline, specialise
from postlude.expressions import Assign, Call, Function, Name, Term, bound, live
from postlude.steps import C, forward, moments

_INFIX = {"add": "+", "mul": "*"}
_FILES = ("pointwise", "pack", "convolve", "normalize", "channels", "moments")


@dataclass(frozen=True)
class Kernel:
    """A function of the exported file, its text laid out."""

    name: str
    text: str
    parameters: tuple[str, ...]


@functools.cache
def library() -> dict[str, str]:
    """The text of every function in kernels/triton, by name."""
    found = {}
    for file in _FILES:
        text = (resources.files("postlude.kernels.triton") / f"{file}.py").read_text("utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]) + "\n"
    return found


def changed(source: str, changes: Mapping[str, str]) -> str:
    """A kernel's text with pieces of it put differently; each must be there once."""
    for before, after in changes.items():
        if source.count(before) != 1:
            raise ValueError(f"the kernel says {before!r} {source.count(before)} times, not once")
        source = source.replace(before, after)
    return source


def cut(source: str, constants: Mapping[str, object], names: Mapping[str, str], keep: tuple[str, ...] = ()) -> Kernel:
    """A function's text for these constants; what the text does not have is left out of them."""
    if "p_y.dtype.element_ty" in source:  # a store converts by itself
        source = source.replace(".to(p_y.dtype.element_ty)", "")
    words = set(re.findall(r"\w+", source))
    known = {name: value for name, value in constants.items() if name in words}
    made = specialise(source, known, names, frozenset(keep) & known.keys())
    name = re.search(r"def (\w+)", made.text)
    assert name is not None
    return Kernel(name[1], fold(made.text), made.parameters)


def with_helpers(kernels: list[Kernel]) -> list[Kernel]:
    """The same with the device functions that they call in front, each once."""
    ordered: dict[str, Kernel] = {}
    for kernel in kernels:
        for name in re.findall(r"(?<![\w.])(\w+)\(", kernel.text):
            source = library().get(name)
            is_given = any(other.name == name for other in kernels)
            if source is not None and name not in ordered and not is_given:
                for helper in with_helpers([cut(source, {}, {})]):
                    ordered.setdefault(helper.name, helper)
        ordered.setdefault(kernel.name, kernel)
    return list(ordered.values())


@dataclass(frozen=True)
class Program:
    """The steps of a pass: a function of its own where they are more than one expression, and how they are called."""

    function: Kernel | None
    inline: Inline


def program(
    chain: Chain,
    kind: str,
    last: int,
    names: Mapping[int, str],
    *,
    scalar_channel: bool,
    spread: str = "",
) -> Program:
    """Steps 1 to `last` as text; `names` has a word for each slot, `scalar_channel` says that no channel is masked."""
    function = _written(forward(chain, kind, last))
    if not function.body:
        return _expression(function, {})
    renamed = {kind: "before_norm" if kind == "before" else "normalize"}
    if _is_straight(chain, last):
        renamed |= {f"v{number}": "v" for number in range(last + 1)}
    return _function(function, emit(function, spread=spread, masks_channels=not scalar_channel), names, renamed)


def moments_program(chain: Chain, first: int, last: int, names: Mapping[int, str], channels: int) -> Program:
    """Steps `first` to `last` on moments."""
    function = _written(moments(chain, first, last))
    if not function.body:
        return _expression(function, {C: Scalar(channels)})
    norms = [step for step in chain.steps[first - 1 : last] if isinstance(step, Normalize)]
    constants: dict[str, object] = {"C": channels}
    if len(norms) == 1:  # else the norms' groups stay an argument
        constants["normalize_moments"] = Inline("normalize_moments({0}, {1}, {2})")
    return _function(function, emit(function), names, {"moments": "finish"}, constants)


def moments_helpers(chain: Chain, first: int, last: int, channels: int) -> list[Kernel]:
    """The functions of a chain's one norm, for its groups alone."""
    norms = [step for step in chain.steps[first - 1 : last] if isinstance(step, Normalize)]
    if len(norms) != 1:
        return []
    per = channels // (norms[0].groups or channels)
    mean = cut(library()["group_mean"], {"PER": per}, {})
    inline = Inline("{0}" if per == 1 else "group_mean({0}, {1})")
    norm = cut(library()["normalize_moments"], {"PER": per, "eps": norms[0].eps, "group_mean": inline}, {})
    if per == 1:
        return [norm]
    return [mean, norm]


def _written(function: Function) -> Function:
    """As one would write it: sums and products by their signs, nothing that nobody reads, no name for what is returned
    at once."""
    assert not isinstance(function.returns, tuple)
    body = [Assign(line.targets, _with_signs(line.value)) for line in live(function.body, [function.returns])]
    returns = _with_signs(function.returns)
    if body and body[-1].targets == (returns,):
        returns = body.pop().value
    return replace(function, body=tuple(body), returns=returns)


def _with_signs(term: Term) -> Term:
    if not isinstance(term, Call):
        return term
    return Call(_INFIX.get(term.word, term.word), tuple(map(_with_signs, term.operands)))


def _expression(function: Function, known: Mapping[Term, Term]) -> Program:
    assert not isinstance(function.returns, tuple)
    places: dict[Term, Term] = {leaf: Name(f"{{{number}}}") for number, leaf in enumerate(function.takes)}
    return Program(None, Inline(text(bound(function.returns, {**places, **known}))))


def _function(
    function: Function,
    source: str,
    names: Mapping[int, str],
    renamed: Mapping[str, str],
    constants: Mapping[str, object] | None = None,
) -> Program:
    """Of its own name, its tensors by theirs, with the parameters that it reads."""
    renamed = {**renamed, **{f"t{slot}": word for slot, word in names.items()}}
    renamed |= {pointer: f"p_{names[slot]}" for pointer, slot in zip(POINTERS, function.slots)}
    made = cut(source, constants or {}, renamed)
    order = [*map(text, function.takes), *POINTERS]
    places = {renamed.get(name, name): f"{{{number}}}" for number, name in enumerate(order)}
    return Program(made, Inline(f"{made.name}({', '.join(places[name] for name in made.parameters)})"))


def inlined(kernel: Kernel, function: Kernel) -> Kernel:
    """The kernel with the statements of a function in place of its one call, `name = function(…)`."""
    call = re.search(rf"\n( +)(\w+) = {function.name}\(\s*([\w,\s]+?),?\s*\)\n", kernel.text)
    assert call is not None
    words = dict(zip(function.parameters, re.split(r",\s*", call[3])))
    body = re.sub(r"\b\w+\b", lambda m: words.get(m[0], m[0]), "\n".join(function.text.splitlines()[2:]))
    body = re.sub(r"(?m)^    return (.+)$", rf"    {call[2]} = \1", body).replace("\n    ", f"\n{call[1]}")
    text = kernel.text[: call.start()] + "\n" + body + "\n" + kernel.text[call.end() :]
    return Kernel(kernel.name, fold(text), kernel.parameters)


def _is_straight(chain: Chain, last: int) -> bool:
    """Where each step reads just the value before it, all can go by one name."""
    return all(values_of(step) == (Value(number),) for number, step in enumerate(chain.steps[:last]))
