"""A plan ready to run: its programs, forward and backward, and the autograd function around them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postlude import reference
from postlude.chain import Chain
from postlude.plan import Plan
from postlude.plan.program import Buffer, Program
from postlude.run.differentiable import differentiable
from postlude.run.runner import Run, runner_of
from postlude.stages.library import cast_for_convolution, without_autocast
from postlude.stages.program import Given, given_by, inference_program, training_program


class Inference:
    """The forward pass alone."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self.plan, self.chain = plan, chain
        self.has_numbers = "one" in chain.roles
        self.programs: dict[Given, Program] = {}
        self.runs: dict[tuple[int, Given], Run] = {}  # by device

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        tensors = _on_one_device(tensors) if self.has_numbers else tensors
        key = (tensors[0].get_device(), given_by(tensors))
        run = self.runs.get(key)
        if run is None:
            program = self.program(tensors)
            run = self.runs[key] = runner_of(program.given, program.forward, [program.result], str(tensors[0].device))
        with on_device_of(tensors[0]):
            result = run(*tensors)[0]
        assert result is not None
        return result

    def program(self, tensors: Sequence[Tensor], needs: Sequence[bool] = ()) -> Program:  # noqa: ARG002  as Training's
        given = given_by(tensors)
        if given not in self.programs:
            self.programs[given] = inference_program(self.plan, self.chain, given)
        return self.programs[given]


class Training:
    """A plan with its backward pass, as one node of autograd's graph."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self.plan, self.chain = plan, chain
        self.has_numbers = "one" in chain.roles
        self.programs: dict[tuple[Given, tuple[bool, ...]], Program] = {}
        self.passes: dict[tuple[torch.device, Given, tuple[bool, ...]], _Passes] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        tensors = _on_one_device(tensors) if self.has_numbers else tensors
        # Cast outside the autograd function, so that the same tensors are saved as in eager.
        result: Tensor = _ChainFunction.apply(self, *cast_for_convolution(self.plan.chain, tensors))  # type: ignore[no-untyped-call]
        # The plan may leave the chain's last steps out. PyTorch's operators run them, with their gradients.
        return reference.continue_from(self.chain, len(self.plan.chain.steps), result, tensors, moves=True)

    def program(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> Program:
        return self.program_for(given_by(cast_for_convolution(self.plan.chain, tensors)), tuple(needs))

    def program_for(self, given: Given, needs: tuple[bool, ...]) -> Program:
        if (given, needs) not in self.programs:
            self.programs[given, needs] = training_program(self.plan, given, needs)
        return self.programs[given, needs]

    def passes_for(self, given: Given, needs: tuple[bool, ...], device: torch.device) -> _Passes:
        found = self.passes.get((device, given, needs))
        if found is None:
            found = self.passes[device, given, needs] = _Passes(self, given, needs, str(device))
        return found

    def gradients_again(self, tensors: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients if nothing could be kept: the forward pass runs again."""
        tensors = cast_for_convolution(self.plan.chain, tensors)
        passes = self.passes_for(given_by(tensors), tuple(needs), dy.device)
        with on_device_of(dy):
            _, *kept = passes.forward(*_unmoved(self.plan.chain, tensors))
            return list(passes.backward(*kept, like(passes.program.gradient, dy)))


class _Passes:
    """Both passes of one program. The forward pass returns what the backward pass reads."""

    def __init__(self, training: Training, given: Given, needs: tuple[bool, ...], device: str) -> None:
        self.training, self.given, self.needs, self.device = training, given, needs, device
        program = self.program = training.program_for(given, needs)
        self.kept = program.kept
        self.forward = runner_of(program.given, program.forward, [program.result, *self.kept], device)
        self.backward = self._backward_of(program)
        self._narrower: dict[tuple[bool, ...], Run] = {}

    def backward_for(self, needs: tuple[bool, ...]) -> Run:
        """The backward pass for these slots: maybe fewer than the forward pass was told, which then kept enough."""
        if needs == self.needs:
            return self.backward
        if needs not in self._narrower:
            self._narrower[needs] = self._backward_of(self.training.program_for(self.given, needs))
        return self._narrower[needs]

    def _backward_of(self, program: Program) -> Run:
        assert program.gradient is not None
        return runner_of([*self.kept, program.gradient], program.backward, program.gradients, self.device)

    def differentiable(self, kept: Sequence[Tensor], dy: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Gradients that can be differentiated again, by PyTorch's operators."""
        plan = self.training.plan
        by_number = {buffer.number: tensor for buffer, tensor in zip(self.kept, kept)}
        # No gradient depends on what was not kept, so zeros of the same shape will do.
        tensors = [
            by_number.get(buffer.number, dy.new_zeros(()).to(dtype).expand(shape))
            for buffer, (shape, _, dtype) in zip(self.program.given, self.given)
        ]
        result = by_number.get(self.program.result.number) if plan.gradients.from_result else None
        return differentiable(plan.chain, tensors, dy, needs, result)


class _ChainFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, training: Training, *tensors: Tensor) -> Tensor:
        needs = tuple(ctx.needs_input_grad[1:])
        passes = training.passes_for(given_by(tensors), needs, tensors[0].device)
        with on_device_of(tensors[0]):
            result, *kept = passes.forward(*tensors)
        ctx.passes = passes
        ctx.save_for_backward(*kept)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        passes, needs, kept = ctx.passes, tuple(ctx.needs_input_grad[1:]), ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *passes.differentiable(kept, dy, needs)
        run = passes.backward_for(needs)
        with on_device_of(dy), without_autocast(dy):
            return None, *run(*kept, like(passes.program.gradient, dy))


def _on_one_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Moves 0-d tensors to the GPU: PyTorch allows them on the CPU, but kernels cannot read them there."""
    device = tensors[0].device
    # From pinned memory a copy that nobody waits for could read what the caller writes there after this call.
    return [t if t.device == device else t.to(device, non_blocking=not t.is_pinned()) for t in tensors]


def like(buffer: Buffer | None, tensor: Tensor) -> Tensor:
    """The tensor in the layout and dtype of a buffer of the program."""
    assert buffer is not None
    return laid_out(tensor, buffer.shape, buffer.strides, getattr(torch, buffer.dtype))


def laid_out(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor with this shape, strides and dtype; the tensor itself if it has them."""
    if tensor.dtype == dtype and tensor.stride() == strides:
        return tensor
    return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).copy_(tensor)


def _unmoved(chain: Chain, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with copies of running statistics, so that a second forward pass does not update them again."""
    return [tensor.clone() if slot in chain.moved else tensor for slot, tensor in enumerate(tensors)]


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes a tensor's device current: Triton launches on the current device, whatever its pointers are."""
    device = tensor.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()
