"""Plans of the convolution that reads its input in place by TMA boxes: when it is used, and its tiles."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cases import CHAIN_61, Builder, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Chain
from postlude.plan.barriers import norm_hides_infinities
from postlude.plan.boxes import Boxes, boxes_for
from postlude.plan.convolve import gemm_for, gradient_products
from postlude.plan.gemm import Arithmetic, Gemm
from postlude.plan.problem import Problem

SHARED = 227 << 10  # of an H200's multiprocessor


def block(cin: int, cout: int, kernel: int = 3) -> Chain:
    return Builder(3, conv(3, (cin, cout), kernel, padding=kernel // 2)).norm(None).chain()


def given(chain: Chain, shape: tuple[int, ...], layout: str = "channels_last") -> Problem:
    found = problem(chain, shape, layout, device="cuda")
    return dataclasses.replace(found, tensors=tuple(dataclasses.replace(t, dtype="float16") for t in found.tensors))


@pytest.mark.parametrize(
    ("channels", "space", "tile"),
    [
        # the best of those measured: neighbours, rows and columns of a box, channels, steps
        ((32, 32), (128, 128, 128), (2, 16, 16, 32, 32)),
        ((32, 32), (160, 160, 160), (2, 16, 16, 32, 32)),
        ((32, 64), (64, 64, 64), (1, 16, 16, 64, 32)),
        ((64, 64), (64, 64, 64), (2, 8, 16, 64, 64)),
        ((128, 128), (32, 32, 32), (1, 8, 16, 128, 64)),
    ],
)
def test_tiles_are_those_that_were_measured(
    channels: tuple[int, int], space: tuple[int, ...], tile: tuple[int, ...]
) -> None:
    own = gemm_for(block(*channels), given(block(*channels), (2, channels[0], *space)), card(90), True)
    assert isinstance(own, Boxes)
    assert (own.width, own.block_h, own.block_j, own.block_c, own.block_k) == tile
    stage = 2 * own.block_k * (own.width * own.block_c + own.block_h * own.block_j)
    assert own.stages * stage <= SHARED // 2  # two blocks an SM hide each other's epilogue
    assert not own.packs


@pytest.mark.parametrize("out", [(30, 30), (128, 128), (20, 96), (7, 200), (42, 42), (170, 170)])
def test_a_box_computes_little_for_nothing(out: tuple[int, int]) -> None:
    chain = block(64, 128)
    found = boxes_for(chain, given(chain, (2, 64, 8, *out)), Arithmetic("float16"), card(90))
    if found is not None:
        deep, high, wide = found.tiles
        assert deep == 8
        assert high * found.block_h >= out[0]
        assert wide * found.block_j >= out[1]
        computed = deep * high * wide * found.block_h * found.block_j
        assert computed <= 1.1 * 8 * math.prod(out)


@pytest.mark.parametrize(
    ("chain", "shape"),
    [
        (block(32, 32), (2, 32, 16, 64, 63)),  # an odd row has no pairs of neighbours
        (CHAIN_61, (16, 64, 32, 32, 32)),  # 34 outputs: a third of every box would be wasted
        (block(256, 256), (2, 256, 32, 32, 32)),  # cuDNN is faster
        (Builder(3, conv(3, (32, 32), padding=1)).op("tanh").norm(4).chain(), (2, 32, 64, 64, 64)),  # infinities
    ],
)
def test_elsewhere_it_does_not_serve(chain: Chain, shape: tuple[int, ...]) -> None:
    assert boxes_for(chain, given(chain, shape), Arithmetic("float16"), card(90)) is None
    assert boxes_for(block(32, 32), given(block(32, 32), (2, 32, 64, 64, 64)), Arithmetic("float16"), card(80)) is None


def test_contiguous_inputs_and_odd_channels_are_brought_into_rows_first() -> None:
    contiguous = boxes_for(
        block(32, 32), given(block(32, 32), (2, 32, 64, 64, 64), "contiguous"), Arithmetic("float16"), card(90)
    )
    odd = boxes_for(block(40, 64), given(block(40, 64), (2, 40, 64, 64, 64)), Arithmetic("float16"), card(90))
    assert contiguous is not None
    assert contiguous.packs
    assert odd is not None
    assert odd.packs
    assert odd.channels == 48


def test_gradients_of_many_channels_are_cudnns() -> None:
    chain = block(128, 128)
    own = gemm_for(chain, dataclasses.replace(given(chain, (2, 128, 64, 64, 64)), needs_grad=True), card(90))
    assert isinstance(own, Boxes)
    assert gradient_products(chain, given(chain, (2, 128, 64, 64, 64)), own, card(90)) == (None, None)


def test_a_small_result_of_many_channels_is_cudnns() -> None:
    chain = block(128, 128)
    assert isinstance(gemm_for(chain, given(chain, (2, 128, 64, 64, 64)), card(90)), Boxes)
    found = gemm_for(chain, given(chain, (2, 128, 32, 32, 32)), card(90))
    assert isinstance(found, str)
    assert "reading so small a result again" in found


def test_an_infinity_is_hidden_only_where_it_reaches_the_norm() -> None:
    def hides(*words: str) -> bool:
        chain = Builder(3, conv(3, (32, 32)))
        for word in words:
            chain = (
                chain.norm(4) if word == "norm" else chain.op(word, **({"bound": 6.0} if word == "clamp_max" else {}))
            )
        return norm_hides_infinities(chain.chain())

    assert hides("norm")
    assert hides("relu", "norm")
    assert not hides("tanh", "norm")
    assert not hides("relu", "clamp_max", "norm")
    assert not hides("relu")
    lost = Builder(3, conv(3, (64, 64), padding=1)).op("sigmoid").norm(8).chain()
    own = gemm_for(lost, problem(lost, (8, 64, 64, 64, 64), device="cuda", precision="tf32"), card(90), True)
    assert isinstance(own, Gemm)
    assert own.arithmetic.keeps_infinities
    assert own.volume.width == 1
