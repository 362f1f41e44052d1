"""Transposed convolutions taken apart by phase, on paper: against every output and tap written out."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases import Builder, conv
from level2 import LEVEL2
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Chain, Convolution
from postlude.plan import Plan, Problem, Store
from postlude.plan.convolve import gemm_for
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.phases import Axis, has_phases, phases_of
from postlude.plan.volume import phased_volume


def axis(size: int, kernel: int, stride: int, padding: int, output_padding: int) -> Axis:
    return Axis(size, kernel, stride, padding, (size - 1) * stride + kernel - 2 * padding + output_padding)


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    kernel, stride = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    padding, more = draw(st.integers(0, kernel - 1)), draw(st.integers(0, stride - 1))
    one = axis(draw(st.integers(1, 9)), kernel, stride, padding, more)
    assume(one.out > 0)
    return one


def written_out(one: Axis) -> set[tuple[int, int, int]]:
    """Every output, the input that it gets, and the tap."""
    inputs, taps = range(one.size), range(one.kernel)
    found = {(i * one.stride + tap - one.padding, i, tap) for i in inputs for tap in taps}
    return {item for item in found if 0 <= item[0] < one.out}


def by_phase(one: Axis) -> set[tuple[int, int, int]]:
    found = set()
    for remainder in range(one.stride):
        phase = one.phase(remainder)
        for cell, (place, tap) in itertools.product(range(phase.outputs), enumerate(one.taps(remainder))):
            found.add((cell * one.stride + remainder, cell + phase.first + place, tap))
    return {item for item in found if 0 <= item[1] < one.size}


@settings(max_examples=300, deadline=None)
@given(axes())
def test_every_output_gets_every_input_through_its_tap(one: Axis) -> None:
    assert by_phase(one) == written_out(one)
    taps = [tap for remainder in range(one.stride) for tap in one.taps(remainder)]
    assert sorted(taps) == list(range(one.kernel))  # each in one phase


def test_a_swapped_phase_is_seen() -> None:
    """Mutant: the taps of the other phase."""
    one = axis(4, 3, 2, 1, 1)
    assert by_phase(dataclasses.replace(one, padding=0)) != written_out(one)


@settings(max_examples=300, deadline=None)
@given(axes())
def test_reads_beside_the_input_meet_zeros(one: Axis) -> None:
    """Positions of a packed row: zeros in front, and behind it those of the next row."""
    pitch = one.front + one.size
    assert one.cells <= pitch
    for remainder in range(one.stride):
        phase = one.phase(remainder)
        for cell, place in itertools.product(range(phase.outputs), range(phase.taps)):
            position = cell + phase.first + one.front + place
            is_input = 0 <= cell + phase.first + place < one.size
            assert is_input == (one.front <= position < pitch)
            assert is_input or 0 <= position % pitch < one.front


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "more"),
    [((3, 3), (2, 2), (1, 1), (1, 1)), ((2, 4), (2, 3), (0, 1), (1, 2)), ((5, 1), (1, 2), (2, 0), (0, 0))],
)
def test_every_tap_is_a_shifted_read_of_the_packed_volume(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], more: tuple[int, int]
) -> None:
    """Written out with a plain vector instead of a kernel."""
    how = Convolution(True, 1, 1, kernel, stride, padding, (1, 1), more)
    x, w = torch.randn(2, 1, 4, 5, dtype=torch.float64), torch.randn(1, 1, *kernel, dtype=torch.float64)
    volume, phases = phased_volume(how, (4, 5))
    sample = volume.sample_rows * volume.pitch
    packed = torch.zeros(2 * sample + 1000, dtype=torch.float64)
    for n in range(2):
        grid = packed[n * sample :][: volume.plane].view(volume.padded[1:])
        grid[phases.front[1] :, phases.front[2] :] = x[n, 0]
    truth = F.conv_transpose2d(x, w, stride=stride, padding=padding, output_padding=more)
    _, high, wide = phases.axes
    assert truth.shape[2:] == (high.out, wide.out)
    for n, y, at in itertools.product(range(2), range(high.out), range(wide.out)):
        total = 0.0
        for (j, tap_y), (i, tap_x) in itertools.product(
            enumerate(high.taps(y % stride[0])), enumerate(wide.taps(at % stride[1]))
        ):
            row = y // stride[0] + high.phase(y % stride[0]).first + phases.front[1] + j
            column = at // stride[1] + wide.phase(at % stride[1]).first + phases.front[2] + i
            total += float(w[0, 0, tap_y, tap_x] * packed[n * sample + row * volume.pitch + column])
        assert abs(total - float(truth[n, 0, y, at])) < 1e-12


def strided(dims: int = 3, channels: tuple[int, int] = (32, 64), **settings: int) -> Convolution:
    options = {"stride": 2, "padding": 1, "output_padding": 1, **settings}
    return conv(dims, channels, options.pop("kernel", 3), transposed=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "are"),
    [
        (strided(), True),
        (strided(kernel=2, padding=0, output_padding=0), True),
        (strided(stride=1, output_padding=0), False),
        (conv(3, (32, 64), stride=2), False),
        (strided(groups=2), False),
        (strided(dilation=2), False),
        (strided(kernel=1), False),  # padding as wide as the kernel
    ],
)
def test_which_convolutions_have_phases(how: Convolution, are: bool) -> None:
    assert has_phases(how) == are


CHAIN = Builder(3, strided()).op("relu").norm(8).chain()


def test_a_plan_by_phase() -> None:
    """Two phases of a row in one program, four programs for the others; no product with another phase's taps."""
    given = problem(CHAIN, (16, 32, 16, 32, 32), device="cuda", precision="fp32")
    plan = lower_for_gpu(CHAIN, given, card(90))
    assert isinstance(plan, Plan)
    assert isinstance(plan.own, Gemm)
    own = plan.own
    assert own.phases == phases_of(strided(), (16, 32, 32))
    assert "one for each of 8 phases" in plan.describe()[0]
    assert own.phases is not None
    assert own.phases.programs == 4
    assert own.volume.padded == (17, 33, 33)
    assert own.chunks == 4 * own.tiles == 4 * -(-16 * 33 * 33 // own.rows)
    assert plan.launches == 6  # largest, two packings, the products, moments combined, the last pass
    packed = 16 * 17 * 33 * 33 * 32 * 2 * 2
    value = 16 * 64 * 32 * 64 * 64 * 4
    assert plan.moved_bytes == pytest.approx(3 * value + 2 * given.x.bytes + 2 * packed, rel=2e-2)  # and moments


def chain_of(how: Convolution, *words: str) -> Chain:
    made = Builder(how.dims, how)
    for word in words:
        made = made.op(word)
    return made.chain()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(
    ("how", "shape"),
    [
        (strided(2, (64, 64)), (128, 64, 128, 128)),
        (strided(2, (64, 64), kernel=4), (32, 64, 256, 256)),
        (strided(), (16, 32, 16, 32, 32)),
        (conv(2, (64, 128)), (128, 64, 128, 128)),
        (conv(2, (64, 64)), (64, 64, 256, 256)),
        (conv(3, (32, 64)), (16, 32, 32, 64, 64)),
    ],
    ids=str,
)
def test_chains_without_a_norm_are_ours_where_that_is_expected_to_win(
    how: Convolution, shape: tuple[int, ...], precision: str
) -> None:
    chain = chain_of(how, "relu")
    found = gemm_for(chain, problem(chain, shape, device="cuda", precision=precision), card(90))
    assert isinstance(found, Gemm), found
    assert found.arithmetic.keeps_infinities
    assert found.volume.width == 1  # nothing is multiplied by zeros


@pytest.mark.parametrize(
    ("how", "shape", "precision", "reason"),
    [
        (conv(2, (64, 16), 1), (64, 64, 256, 256), "tf32", "ms are expected of Postlude's"),
        (conv(3, (12, 16)), (64, 12, 32, 64, 64), "tf32", "ms are expected of Postlude's"),
        (strided(2, (64, 64)), (1, 64, 16, 16), "tf32", "too small"),
    ],
    ids=str,
)
def test_and_pytorchs_where_it_is_not(how: Convolution, shape: tuple[int, ...], precision: str, reason: str) -> None:
    chain = chain_of(how, "relu")
    found = gemm_for(chain, problem(chain, shape, device="cuda", precision=precision), card(90))
    assert isinstance(found, str), found
    assert reason in found


def test_eight_channels_are_ours_in_fp32() -> None:
    chain = chain_of(conv(3, (8, 32)), "relu")
    given = problem(chain, (64, 8, 32, 64, 64), device="cuda", precision="auto")
    found = gemm_for(chain, dataclasses.replace(given, allows_tf32=True), card(90))
    assert isinstance(found, Gemm)
    assert found.arithmetic.planes == 2


def in_16_bits(given: Problem) -> Problem:
    return dataclasses.replace(given, tensors=tuple(dataclasses.replace(t, dtype="float16") for t in given.tensors))


def of_layer_norm(how: Convolution) -> Chain:
    return Builder(how.dims, how).op("add", "one").layer_norm().op("gelu", approximate="none").chain()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", ["3", "34"])
def test_before_a_layer_norm_ours_stores_what_it_computes(name: str, precision: str, layout: str) -> None:
    chain, shape = LEVEL2[name]
    plan = lower_for_gpu(chain, problem(chain, shape, layout, device="cuda", precision=precision), card(90))
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, Gemm), plan.reasons
    assert plan.own.phases is not None
    assert plan.own.arithmetic.keeps_infinities
    assert [item.sink for item in plan.passes] == [Store(raw=True), Store()]
    assert [item.last for item in plan.passes] == [0, len(chain.steps)]
    assert (plan.launches, plan.value.layout) == (5, "contiguous")  # largest, two packings, the products, the rows
    assert plan.reasons == ("our own convolution",)  # no step is computed twice


