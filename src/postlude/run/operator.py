"""A chain as registered operators, for compilers that trace through the graph.

A graph holds `torch.ops.postlude.chain` (run/site.py). Under a compiler it decomposes into casts, the pair of operators
below, and the steps that PyTorch runs. `chain_forward` returns the result and what the backward pass needs;
`chain_backward` takes that. Nothing is computed twice.

An operator's text argument holds everything that determines which program runs and what it keeps. A graph that
PyTorch's caches give to a later process therefore runs the program that it was compiled for, or is not found in the
cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude import encoded, reference
from postlude.chain import Chain
from postlude.errors import PostludeError
from postlude.plan import Plan, Problem, Refusal
from postlude.plan.problem import CHANNELS_LAST
from postlude.plan.program import Buffer, Program
from postlude.run.apart import apart
from postlude.run.chain_run import Training, like, on_device_of
from postlude.run.differentiable import differentiable
from postlude.run.execute import prepared
from postlude.run.operator_call import OperatorCall, is_made, program_for, program_of, read, runner_for
from postlude.run.operator_passes import passes
from postlude.stages.library import cast_for_convolution, without_autocast
from postlude.stages.program import given_by

LIBRARY = torch.library.Library("postlude", "DEF")
LIBRARY.define("chain_forward(Tensor[] tensors, str call) -> Tensor[]")
LIBRARY.define("chain_backward(Tensor dy, Tensor[] saved, str call) -> Tensor[]")


def call_operator(chain: Chain, problem: Problem, tensors: Sequence[Tensor]) -> Tensor:
    """The chain by the pair of operators, and by PyTorch's operators what the plan leaves to them, which may be all.

    `problem` is that of `tensors`; it has no shapes if their sizes are symbols.
    """
    needs = tuple(problem.needs_grad and tensor.requires_grad for tensor in tensors)
    outcome: Plan | Refusal | None = None
    if problem.tensors:
        outcome, runner = apart(prepared, chain, problem)
        if isinstance(outcome, Refusal):
            return runner(tensors)
    part = outcome.chain if isinstance(outcome, Plan) and outcome.trains else chain
    device = tensors[0].device
    here = [t if t.device == device else t.to(device) for t in tensors]  # a 0-d tensor may be on the CPU
    given = cast_for_convolution(part, here) if part is not chain or any(needs) else here
    known = given_by(given) if problem.tensors else ()
    specs = tuple((shape, strides, str(dtype).removeprefix("torch.")) for shape, strides, dtype in known)
    call = OperatorCall(part, problem, specs, needs)
    if (program := apart(program_for, call)) is not None:
        made = (program.result, *(buffer for buffer in program.kept if is_made(buffer, program)))
        call = dataclasses.replace(call, made=made, found=program.gradient_memory)
    result, *more = torch.ops.postlude.chain_forward(given, encoded.dumps(call))
    with torch.no_grad():
        for slot, moved in zip(chain.moved, more[len(more) - len(chain.moved) :], strict=True):
            tensors[slot].copy_(moved)
    rest: Tensor = reference.continue_from(chain, len(part.steps), result, tensors, moves=True)
    return rest


def _forward(tensors: list[Tensor], text: str) -> list[Tensor]:
    call = read(text)
    with torch.no_grad(), on_device_of(tensors[0]), without_autocast(tensors[0]):
        if call.made:
            return passes(text, tensors[0].device).forward(tensors)
        given = [tensor.clone() if slot in call.chain.moved else tensor for slot, tensor in enumerate(tensors)]
        result = runner_for(call, given)(given)
    # An operator must not return one of its arguments; a chain of no-ops could.
    is_given = any(result is tensor for tensor in given)
    return [result.clone() if is_given else result, *(given[slot] for slot in call.chain.moved)]


def _forward_shapes(tensors: list[Tensor], text: str) -> list[Tensor]:
    call = read(text)
    moved = [torch.empty_like(tensors[slot]) for slot in call.chain.moved]
    if call.made:
        return [*(_empty(buffer, tensors[0].device) for buffer in call.made), *moved]
    with without_autocast(tensors[0]):
        return [reference.evaluate(call.chain, tensors), *moved]


def _empty(buffer: Buffer, device: torch.device) -> Tensor:
    return torch.empty_strided(buffer.shape, buffer.strides, dtype=getattr(torch, buffer.dtype), device=device)


def _backward(dy: Tensor, saved: list[Tensor], text: str) -> list[Tensor]:
    """The memory of the gradients of all slots that need one. Gradients that share memory are returned once."""
    call = read(text)
    with torch.no_grad(), on_device_of(dy), without_autocast(dy):
        return passes(text, dy.device).backward(dy, saved) if call.made else _gradients_from_inputs(call, saved, dy)


def _gradients_from_inputs(call: OperatorCall, tensors: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Gradients from the inputs: sizes were unknown when the graph was compiled, so nothing was kept."""
    runner = runner_for(call, tensors)
    if isinstance(runner, Training) and len(runner.plan.chain.steps) == len(call.chain.steps):
        found = [g for g in runner.gradients_again(tensors, dy, call.needs) if g is not None]
    else:
        found = _gradients_by_pytorch(call.chain, tensors, dy, call.needs)
    wanted = [tensor for tensor, is_needed in zip(tensors, call.needs) if is_needed]
    return [torch.empty_like(tensor).copy_(gradient) for tensor, gradient in zip(wanted, found, strict=True)]


