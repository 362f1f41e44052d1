"""Programs of calls: what a runner does, as plain data."""

from __future__ import annotations

import pickle

import pytest
import torch

from cases import Builder, conv
from postlude.export.export_model import HOPPER
from postlude.plan import Plan, Problem, lower
from postlude.plan.problem import spec_of
from postlude.plan.program import Buffer, Call, CudaCall, KernelCall, Program, TorchCall, buffers_in, most_memory
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


def test_memory_that_is_alive_at_a_time() -> None:
    recorder = Tracer()
    x = torch.empty(100, device="meta")
    given = recorder.buffer(x, "given")
    with recorder:
        a = x + 1  # 400 bytes, read until c is there
        b = a.view(10, 10).t()  # a's memory
        c = (b + 1).relu_()
        d = c.double()  # 800 bytes; c is read for the last time
        e = d + 1
    result = recorder.buffer(e)
    assert given.bytes == 400
    assert most_memory(recorder.calls, [result]) == 1600
    assert most_memory(recorder.calls[:4]) == 800
    assert most_memory(recorder.calls, [result, recorder.buffer(a)]) == 2000
    assert most_memory([]) == 0


@pytest.mark.parametrize("stride", [1, 2])
def test_the_packed_input_is_freed_before_the_inputs_gradient_is_made(stride: int) -> None:
    """Both are as large as the input, and together they were the peak of a training step of nnU-Net."""
    chain = Builder(3, conv(3, (64, 32), 3, transposed=stride > 1, stride=stride, padding=1)).norm(None).chain()
    weight = (64, 32, 3, 3, 3) if stride > 1 else (32, 64, 3, 3, 3)
    tensors = [torch.empty(shape, device="meta") for shape in ((2, 64, 48, 48, 48), weight, *[(32,)] * 3)]
    problem = Problem(tuple(map(spec_of, tensors)), "cuda", "fp32", needs_grad=True)
    plan = lower(chain, problem, HOPPER, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert plan.gradients.of_input is not None
    assert plan.gradients.of_weight is not None
    program = program_of(plan, tensors, [True] * 5)
    reads = {number: [b.storage for b in buffers_in(call)] for number, call in enumerate(program.backward)}
    (packs,) = (n for n, read in reads.items() if program.given[0].storage in read and _is_packing(program.backward[n]))
    packed = set(reads[packs]) - {program.given[0].storage} - _small(program.backward[packs])
    assert program.gradients[0] is not None
    made = min(number for number, read in reads.items() if program.gradients[0].storage in read)
    assert max(number for number, read in reads.items() if packed & set(read)) < made


def _is_packing(call: object) -> bool:
    return isinstance(call, KernelCall) and call.kernel.startswith("pack_input")


def _small(call: Call) -> set[int]:
    return {buffer.storage for buffer in buffers_in(call) if buffer.bytes < 1 << 20}
