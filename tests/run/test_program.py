"""Programs of calls: what a runner does, as plain data."""

from __future__ import annotations

import pickle

import pytest
import torch

from cases import Builder, conv
from postlude.export.export_model import HOPPER
from postlude.plan import Plan, Problem, lower
from postlude.plan.problem import spec_of
from postlude.plan.program import Buffer, CudaCall, KernelCall, Program, TorchCall, buffers_in
from postlude.stages.trace import Tracer
from tracing import program_of

pytest.importorskip("triton")
CHAIN = Builder(3, conv(3, (16, 32), 3, transposed=True)).op("relu").norm(8).chain()
SHAPES = ((2, 16, 4, 5, 6), (16, 32, 3, 3, 3), (32,), (32,), (32,))


def recorded(needs_grad: bool) -> Program:
    tensors = [torch.empty(shape, device="meta") for shape in SHAPES[: len(CHAIN.roles)]]
    problem = Problem(tuple(map(spec_of, tensors)), "cuda", "fp32", needs_grad)
    plan = lower(CHAIN, problem, HOPPER, even_if_slower=True)
    assert isinstance(plan, Plan)
    return program_of(plan, tensors, [True] * len(tensors) if needs_grad else None)


def kernels(calls: tuple[object, ...]) -> list[str]:
    return [call.kernel for call in calls if isinstance(call, KernelCall | CudaCall)]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_program_is_plain_data(needs_grad: bool) -> None:
    program = recorded(needs_grad)
    assert program == recorded(needs_grad)
    assert pickle.loads(pickle.dumps(program)) == program
    assert str(program).count("KernelCall(") == len(kernels(program.forward + program.backward))


def test_it_has_the_launches_in_their_order() -> None:
    program = recorded(False)
    assert kernels(program.forward) == [
        "largest_kernel",
        "pack_input_kernel",
        "pack_weight_kernel",
        "convolve_kernel",
        "combine_moments_kernel",
        program.forward[-1].kernel,  # type: ignore[union-attr]  # one of two, by the value's size
    ]
    assert program.result.shape == (2, 32, 6, 7, 8)
    assert program.backward == ()


def test_every_buffer_is_made_before_it_is_read() -> None:
    program = recorded(True)
    assert program.gradient is not None
    known = {buffer.number for buffer in program.given}
    for call in program.forward:
        assert {buffer.number for buffer in buffers_in(call)} <= known
        known |= {b.number for b in getattr(call, "results", ()) if b is not None}
    known.add(program.gradient.number)
    for call in program.backward:
        assert {buffer.number for buffer in buffers_in(call)} <= known
        known |= {b.number for b in getattr(call, "results", ()) if b is not None}
    assert [grad is not None and grad.shape for grad in program.gradients] == [b.shape for b in program.given]


def test_what_only_autograd_tells_apart_are_two_buffers() -> None:
    recorder = Tracer()
    x = torch.empty(3, device="meta")
    with recorder:
        y = x.detach()
        _ = x.view(3), x.contiguous()  # the same tensor, to everyone
        y.zero_()
    assert [call.function for call in recorder.calls if isinstance(call, TorchCall)] == [
        "Tensor.detach",
        "Tensor.zero_",
    ]
    assert recorder.buffer(x) != recorder.buffer(y)
    assert recorder.buffer(x).storage == recorder.buffer(y).storage


@pytest.mark.parametrize("transposed", [False, True])
def test_cudnns_own_operators_are_taken_down(transposed: bool) -> None:
    x, weight = torch.empty(2, 4, 9, 9, device="meta"), torch.empty(4, 4, 3, 3, device="meta")
    recorder = Tracer()
    settings = ([2, 2], [1, 1], 1, False, False, True)  # stride, dilation, groups, and cuDNN's switches
    with recorder:
        if transposed:
            result = torch.ops.aten.cudnn_convolution_transpose(x, weight, [1, 1], [1, 1], *settings)
        else:
            result = torch.ops.aten.cudnn_convolution(x, weight, [1, 1], *settings)
    assert result.shape == ((2, 4, 18, 18) if transposed else (2, 4, 5, 5))
    (call,) = recorder.calls
    assert isinstance(call, TorchCall)
    assert call.function == f"torch.ops.aten.cudnn_convolution{'_transpose' * transposed}"


def test_nothing_stays_recording_after_an_error() -> None:
    with pytest.raises(RuntimeError), Tracer():
        torch.empty(2, device="meta") + torch.empty(3, device="meta")
    with Tracer() as tracer:
        torch.empty(2, device="meta")
    assert len(tracer.calls) == 1


def test_layouts_of_buffers() -> None:
    assert Buffer(0, (2, 1, 3), (3, 7, 1), "float32", "given", 0).is_contiguous
    assert not Buffer(0, (2, 3), (1, 2), "float32", "given", 0).is_contiguous
