"""One chain as text: its kernels, its launcher, and the autograd function around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.chain import Chain, Normalize
from postlude.export.autograd import (
    class_name,
    function_text,
    kept_class,
    recomputing_class,
    rest_lines,
    returning,
)
from postlude.export.cuda import COMPILE
from postlude.export.device.library import Kernel
from postlude.export.program_text import ProgramText
from postlude.export.syntax.layout import fold
from postlude.plan import Plan
from postlude.plan.passes import KeepMoments
from postlude.plan.program import Buffer, Descriptor, KernelCall, Program, launches
from postlude.stages.program import given_by, inference_program, training_program

_WORDS = ("ctx", "tensors", "needs", "torch", "triton", "tl", "F", "nn")


@dataclass(frozen=True, eq=False)
class ChainText:
    name: str  # of its launcher
    chain: Chain
    plan: Plan
    given: tuple[Buffer, ...]  # the tensors that the kernels are specialised to, without masks that are drawn for them
    shapes_name: str  # of the constant with their shapes
    kernels: tuple[Kernel, ...]  # including those of the chains before it in the file
    functions: Mapping[str, str]  # the launcher and what stands around it, by name, in order
    sources: Mapping[str, str]  # CUDA C++, by the name of its constant
    launches: int
    called: str  # what the model calls: the autograd function, or one around it
    trains: bool  # its backward pass has kernels
    is_aligned: bool  # a given tensor is read through a descriptor and must be aligned


def chain_text(
    chain: Chain,
    plan: Plan,
    names: Mapping[int, str],
    tensors: Sequence[Tensor],
    training: bool,
    before: Sequence[ChainText] = (),
    drawn: int = 0,
) -> ChainText:
    """The text of a chain. `names` has a name for each slot, of which the last `drawn` are masks; with `training` the
    library's backward pass is included.

    A function that a chain `before` it in the file defines under the same name is shared, or gets a number.
    """
    number = str(len(before) + 1) if before else ""
    name = _name(chain, before)
    # A chain that keeps only moments is differentiated by autograd, which is not a list of calls.
    training = training and (plan.gradients.of_both is not None or not isinstance(plan.passes[-1].sink, KeepMoments))
    kernels = {kernel.name: kernel for other in before for kernel in other.kernels}
    called = f"{class_name(name)}.apply"
    if training:
        program = training_program(plan, given_by(tensors), _differentiable(plan.chain, tensors))
        text = ProgramText(program, names, _WORDS, functions=kernels, source=f"SOURCE{number}")
        functions = kept_class(plan.chain, name, names, text)
        if len(plan.chain.steps) < len(chain.steps):
            called = name
            functions[name] = _continued(chain, plan, name, names, tensors, program.result)
    else:
        program = inference_program(plan, chain, given_by(tensors))
        text = ProgramText(program, names, _WORDS, functions=kernels, source=f"SOURCE{number}")
        body = returning(text.forward_lines(), text.words[program.result.number])
        what = "kernels" if launches(program.forward) else "fewer operations"
        functions = {name: function_text(chain, name, names, body, what)}
        functions |= recomputing_class(chain, name, names, tensors, what)
    given = program.given[: len(program.given) - drawn]
    functions = {word: fold(body) for word, body in functions.items()}
    return ChainText(
        name,
        chain,
        plan,
        given,
        next((other.shapes_name for other in before if _same(other.given, given)), f"SHAPES{number}"),
        tuple(kernels.values()),
        {**({"compiled": COMPILE} if text.sources else {}), **functions},
        text.sources,
        len(launches((*program.forward, *program.backward))),
        called,
        training,
        _reads_given_by_descriptor(program),
    )


def _differentiable(chain: Chain, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple(tensor.is_floating_point() and slot not in chain.detached for slot, tensor in enumerate(tensors))


def _name(chain: Chain, before: Sequence[ChainText]) -> str:
    """The chain's words; with a number if a chain `before` it has the same."""
    words = ["norm" if isinstance(step, Normalize) else getattr(step, "op", "") for step in chain.steps]
    first = "" if chain.producer is None else "linear" if chain.is_linear else "conv"
    name = "_".join(word for word in (first, *(words or ["product"])) if word)
    return f"{name}_{len(before) + 1}" if name in {other.name for other in before} else name


def _same(one: Sequence[Buffer], other: Sequence[Buffer]) -> bool:
    return [(b.shape, b.strides, b.dtype) for b in one] == [(b.shape, b.strides, b.dtype) for b in other]


def _continued(
    chain: Chain, plan: Plan, name: str, names: Mapping[int, str], tensors: Sequence[Tensor], result: Buffer
) -> str:
    """The chain including its last steps, which PyTorch runs, with their gradients."""
    dtype = getattr(torch, result.dtype)
    value = torch.empty_strided(result.shape, result.strides, dtype=dtype, device="meta")
    rest = rest_lines(chain, len(plan.chain.steps), names, tensors, value)
    given = ", ".join(names[slot] for slot in range(len(chain.roles)))
    first = f"    value = {class_name(name)}.apply({given})"
    return function_text(chain, name, names, [first, *rest, "    return value"], "kernels")


def _reads_given_by_descriptor(program: Program) -> bool:
    storages = {buffer.storage for buffer in program.given}
    calls = [item for item in (*program.forward, *program.backward) if isinstance(item, KernelCall)]
    return any(isinstance(a, Descriptor) and a.buffer.storage in storages for item in calls for a in item.arguments)