def _gradients_by_pytorch(chain: Chain, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]) -> list[Tensor]:
    """Gradients by PyTorch's autograd. Uses torch.func, because autograd is off inside an operator."""
    places = [place for place, is_needed in enumerate(needs) if is_needed]

    def of_wanted(*values: Tensor) -> Tensor:
        replaced = dict(zip(places, values))
        return reference.evaluate(chain, [replaced.get(place, t) for place, t in enumerate(tensors)])

    with torch.enable_grad():
        pulled: Any = torch.func.vjp(of_wanted, *(tensors[place].detach() for place in places))
        return list(pulled[1](dy))


def _backward_shapes(dy: Tensor, saved: list[Tensor], text: str) -> list[Tensor]:
    call = read(text)
    if call.made:
        return [_empty(base, dy.device) for base in call.found]
    return [torch.empty_like(tensor) for tensor, is_needed in zip(saved, call.needs) if is_needed]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.text = inputs
    call = read(ctx.text)
    if any(tensor.requires_grad and not needed for tensor, needed in zip(tensors, call.needs)):
        raise PostludeError("torch.ops.postlude.chain_forward: a tensor needs a gradient that its text does not name.")
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    program, moved = program_of(ctx.text), call.chain.moved
    # Running statistics have been updated before the backward pass, which does not read them.
    unmoved = dict(zip(moved, output[len(output) - len(moved) :]))
    given = [unmoved.get(slot, tensor) for slot, tensor in enumerate(tensors)]
    ctx.save_for_backward(*(given if program is None else _kept(call, program, given, output)))


def _kept(call: OperatorCall, program: Program, tensors: Sequence[Tensor], output: Sequence[Tensor]) -> list[Tensor]:
    """What the backward pass reads, in its order."""
    by_number = dict(zip([buffer.number for buffer in call.made], output))
    by_number |= dict(zip([buffer.number for buffer in program.given], tensors))
    return [by_number[buffer.number] for buffer in program.kept]


def _derivative(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    call, dy = read(ctx.text), grads[0]
    if dy is None:
        return [None] * len(call.needs), None
    program = program_of(ctx.text)
    if program is not None and program.gradient is not None:
        dy = _converted(dy, program.gradient.strides)
    found = torch.ops.postlude.chain_backward(dy, list(ctx.saved_tensors), ctx.text)
    gradients = _gradients(call, program, found)
    if call.given and call.chain.producer is not None and (weight := gradients[1]) is not None:
        gradients[1] = _converted(weight, call.given[1][1])
    return gradients, None


def _converted(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """In another layout, by an operator that a compiler sees and makes part of the pass that wrote the tensor. A copy
    inside of `chain_backward`, or autograd's of a weight's gradient, would be a pass of its own."""
    if tensor.stride() == strides:
        return tensor
    formats = [torch.contiguous_format, *filter(None, [CHANNELS_LAST.get(tensor.dim() - 2)])]
    found = (tensor.contiguous(memory_format=layout) for layout in formats)
    return next((one for one in found if one.stride() == strides), tensor)


def _gradients(call: OperatorCall, program: Program | None, found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """One gradient per slot, from what `chain_backward` returns."""
    if program is None:
        gradients = iter(found)
        return [next(gradients) if is_needed else None for is_needed in call.needs]
    pairs = zip(found, call.found, strict=True)  # views are taken by strides
    bases = {base.storage: None if tensor is None else like(base, tensor) for tensor, base in pairs}
    return [None if g is None or (base := bases[g.storage]) is None else _view(base, g) for g in program.gradients]


def _view(base: Tensor, buffer: Buffer) -> Tensor:
    if tuple(base.shape) == buffer.shape and base.stride() == buffer.strides:
        return base
    return base.as_strided(buffer.shape, buffer.strides, buffer.offset)


def _save_for_second_derivative(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG001
    dy, saved, ctx.text = inputs
    ctx.save_for_backward(dy, *saved)


def _second_derivative(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, list[Tensor | None], None]:
    """The second derivative, by PyTorch's own operators."""
    call, program = read(ctx.text), program_of(ctx.text)
    with torch.enable_grad():
        values = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        dy, *saved = values
        if program is None:
            found = differentiable(call.chain, saved, dy, call.needs)
        else:
            runner = prepared(call.chain, call.problem)[1]
            assert isinstance(runner, Training)
            found = runner.passes_for(call.tensors, call.needs, dy.device).differentiable(saved, dy, call.needs)
        pairs = [(f, g) for f, g in zip(found, _gradients(call, program, grads)) if f is not None and g is not None]
        outputs, cotangents = zip(*pairs)
        wanted = [value for value in values if value.requires_grad]
        pulled = dict(zip(map(id, wanted), torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)))
    return pulled.get(id(dy)), [pulled.get(id(value)) for value in saved], None


LIBRARY.impl("chain_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("chain_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("postlude::chain_forward", _forward_shapes, lib=LIBRARY)
torch.library.register_fake("postlude::chain_backward", _backward_shapes, lib=LIBRARY)
torch.library.register_autograd("postlude::chain_forward", _derivative, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd(
    "postlude::chain_backward", _second_derivative, setup_context=_save_for_second_derivative, lib=LIBRARY
)
