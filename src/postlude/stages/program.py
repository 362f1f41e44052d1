"""Builds a plan's program by tracing its stages, forward and, if gradients are needed, backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain
from postlude.plan import Plan
from postlude.plan.problem import empty, layout_of
from postlude.plan.program import Program, TorchCall, buffers_in, made_by
from postlude.reverse import chooses
from postlude.stages.backward import backward, combined
from postlude.stages.cpu_gradient import backward_on_cpu
from postlude.stages.cpu_passes import forward_on_cpu, trained_on_cpu
from postlude.stages.forward import forward
from postlude.stages.library import cast_for_convolution
from postlude.stages.trace import Tracer, empty_strided

Strided = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of a tensor
Given = tuple[Strided, ...]  # of each slot

Back = Callable[[Tensor], "list[Tensor | None]"]  # from the result's gradient to that of each slot


def given_by(tensors: Sequence[Tensor]) -> Given:
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)


def inference_program(plan: Plan, chain: Chain, given: Given) -> Program:
    """The forward pass of `chain`. The plan covers its first steps; PyTorch runs the others."""

    def whole(tensors: Sequence[Tensor]) -> Tensor:
        result = forward_on_cpu(plan, tensors) if plan.is_compiled else forward(plan, tensors).result
        return reference.continue_from(chain, len(plan.chain.steps), result, tensors, moves=True)

    return traced(whole, _planned_for(plan, given))


def training_program(plan: Plan, given: Given, needs: tuple[bool, ...]) -> Program:
    """The forward pass, and the backward pass for the slots that need a gradient."""
    tensors, tracer = _planned_for(plan, given), Tracer()
    slots = tuple(tracer.buffer(tensor, "given") for tensor in tensors)
    with torch.no_grad(), tracer:
        result, back = _on_cpu(plan, tensors, needs) if plan.is_compiled else _on_gpu(plan, tensors, needs)
    calls, tracer.calls = tuple(tracer.calls), []
    dy = torch.empty_like(result)
    gradient = tracer.buffer(dy, "given")
    with torch.no_grad(), tracer:
        found = back(dy)
    gradients = tuple(None if grad is None else tracer.buffer(grad, "result") for grad in found)
    end = tracer.buffer(result, "result")
    # Second derivatives make the same choice, which may depend on tensors that no first one reads.
    unmoved = tuple(slot for number, slot in enumerate(slots) if number not in plan.chain.moved)
    also = unmoved if chooses(plan.chain) else ()
    return _with_views_again(Program(slots, calls, end, gradient, tuple(tracer.calls), gradients, also))


def _on_gpu(plan: Plan, tensors: Sequence[Tensor], needs: tuple[bool, ...]) -> tuple[Tensor, Back]:
    parts = forward(plan, tensors)
    moments = combined(plan, parts)
    return parts.result, lambda dy: backward(plan, tensors, parts, moments, dy, needs)


def _on_cpu(plan: Plan, tensors: Sequence[Tensor], needs: tuple[bool, ...]) -> tuple[Tensor, Back]:
    result, value, saved = trained_on_cpu(plan, tensors)
    return result, lambda dy: backward_on_cpu(plan, tensors, value, saved, dy, needs)


def _with_views_again(program: Program) -> Program:
    """Lets the backward pass take its views itself, so that no two kept tensors share memory.

    PyTorch requires this of the results of a registered operator.
    """
    given, needed = {buffer.number for buffer in program.given}, {buffer.number for buffer in program.kept}
    views: list[TorchCall] = []
    for call in reversed(program.forward):
        made = {buffer.number for buffer in made_by([call])} - given
        if isinstance(call, TorchCall) and call.is_view and made & needed:
            views.append(call)
            needed |= {buffer.number for buffer in buffers_in(call)}
    return dataclasses.replace(program, backward=(*views[::-1], *program.backward))


def planned_program(plan: Plan) -> Program:
    """The program for the problem that the plan was made for; in training with every gradient that the chain has."""
    tensors = [empty(spec, plan.chain.dims, "meta") for spec in plan.problem.tensors[: len(plan.chain.roles)]]
    if not plan.trains:
        return inference_program(plan, plan.chain, given_by(tensors))
    needs = tuple(slot not in plan.chain.moved for slot in range(len(tensors)))
    return training_program(plan, given_by(cast_for_convolution(plan.chain, tensors)), needs)


def plain_program(chain: Chain, tensors: Sequence[Tensor]) -> Program:
    """The chain by PyTorch's own functions."""
    return traced(lambda given: reference.evaluate(chain, given), tensors)


def rest_program(chain: Chain, first: int, value: Tensor, tensors: Sequence[Tensor]) -> Program:
    """The steps after step `first`, whose result is the program's first given buffer."""
    return traced(lambda given: reference.continue_from(chain, first, given[0], given[1:]), [value, *tensors])


def traced(function: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Program:
    given = [empty_strided(tensor) for tensor in tensors]
    tracer = Tracer()
    slots = tuple(tracer.buffer(tensor, "given") for tensor in given)
    with torch.no_grad(), tracer:
        result = function(given)
    return Program(slots, tuple(tracer.calls), tracer.buffer(result, "result"))


def _planned_for(plan: Plan, given: Given) -> list[Tensor]:
    """Meta tensors as `given` describes. The input gets the plan's layout: kernels would read any other one wrongly."""
    tensors = [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in given]
    if layout_of(tensors[0]) != plan.input.layout:
        raise ValueError(f"planned for an input that is {plan.input.layout}, not {layout_of(tensors[0])}")
    return tensors
