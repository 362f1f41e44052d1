"""Writes a problem's model as one self-contained file."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from postlude import cards
from postlude.chain import Chain, Normalize
from postlude.errors import PostludeError
from postlude.export.chain_text import ChainText, chain_text
from postlude.export.device.library import library
from postlude.export.file import assemble
from postlude.export.forward import ForwardText
from postlude.export.heading import Measured, heading
from postlude.export.masks import Drawn
from postlude.export.original import arguments_of, read, reads_settings
from postlude.export.trace import FoundChain, Traced, trace, without_convolution
from postlude.graph.rows import as_matrices
from postlude.hardware import Machine, machine_on
from postlude.plan import Plan, Problem, Refusal, lower
from postlude.plan.problem import spec_of

# The machine that a file is written for if there is no GPU here.
HOPPER = machine_on(cards.H200, keeping_layout=frozenset({"max_pool2d", "max_pool3d", "avg_pool2d"}))

# Names that launchers and kernels use themselves; a model's tensor with such a name gets another one.
_WORDS = (
    "v mean rstd var count base value result keep x weight bias batch depth height width out positions pitch "
    "plane_rows sample_rows plane step rows high low grid block blocks sizes columns weight_scale unscale scale shape "
    "stride tiles units means squares counts align tensors chunks deep wide card kernel grad grads leaves others "
    "wanted settings x_grad weight_grad torch triton math nn tl fits scales pack_weight group_moments "
    "moments compiled arguments self super"
)
RESERVED = frozenset(_WORDS.split())
Planner = Callable[[FoundChain], tuple[Chain, Problem, Plan | Refusal]]


@dataclass(frozen=True)
class Export:
    text: str
    chains: tuple[ChainText, ...]
    left: Mapping[str, str]  # chains and calls that stay with PyTorch, and why


def export(
    source: str,
    model: nn.Module,
    inputs: Sequence[Any],
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    *,
    machine: Machine = HOPPER,
    precision: str = "fp32",
    allows_tf32: bool = False,
    multiplies_tf32: bool = False,
    measured: Measured | None = None,
    training: bool = False,
    even_if_slower: bool = False,
    convolution: str = "auto",
) -> Export:
    """The exported file. `source` is the text of the problem's file, from which `model` was built with `arguments`.

    `convolution="pytorch"` keeps the model's own convolutions, bit for bit, and fuses what follows them.
    """
    original = read(source)
    values = arguments_of(type(model), *arguments)
    blank = Problem((), "cuda", precision, training, allows_tf32, multiplies_tf32=multiplies_tf32)
    planned = _planner(blank, machine, even_if_slower)
    traced = _traced(model, inputs, precision, convolution, planned)
    reasons = dict(traced.declined)
    texts: dict[FoundChain, ChainText] = {}
    made: dict[object, ChainText] = {}  # equal chains share one text
    for found in traced.chains:
        chain, problem, outcome = planned(found)
        if not isinstance(outcome, Plan):
            reasons[found.calls[0].name] = f"{chain}: {outcome}"
            continue
        tensors, names = _read_by(found), _slot_names(found)
        key = (chain, problem, *names.values(), *(tensor.stride() for tensor in tensors))
        if key not in made:
            made[key] = chain_text(chain, outcome, names, tensors, training, tuple(made.values()), found.masks)
        texts[found] = made[key]
    if not texts:
        raise PostludeError("there is no chain in this model that kernels could be written for" + _first(reasons))
    chains = tuple(made.values())
    forward, top = ForwardText(traced, texts, reasons).write(), heading(chains, precision, measured)
    settings, card = reads_settings(original, model), machine.card
    text = assemble(original, chains, forward, values, top, card.architecture, settings)
    return Export(text, tuple(texts.values()), reasons)


def plans(
    model: nn.Module, inputs: Sequence[Any], blank: Problem, machine: Machine, convolution: str = "auto"
) -> tuple[list[tuple[str, Chain, Problem, Plan | Refusal]], Mapping[str, str]]:
    """What a file's chains would be, each with the call in which it begins, and why other calls are in none. No text is
    written. `blank` is a problem without tensors."""
    planned = _planner(blank, machine)
    traced = _traced(model, inputs, blank.precision, convolution, planned)
    return [(_place(found), *planned(found)) for found in traced.chains], traced.declined


def _place(found: FoundChain) -> str:
    """The module in which a chain begins, by its path in the model, or the name of the call."""
    first = found.calls[0]
    return str(first.target) if first.op == "call_module" else first.name


def _planner(blank: Problem, machine: Machine, even_if_slower: bool = False) -> Planner:
    def planned(found: FoundChain) -> tuple[Chain, Problem, Plan | Refusal]:
        problem = replace(blank, tensors=tuple(map(spec_of, _read_by(found))))
        chain = found.match.chain
        return chain, problem, lower(chain, problem, machine, even_if_slower=even_if_slower)

    return planned


def _read_by(found: FoundChain) -> list[Tensor]:
    """Tensors like those that a chain's kernels read: of several axes of rows, matrices."""
    return as_matrices(found.match.chain, [node.meta["val"] for node in found.match.tensors])


def _traced(
    model: nn.Module,
    inputs: Sequence[Any],
    precision: str,
    convolution: str,
    planned: Planner,
) -> Traced:
    """The forward and its chains. They end before active dropout if one that goes past it is refused: a pass reads few
    tensors."""
    # cuDNN's convolutions in strict fp32 use no tensor cores, and ours do: they gain with nothing after them.
    is_strict = precision == "fp32" and convolution != "pytorch"

    def takes_alone(node: fx.Node) -> bool:
        return is_strict and node.meta["val"].dtype == torch.float32

    for over_dropout in (True, False):
        traced = trace(model, inputs, over_dropout, takes_alone)
        if convolution == "pytorch":
            convolved = [found for found in traced.chains if not found.match.chain.is_linear]
            traced = replace(traced, chains=tuple(map(without_convolution, convolved)))
        if all(isinstance(planned(found)[2], Plan) for found in traced.chains if found.masks):
            break
    return traced


def _first(reasons: Mapping[str, str]) -> str:
    return f" ({next(iter(reasons.values()))})." if reasons else "."


def _slot_names(found: FoundChain) -> dict[int, str]:
    """x, weight, bias, then gamma and beta of a norm; other tensors by their names in the model."""
    chain = found.match.chain
    names = {0: "x"}
    if chain.producer is not None:
        names[1] = "weight"
        if chain.producer.has_bias:
            names[2] = "bias"
    for step in chain.steps:
        if isinstance(step, Normalize):
            for slot, word in ((step.weight, "gamma"), (step.bias, "beta")):
                if slot is not None and slot.index not in names:
                    names[slot.index] = _free(word, names)
    for index, item in enumerate(found.tensors):
        if index not in names:
            word = item.split(".")[-1] if isinstance(item, str) else "mask" if isinstance(item, Drawn) else "other"
            names[index] = _free(word, names)
    return names


def _free(word: str, names: Mapping[int, str]) -> str:
    """A name that no other tensor, and nothing in a launcher or kernel, has."""
    word = word if word.isidentifier() and not keyword.iskeyword(word) else "other"
    if word in RESERVED or word in library():
        word = f"{word}_tensor"
    taken = set(names.values())
    return next(name for name in (word, *(f"{word}{i}" for i in range(2, 99))) if name not in taken)