@pytest.mark.parametrize(
    ("how", "shape", "layout", "is_ours"),
    [
        (strided(), (32, 32, 16, 32, 32), "contiguous", False),
        (strided(), (32, 32, 16, 32, 32), "channels_last", False),
        (conv(3, (32, 64), padding=1), (16, 32, 32, 64, 64), "contiguous", True),  # in place, rows of one output
        (conv(2, (64, 128)), (128, 64, 128, 128), "contiguous", False),
    ],
    ids=str,
)
def test_before_a_layer_norm_in_16_bits(how: Convolution, shape: tuple[int, ...], layout: str, is_ours: bool) -> None:
    chain = of_layer_norm(how)
    found = gemm_for(chain, in_16_bits(problem(chain, shape, layout, device="cuda")), card(90))
    assert isinstance(found, str) != is_ours, found
    assert isinstance(found, str) or found.volume.width == 1


def test_the_pass_of_a_layer_norm_is_nobodys_gain() -> None:
    """2-D and contiguous: without a norm ours saves PyTorch's pass, here the same one follows either."""
    how, shape = strided(2, (64, 64)), (128, 64, 128, 128)
    chain = of_layer_norm(how)
    found = gemm_for(chain, problem(chain, shape, device="cuda", precision="tf32"), card(90))
    assert isinstance(found, str)
    assert found.startswith("about ")
    assert found.endswith(" of PyTorch's")
    chain = chain_of(how, "relu")
    assert isinstance(gemm_for(chain, problem(chain, shape, device="cuda", precision="tf32"), card(90)), Gemm)


