"""Our own convolution on paper: the packed volume, the tiles for every card, and when it is PyTorch's turn."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases import CHAIN_23, CHAIN_61, Builder, conv
from kernels.offline import CARDS
from machines import card
from plan.test_lower import CARD, problem
from postlude.chain import Chain, Convolution
from postlude.plan import Plan
from postlude.plan.boxes import Boxes
from postlude.plan.convolve import (
    gemm_for,
    gradient_products,
    packs_gradient,
    unfolded_product_for,
)
from postlude.plan.few_channels import FewChannels, Geometry, StoredFewChannels, few_channels_for, shared_bytes
from postlude.plan.gemm import Arithmetic, Gemm, WeightGemm, input_gradient_of, unsupported
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.program import CudaCall, TorchCall
from postlude.plan.volume import Volume, unfolded_volume, volume_for
from postlude.plan.weight_gradient import weight_gemm_for

BLOCK = Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(
    ("kernel", "padding"),
    [((3, 3, 3), (1, 1, 1)), ((3, 3, 3), (2, 2, 2)), ((1, 3, 2), (0, 0, 1)), ((3, 1, 3), (0, 0, 2))],
)
def test_every_tap_is_a_shifted_read_of_the_packed_volume(
    kernel: tuple[int, int, int], padding: tuple[int, int, int], width: int
) -> None:
    """Written out with a plain vector instead of a kernel: output = sum over taps of the volume read further on."""
    volume = Volume((4, 3, 5), kernel, padding, width)
    x, w = torch.randn(2, 1, *volume.space, dtype=torch.float64), torch.randn(1, 1, *kernel, dtype=torch.float64)
    sample = volume.sample_rows * volume.pitch
    packed = torch.zeros(2 * sample + volume.tail_rows * volume.pitch + 1000, dtype=torch.float64)
    for n in range(2):
        grid = packed[n * sample :][: volume.padded[0] * volume.plane].view(volume.padded)
        grid[padding[0] :, padding[1] :, padding[2] :] = x[n, 0]
    truth = F.conv3d(x, w, padding=padding)
    assert truth.shape[2:] == volume.out
    for n, z, y, at in itertools.product(range(2), *map(range, volume.out)):
        place = n * sample + z * volume.plane + y * volume.pitch + at
        taps = itertools.product(*map(range, kernel))
        total = sum(w[0, 0, i, j, k] * packed[place + i * volume.plane + j * volume.pitch + k] for i, j, k in taps)
        assert abs(float(total - truth[n, 0, z, y, at])) < 1e-12
    assert sample % width == 0
    assert volume.is_dense == (volume.padded[1:] == volume.out[1:])


def test_planes_behind_the_last_output_are_not_computed() -> None:
    volume = Volume((128, 128, 128), (3, 3, 3), (1, 1, 1), 4)
    assert volume.padded == (129, 129, 129)
    assert volume.tiles(128) == -(-128 * 129 * 129 // 512)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("architecture", sorted(CARDS))
def test_tiles_fit_the_shared_memory_of_every_card(architecture: int, precision: str) -> None:
    for chain in (CHAIN_61, BLOCK):
        cin = 64 if chain is CHAIN_61 else 32
        given = problem(chain, (8, cin, 64, 64, 64), device="cuda", precision=precision)
        found = gemm_for(chain, given, card(architecture), even_if_slower=True)
        assert isinstance(found, Gemm)
        columns = found.volume.width * found.block_c
        stage = 2 * found.arithmetic.planes * (found.rows + columns) * found.block_k
        assert stage * found.stages + 1024 <= CARDS[architecture]
        assert columns <= 256
        assert found.volume.span * found.channels % found.block_k == 0


@pytest.mark.parametrize("out", [(22, 30, 30), (5, 7, 100), (1, 1, 1), (128, 128, 128)])
@pytest.mark.parametrize("architecture", sorted(CARDS))
def test_few_channels_get_a_tile_that_fits(architecture: int, out: tuple[int, int, int]) -> None:
    shape = (2, 3, *(size + 2 for size in out))
    found = few_channels_for(CHAIN_23, problem(CHAIN_23, shape, device="cuda"), card(architecture))
    assert isinstance(found, FewChannels)
    geometry = Geometry(3, 24, (3, 3, 3), (0, 0, 0), False, "float32")
    assert shared_bytes(found, geometry) * found.blocks <= CARDS[architecture]
    assert found.height % found.rows == 0
    deep, high, wide = found.tiles(out)
    assert deep * found.depth >= out[0]
    assert high * found.height >= out[1]
    assert wide * 32 >= out[2]


@pytest.mark.parametrize(
    ("chain", "shape", "layout", "reason"),
    [
        (Builder(3, conv(3, (8, 64), stride=2)).norm(8).chain(), (2, 8, 64, 64, 64), "contiguous", "than 16 channels"),
        (
            Builder(3, conv(3, (64, 64), stride=2, padding=3)).norm(8).chain(),
            (2, 64, 64, 64, 64),
            "contiguous",
            "wider",
        ),
        (Builder(3, conv(3, (64, 64), groups=2)).norm(8).chain(), (2, 64, 64, 64, 64), "contiguous", "grouped"),
        (Builder(3, conv(3, (64, 64), dilation=2)).norm(8).chain(), (2, 64, 64, 64, 64), "contiguous", "dilated"),
        (Builder(3, conv(3, (64, 64), 1, padding=1)).norm(8).chain(), (2, 64, 64, 64, 64), "contiguous", "wider"),
        (BLOCK, (1, 32, 8, 8, 8), "contiguous", "too small"),
        (Builder(3, conv(3, (3, 64))).op("relu").norm(8).chain(), (1, 3, 16, 16, 16), "contiguous", "too small"),
    ],
)
def test_pytorch_convolves_with_a_reason(chain: Chain, shape: tuple[int, ...], layout: str, reason: str) -> None:
    found = gemm_for(chain, problem(chain, shape, layout, device="cuda"), CARD)
    assert isinstance(found, str)
    assert reason in found


def test_16_bits_with_many_channels_are_cudnns() -> None:
    chain = Builder(3, conv(3, (256, 256), padding=1)).norm(8).chain()
    given = problem(chain, (2, 256, 64, 64, 64), device="cuda")
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(t, dtype="float16") for t in given.tensors))
    assert gemm_for(chain, given, CARD) == "cuDNN is faster from this many channels on"


@pytest.mark.parametrize(
    ("channels", "neighbours", "shared", "groups"), [((32, 32), 2, 3, 3), ((64, 32), 2, 1, 9), ((64, 128), 1, 3, 9)]
)
def test_the_weights_gradient_fills_the_rows_of_a_product(
    channels: tuple[int, int], neighbours: int, shared: int, groups: int
) -> None:
    gemm = weight_gemm_for(conv(3, channels, padding=1), (64, 64, 64), Arithmetic("float16"), card(90))
    assert (gemm.neighbours, gemm.shared, gemm.groups) == (neighbours, shared, groups)
    assert gemm.rows >= 64  # fewer are no instruction on Hopper
    assert gemm.groups * gemm.splits <= 2 * CARD.threads


def test_a_volume_without_borders_is_one_long_row() -> None:
    turned = conv(3, (64, 128), transposed=True)
    back = volume_for(input_gradient_of(turned, (32, 32, 32)), turned.output_space((32, 32, 32)), 2)
    assert back.is_flat
    assert back.as_one_row().pitch == back.sample_rows * back.pitch == 34**3
    assert not volume_for(turned, (32, 32, 32), 1).is_flat  # the forward pass has a border on every side
    assert not Volume((3, 3, 5), (1, 1, 1), (0, 0, 0), 2).is_flat  # nine rows of five hold no whole number of pairs


def test_both_gradients_read_one_packed_tensor() -> None:
    one = problem(BLOCK, (2, 32, 64, 64, 64), device="cuda", needs_grad=True)
    own = gemm_for(BLOCK, one, card(90))
    assert isinstance(own, Gemm)
    dx, dw = gradient_products(BLOCK, one, own, card(90))
    assert dx is not None
    assert dw is not None
    assert dx.volume == dw.gradient_volume
    assert gradient_products(BLOCK, one, own, card(80)) == (None, None)


@pytest.mark.parametrize("channels", [*itertools.product((3, 16, 32, 72, 128), (16, 24, 32, 64))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_sample_ends_where_both_gradients_think_that_it_does(
    channels: tuple[int, int], dtype: str, transposed: bool
) -> None:
    """Sizes of which rows of two or four positions are no divisors: else the second sample would lie elsewhere."""
    how = conv(3, channels, padding=0 if transposed else 1, transposed=transposed)
    for space in (3, 4, 5):
        for chain in (Builder(3, how).norm(None).chain(), Builder(3, how).op("silu").chain()):
            dx, dw = gradients_of(how, dtype, space, chain)
            if dx is None or dw is None:
                continue
            one, other = dw.gradient_volume, dx.rows if isinstance(dx, Boxes) else dx.volume
            assert (one.sample_rows, one.pitch, one.padding) == (other.sample_rows, other.pitch, other.padding)


def test_a_product_with_longer_rows_lengthens_the_sample() -> None:
    dx, dw = gradients_of(conv(3, (72, 32), padding=1), "float32", 4)
    assert isinstance(dx, Gemm)
    assert dw is not None
    assert dataclasses.replace(dx.volume, group=1).sample_rows != dw.gradient_volume.sample_rows


def gradients_of(
    how: Convolution, dtype: str, space: int = 32, chain: Chain | None = None
) -> tuple[Gemm | Boxes | None, WeightGemm | None]:
    chain = chain or Builder(3, how).op("relu").norm(8).chain()
    given = problem(chain, (16, how.in_channels, space, space, space), device="cuda", needs_grad=True)
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(t, dtype=dtype) for t in given.tensors))
    own = gemm_for(chain, given, card(90), even_if_slower=True)
    assert not isinstance(own, str)
    return gradient_products(chain, given, own, card(90))


def test_the_inputs_gradient_is_read_in_place_where_no_border_lies_in_what_both_products_read() -> None:
    up = conv(3, (64, 128), transposed=True)
    dx, dw = gradients_of(up, "bfloat16")
    assert isinstance(dx, Boxes)
    assert dw is not None
    assert dw.gradient_volume.is_flat
    assert packs_gradient(dx, dw)
    assert (dx.width * dx.block_c, dx.block_h * dx.block_j, dx.volume.out) == (128, 256, (32, 32, 32))
    for other, dtype, space in (
        (dataclasses.replace(up, padding=(1, 1, 1)), "bfloat16", 32),  # a border
        (up, "float32", 32),  # planes with scales
        (conv(3, (32, 128), transposed=True), "bfloat16", 32),  # too few rows of a tile
        (up, "bfloat16", 33),  # 35 positions are no pairs
        (up, "bfloat16", 18),  # boxes of 16 would compute too much
    ):
        assert isinstance(gradients_of(other, dtype, space)[0], Gemm)


def test_the_longer_side_of_a_weights_gradient_is_the_products_columns() -> None:
    for dtype in ("bfloat16", "float32"):
        _, dw = gradients_of(conv(3, (64, 128), transposed=True), dtype)
        assert dw is not None
        assert (dw.turned, dw.rows, dw.columns) == (True, 128, 64)
    _, dw = gradients_of(conv(3, (32, 64), padding=1), "float32")
    assert dw is not None
    assert not dw.turned  # 32 are fewer than the rows of Hopper's instruction


UP_FEW = conv(3, (3, 16), transposed=True, stride=2, padding=1)
# chain, input, taps side by side, columns of a packed position, the packed volume's space
FEW: dict[str, tuple[Chain, tuple[int, ...], tuple[int, int], int, tuple[int, int, int]]] = {
    "8 channels": (
        *(Builder(2, conv(2, (8, 64))).op("relu").chain(), (128, 8, 128, 128)),
        *((1, 3), 32, (1, 128, 126)),
    ),
    "3 channels": (
        *(Builder(3, conv(3, (3, 16))).op("relu").op("mul", 2.0).chain(), (128, 3, 16, 64, 64)),
        *((3, 3), 32, (16, 62, 62)),
    ),
    "8 channels, then a norm": (
        *(Builder(2, conv(2, (8, 32))).op("silu").norm(8).chain(), (128, 8, 256, 256)),
        *((1, 3), 32, (1, 256, 254)),
    ),
    "3 channels, strides": (
        *(Builder(3, UP_FEW).op("silu").norm(4).op("hardswish").chain(), (128, 3, 16, 32, 32)),
        *((1, 1), 16, (16, 32, 32)),
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", FEW)
def test_few_channels_are_ours(name: str, precision: str) -> None:
    chain, shape, taps, columns, space = FEW[name]
    machine = dataclasses.replace(card(90), has_nvrtc=False)  # with it three channels in two planes are stored directly
    plan = lower_for_gpu(chain, problem(chain, shape, device="cuda", precision=precision), machine)
    assert isinstance(plan, Plan), plan
    own = plan.own
    assert isinstance(own, Gemm), plan.reasons
    assert (own.unfolded, own.channels, own.volume.space, own.volume.width) == (taps, columns, space, 1)
    assert (own.phases is not None) == ("strides" in name)
    assert own.shared_bytes <= CARDS[90]
    assert own.depth % own.block_k == 0
    assert ("taps side by side" in plan.describe()[0]) == own.unfolds
    assert plan.launches == 4 + 2 * (len(plan.passes) == 2)  # largest, two packings, the product; combine, finish


STORED: dict[str, tuple[Chain, tuple[int, ...], bool, int]] = {  # and whether infinities are kept, and passes
    "alone": (Builder(3, conv(3, (3, 24))).chain(), (128, 3, 24, 32, 32), True, 1),
    "steps": (Builder(3, conv(3, (3, 16))).op("tanh").chain(), (128, 3, 16, 64, 64), True, 2),
    "softmax": (Builder(3, conv(3, (3, 16))).softmax().chain(), (128, 3, 16, 32, 32), True, 2),
    "norm": (Builder(3, conv(3, (3, 16))).norm(8).op("relu").chain(), (128, 3, 16, 64, 64), False, 3),
    "one channel": (Builder(3, conv(3, (1, 32), padding=1)).norm(None).chain(), (2, 1, 128, 128, 128), False, 3),
}


@pytest.mark.parametrize("name", STORED)
def test_few_channels_in_two_planes_are_stored_by_a_kernel_of_their_own(name: str) -> None:
    chain, shape, keeps, passes = STORED[name]
    plan = lower_for_gpu(chain, problem(chain, shape, device="cuda", precision="fp32"), card(90))
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, StoredFewChannels), plan.reasons
    assert (plan.own.keeps_infinities, len(plan.passes)) == (keeps, passes)
    first = next(call for call in plan.program.forward if not isinstance(call, TorchCall))
    assert isinstance(first, CudaCall)
    assert first.kernel == "few_channels_store"
    assert dict(first.macros)["HAS_BIAS"] == (passes == 1)  # otherwise a later pass adds it
    assert plan.moved_bytes < 5 * plan.value.bytes
    assert "direct" in plan.describe()[0]


@pytest.mark.parametrize(
    "other",
    [
        {"precision": "tf32"},
        {"needs_grad": True},
        {"hands_on": True},
        {"chain": Builder(3, conv(3, (3, 40))).op("tanh").chain()},  # more than one block of channels
        {"chain": Builder(3, conv(3, (3, 16), 4)).op("tanh").chain()},  # only a row's taps lie side by side
        {"chain": Builder(3, conv(3, (2, 16))).op("tanh").chain()},  # infinities beside taps that are not there
        {"shape": (4096, 3, 4, 64, 64)},  # two slices of output, so half of the warps would wait
        {"chain": Builder(2, conv(2, (3, 16))).op("tanh").chain(), "shape": (128, 3, 256, 256)},
        {"chain": Builder(3, conv(3, (3, 16))).op("relu").norm(8).reduce("mean", "sample").chain()},  # only moments
    ],
    ids=str,
)
def test_other_convolutions_of_few_channels_are_not_stored_that_way(other: dict[str, Any]) -> None:
    chain, shape, _, _ = STORED["steps"]
    chain, shape = other.pop("chain", chain), other.pop("shape", shape)
    shape = (shape[0], chain.convolution.in_channels, *shape[2:])
    asked = dataclasses.replace(problem(chain, shape, device="cuda", precision="fp32"), **other)
    plan = lower_for_gpu(chain, asked, card(90), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert not isinstance(plan.own, StoredFewChannels)


def test_without_nvrtc_few_channels_are_unfolded() -> None:
    chain, shape, _, _ = STORED["steps"]
    machine = dataclasses.replace(card(90), has_nvrtc=False)
    plan = lower_for_gpu(chain, problem(chain, shape, device="cuda", precision="fp32"), machine)
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, Gemm)
    assert plan.own.unfolds


@pytest.mark.parametrize("architecture", sorted(CARDS))
def test_products_of_few_channels_fit_every_card(architecture: int) -> None:
    for how in (conv(2, (8, 64)), conv(3, (3, 16)), conv(2, (1, 300), 5), conv(3, (10, 128))):
        for arithmetic in (Arithmetic("float16", 2, scaled=True), Arithmetic("bfloat16"), Arithmetic("float64")):
            own = unfolded_product_for(how, (64,) * how.dims, arithmetic, card(architecture))
            assert own is not None
            assert own.shared_bytes <= CARDS[architecture]
            assert own.channels % own.block_k == 0


@pytest.mark.parametrize(
    ("how", "taps"),
    [
        (conv(2, (3, 8)), (3, 3)),
        (conv(2, (1, 8), 5), (5, 5)),
        (conv(2, (4, 8)), (1, 3)),
        (conv(2, (10, 8)), (1, 3)),
        (conv(2, (11, 8)), None),  # 33 columns
        (conv(2, (3, 8), 1), None),
        (dataclasses.replace(conv(2, (8, 8)), kernel=(4, 1)), (4, 1)),
        (dataclasses.replace(conv(3, (8, 8)), kernel=(3, 1, 1)), None),  # taps in depth are shifted reads
    ],
    ids=str,
)
def test_taps_lie_side_by_side_where_they_fill_a_step(how: Convolution, taps: tuple[int, int] | None) -> None:
    found = unfolded_product_for(how, (16,) * how.dims, Arithmetic("float16"), card(90))
    assert (None if found is None else found.unfolded) == taps


@st.composite
def few(draw: st.DrawFn) -> tuple[Convolution, tuple[int, ...]]:
    dims, transposed = draw(st.sampled_from([2, 3])), draw(st.booleans())
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    padding = tuple(draw(st.integers(0, size - 1)) for size in kernel)
    space = tuple(draw(st.integers(1, 9)) for _ in range(dims))
    ones, zeros = (1,) * dims, (0,) * dims
    how = Convolution(transposed, draw(st.integers(1, 8)), 4, kernel, ones, padding, ones, zeros)
    assume(unsupported(how) is None and min(how.output_space(space)) > 0)
    return how, space


@settings(max_examples=300, deadline=None)
@given(few())
def test_an_unfolded_volume_has_the_convolutions_outputs(drawn: tuple[Convolution, tuple[int, ...]]) -> None:
    how, space = drawn
    found = unfolded_product_for(how, space, Arithmetic("float16", 2, scaled=True), card(90))
    assume(found is not None)
    assert found is not None
    ones = (1,) * (3 - how.dims)
    assert found.volume.out == (*ones, *how.output_space(space))
    assert found.volume == unfolded_volume(how, space, found.unfolded)
    assert found.depth * found.arithmetic.planes >= 2 * how.in_channels * torch.Size(how.kernel).numel()
    for axis, (taps, size) in enumerate(zip(found.unfolded, how.kernel[-2:]), 1):
        assert found.volume.kernel[axis] == (size if taps == 1 else 1)
        assert taps == 1 or found.volume.padding[axis] == 0
