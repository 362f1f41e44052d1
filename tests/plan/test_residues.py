"""Strided convolutions divided by residue, on paper: against every output and tap written out."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases import Builder, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Chain, Convolution
from postlude.plan import Plan
from postlude.plan.gemm import Gemm, input_gradient_of
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.program import KernelCall
from postlude.plan.residues import Axis
from postlude.plan.volume import volume_for


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    kernel, stride = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    padding = draw(st.integers(0, kernel - 1))
    one = Axis(draw(st.integers(1, 20)), kernel, stride, padding)
    assume(one.size + 2 * padding >= kernel)
    return one


def read_by(one: Axis, output: int, tap: int) -> int | None:
    """The input that an output reads through a tap; None if it is padding."""
    place = output * one.stride + tap - one.padding
    return place if 0 <= place < one.size else None


def packed_at(one: Axis, residue: int, cell: int) -> int | None:
    """The input in a cell of a row; None if it is zero. Behind a row lies the next one."""
    place = cell % one.cells * one.stride + residue - one.padding
    return place + one.size * (cell // one.cells) if 0 <= place < one.size else None


@settings(max_examples=300, deadline=None)
@given(axes())
def test_every_tap_is_a_shifted_read_of_one_residue(one: Axis) -> None:
    """Also past the end of a row, where only zeros may be read."""
    for output, tap in itertools.product(range(one.out), range(one.kernel)):
        cell, residue = output + tap // one.stride, tap % one.stride
        assert residue < one.residues
        assert packed_at(one, residue, cell) == read_by(one, output, tap)
        assert cell <= one.last_read()


@settings(max_examples=300, deadline=None)
@given(axes())
def test_a_row_has_no_more_cells_than_it_needs(one: Axis) -> None:
    """With one cell less an output, an input that is read, or a zero behind the row would be missing."""
    short = one.cells - 1
    reads = [(output + tap // one.stride, tap) for output in range(one.out) for tap in range(one.kernel)]
    lost = any(cell >= short and packed_at(one, tap % one.stride, cell) is not None for cell, tap in reads)
    met = any(cell >= short and (cell - short) in one.inputs(tap % one.stride) for cell, tap in reads)
    assert short < one.out or lost or met


@settings(max_examples=100, deadline=None)
@given(axes())
def test_at_stride_1_the_cells_are_those_of_the_padded_volume(one: Axis) -> None:
    plain = dataclasses.replace(one, stride=1)
    assert (plain.cells, plain.residues) == (one.size + one.padding, 1)


@pytest.mark.parametrize(
    ("kernel", "padding", "more", "cells"), [(3, 1, 0, 8), (2, 0, 0, 8), (2, 0, 1, 8), (3, 1, 1, 9), (4, 1, 0, 9)]
)
def test_the_gradient_of_a_transposed_convolution_has_few_cells(
    kernel: int, padding: int, more: int, cells: int
) -> None:
    """One for each input where its border is shared or empty, else one more."""
    size = 7 * 2 + kernel - 2 * padding + more
    one = Axis(size, kernel, 2, padding)
    assert (one.out, one.cells) == (8, cells)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3), (2, 2), (1, 1)), ((2, 4), (2, 3), (0, 1)), ((5, 1), (1, 2), (2, 0))]
)
def test_the_packed_volume_holds_every_sample(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    """Written out with a plain vector instead of a kernel."""
    how = Convolution(False, 1, 1, kernel, stride, padding, (1, 1), (0, 0))
    x, w = torch.randn(2, 1, 7, 6, dtype=torch.float64), torch.randn(1, 1, *kernel, dtype=torch.float64)
    volume = volume_for(how, (7, 6), 1)
    rows = volume.packed_rows(2) // volume.residues
    _, high, wide = volume.axes
    packed = torch.zeros(high.residues, wide.residues, rows * volume.pitch, dtype=torch.float64)
    for n, y, at in itertools.product(range(2), range(7), range(6)):
        (j, b), (i, a) = divmod(y + padding[0], stride[0]), divmod(at + padding[1], stride[1])
        if b < high.residues and a < wide.residues and j < volume.padded[1] and i < volume.pitch:
            packed[b, a, (n * volume.sample_rows + j) * volume.pitch + i] = x[n, 0, y, at]
    truth = F.conv2d(x, w, stride=stride, padding=padding)
    assert truth.shape[2:] == volume.out[1:]
    for n, y, at in itertools.product(range(2), *map(range, volume.out[1:])):
        own, total = (n * volume.sample_rows + y) * volume.pitch + at, 0.0
        for ty, tx in itertools.product(range(kernel[0]), range(kernel[1])):
            place = own + ty // stride[0] * volume.pitch + tx // stride[1]
            total += float(w[0, 0, ty, tx] * packed[ty % stride[0], tx % stride[1], place])
        assert abs(total - float(truth[n, 0, y, at])) < 1e-12


def up(channels: tuple[int, int] = (32, 64), kernel: int = 3) -> Convolution:
    return conv(3, channels, kernel, transposed=True, stride=2, padding=1, output_padding=1)


def planned(chain: Chain, precision: str) -> Plan:
    given = problem(chain, (16, 32, 16, 32, 32), device="cuda", precision=precision, needs_grad=True)
    plan = lower_for_gpu(chain, dataclasses.replace(given, allows_tf32=precision == "tf32"), card(90))
    assert isinstance(plan, Plan), plan
    return plan


def test_gradients_are_ours_in_fp32_and_tf32() -> None:
    chain = Builder(3, up()).op("relu").norm(8).chain()
    plan = planned(chain, "fp32")
    dx, dw = plan.gradients.of_input, plan.gradients.of_weight
    assert dx is not None
    assert dw is not None
    assert dx.volume == dw.volume  # one packed gradient for both
    assert (dx.volume.residues, dx.volume.padded) == (8, (17, 33, 33))
    assert (dw.out_channels, dw.channels) == (32, 64)  # of the convolution that is the input's gradient
    assert dw.turned  # so that wgmma has the 64 channels as rows
    words = plan.describe_training()
    assert "gradient of the input: ours" in words[1]
    assert "by 8 residues modulo the stride" in words[1]
    assert "gradient of the weight: ours" in words[2]
    one = planned(chain, "tf32").gradients.of_input
    assert isinstance(one, Gemm)
    assert (one.arithmetic.planes, one.volume) == (1, dx.volume)


def test_gradients_in_16_bits_are_pytorchs() -> None:
    half = Builder(3, dataclasses.replace(up(), dtype="float16")).op("relu").norm(8).chain()
    plan = planned(half, "auto")
    assert isinstance(plan.own, Gemm)
    assert (plan.gradients.of_input, plan.gradients.of_weight) == (None, None)
    assert "gradient of the input: PyTorch's" in plan.describe_training()


def test_no_pass_packs_a_gradient_by_residue() -> None:
    assert not planned(Builder(3, up()).op("relu").chain(), "fp32").gradients.are_packed


def test_gradients_of_a_wide_kernel_are_pytorchs() -> None:
    plan = planned(Builder(3, up(kernel=6)).op("relu").norm(8).chain(), "fp32")
    assert plan.own is not None
    assert (plan.gradients.of_input, plan.gradients.of_weight) == (None, None)


def test_cards_without_wgmma_leave_them_to_pytorch() -> None:
    chain = Builder(3, up()).op("relu").norm(8).chain()
    given = problem(chain, (16, 32, 16, 32, 32), device="cuda", precision="fp32", needs_grad=True)
    plan = lower_for_gpu(chain, given, card(80), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert (plan.gradients.of_input, plan.gradients.of_weight) == (None, None)


@settings(max_examples=200, deadline=None)
@given(axes())
def test_the_input_s_gradient_has_the_input_s_size(one: Axis) -> None:
    """The transpose's output padding covers inputs that no output reads; a mutant without it covers fewer."""
    how = conv(2, (4, 8), kernel=one.kernel, stride=one.stride, padding=one.padding)
    space = (one.size, one.size)
    back = input_gradient_of(how, space)
    assert back.output_space(how.output_space(space)) == space
    assert all(more < one.stride for more in back.output_padding)
    bare = dataclasses.replace(back, output_padding=(0, 0))
    assert (bare.output_space(how.output_space(space)) == space) == (back.output_padding == (0, 0))