def test_gradients_before_a_layer_norm_are_pytorchs_at_stride_1() -> None:
    """Ours multiply by zeros, which NaN of one row does not leave to the others."""
    chain = of_layer_norm(conv(3, (32, 64)))
    given = problem(chain, (16, 32, 32, 64, 64), device="cuda", precision="fp32", needs_grad=True)
    for plan in (lower_for_gpu(chain, one, card(90), even_if_slower=True) for one in (given, in_16_bits(given))):
        assert isinstance(plan, Plan)
        assert plan.own is not None
        assert (plan.gradients.of_input, plan.gradients.of_weight, plan.gradients.are_packed) == (None, None, False)


def test_gradients_before_a_layer_norm_are_ours_by_residue() -> None:
    """In two planes: each row of the product is one position, and infinities are kept."""
    chain = of_layer_norm(strided())
    given = problem(chain, (16, 32, 32, 64, 64), device="cuda", precision="fp32", needs_grad=True)
    plans = [lower_for_gpu(chain, one, card(90), even_if_slower=True) for one in (given, in_16_bits(given))]
    two, half = (plan for plan in plans if isinstance(plan, Plan))
    assert two.gradients.of_input is not None
    assert two.gradients.of_input.arithmetic.keeps_infinities
    assert two.gradients.of_weight is not None
    assert (half.gradients.of_input, half.gradients.of_weight) == (None, None)