def down(channels: tuple[int, int] = (32, 64), kernel: int = 3, **sizes: int) -> Convolution:
    return conv(3, channels, kernel, **{"stride": 2, "padding": 1, **sizes})


def lowered(how: Convolution, precision: str = "fp32", needs_grad: bool = False, machine: int = 90) -> Plan:
    chain = Builder(3, how).op("relu").norm(8).chain()
    given = problem(chain, (8, how.in_channels, 32, 64, 64), device="cuda", precision=precision, needs_grad=needs_grad)
    plan = lower_for_gpu(chain, dataclasses.replace(given, allows_tf32=precision == "tf32"), card(machine))
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize(("precision", "planes"), [("fp32", 2), ("tf32", 1)])
def test_a_strided_convolution_is_ours_in_fp32_and_tf32(precision: str, planes: int) -> None:
    plan = lowered(down(), precision, needs_grad=True)
    assert isinstance(plan.own, Gemm)
    assert plan.own.arithmetic.planes == planes
    assert (plan.own.volume.residues, plan.own.volume.width) == (8, 1)
    dx, dw = plan.gradients.of_input, plan.gradients.of_weight
    assert isinstance(dx, Gemm)
    assert dw is not None
    assert dx.phases is not None  # the input's gradient is a strided transposed convolution
    assert dw.volume == plan.own.volume  # the weight's reads the input as the convolution does
    assert dw.gradient_volume.padded == dx.volume.padded  # one packed gradient for both
    packings = [name for name in kernels_of(plan) if "pack" in name]
    forward, backward = ["pack_residues_kernel", "pack_weight_kernel"], ["pack_input_kernel", "pack_residues_kernel"]
    assert packings == [*forward, *backward, "pack_phases_kernel"]


def kernels_of(plan: Plan) -> list[str]:
    return [call.kernel for call in (*plan.program.forward, *plan.program.backward) if isinstance(call, KernelCall)]


MEAN = Builder(3, conv(3, (32, 64))).norm(8).reduce("mean", "space").chain()


@pytest.mark.parametrize("how", [up(), down(), conv(3, (32, 64), padding=1), None], ids=str)
def test_the_scales_of_the_input_are_found_once(how: Convolution | None) -> None:
    """The forward pass keeps them for the weight's gradient; those of the result's gradient are found where it is
    computed, or, where only moments are needed, by a launch of their own."""
    chain = MEAN if how is None else Builder(3, how).op("relu").norm(8).chain()
    given = problem(chain, (16, 32, 32, 64, 64), device="cuda", precision="fp32", needs_grad=True)
    plan = lower_for_gpu(chain, given, card(90))
    assert isinstance(plan, Plan), plan
    assert plan.gradients.of_weight is not None
    assert kernels_of(plan).count("largest_kernel") == (2 if how is None else 1)


@pytest.mark.parametrize(
    ("how", "precision", "reason"),
    [
        (down((8, 64)), "fp32", "Postlude's strided convolution has not been measured with fewer than 16 channels"),
        (dataclasses.replace(down(), dtype="float16"), "auto", "has not been measured in 16 bits"),
        (down(dilation=2), "fp32", "Postlude has no kernel for dilated convolutions"),
        (down((32, 64), groups=2), "fp32", "Postlude has no kernel for grouped convolutions"),
        (down(padding=3), "fp32", "the padding is wider than the kernel reaches"),
    ],
)
def test_other_strided_convolutions_are_pytorchs_with_a_reason(how: Convolution, precision: str, reason: str) -> None:
    plan = lowered(how, precision)
    assert plan.own is None
    assert reason in str(plan.reasons)


def test_a_strided_convolution_of_a_wide_kernel_has_pytorchs_gradients() -> None:
    plan = lowered(down(kernel=6), needs_grad=True)
    assert plan.own is not None
    assert (plan.gradients.of_input, plan.gradients.of_weight) == (None, None)
