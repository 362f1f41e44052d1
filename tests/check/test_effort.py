"""What a verdict costs, and shapes that are affordable."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cases import CHAIN_61, Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check.effort import Budget, affordable_shape, convolution_flops, verdict_flops
from postlude.check.points import chain_points, tensors_for
from postlude.check.verify import verify_chain

BUDGET = Budget(1e12, 1 << 25)
BLOCK = Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()
SMALL: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "transposed": (Builder(2, conv(2, (4, 6), transposed=True, stride=2)).op("relu").chain(), (2, 4, 5, 7)),
    "grouped": (Builder(2, conv(2, (4, 8), groups=2)).op("relu").chain(), (3, 4, 9, 7)),
    "linear": (Builder(0, conv(0, (4, 8))).op("relu").chain(), (3, 4)),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_convolutions_work_is_what_pytorch_counts(name: str) -> None:
    chain, shape = SMALL[name]
    with FlopCounterMode(display=False) as counter:
        reference.evaluate(chain, tensors_for(chain, shape, torch.float64))
    assert convolution_flops(chain, shape) == counter.get_total_flops()


def test_of_a_linear_layer_there_are_fewer_samples_and_no_less() -> None:
    chain = Builder(0, conv(0, (8192, 8192))).batch_norm().chain()
    assert affordable_shape(chain, (1024, 8192), 11, Budget(1e11, 1 << 25), backward=False) == (32, 8192)
    assert affordable_shape(chain, (1024, 8192), 11, Budget(1e6, 1 << 25), backward=False) == (2, 8192)


@pytest.mark.parametrize(("precision", "backward"), [("fp32", False), ("fp32", True), ("tf32", True)])
def test_a_verdicts_work_is_what_it_takes(precision: str, backward: bool) -> None:
    chain = Builder(2, conv(2, (4, 6))).op("silu").norm(2).chain()
    shape = (2, 4, 6, 6)
    points = list(chain_points(chain, shape))
    with FlopCounterMode(display=False) as counter:
        verify_chain(lambda _, tensors: reference.evaluate(chain, tensors), chain, points, precision, backward=backward)
    each, passes = convolution_flops(chain, shape), 3 if backward else 1
    singles = each * (passes * (2 * len(points) + 1) + 4)  # the candidate and PyTorch, in float32
    expected = verdict_flops(chain, shape, len(points), backward=backward)
    assert counter.get_total_flops() - singles == pytest.approx(expected)


@pytest.mark.parametrize(("chain", "shape"), [(CHAIN_61, (16, 64, 32, 32, 32)), (BLOCK, (2, 32, 128, 128, 128))])
def test_a_large_shape_is_cut_until_it_is_affordable(chain: Chain, shape: tuple[int, ...]) -> None:
    small = affordable_shape(chain, shape, 11, BUDGET, backward=True)
    assert verdict_flops(chain, small, 11, backward=True) <= BUDGET.flops
    assert all(new <= old for new, old in zip(small, shape, strict=True))
    assert math.prod(small) > math.prod(shape) / 64
    assert small[0] == 2
    assert affordable_shape(chain, small, 11, BUDGET, backward=True) == small


def test_what_cannot_be_cut_stays() -> None:
    wide = Builder(2, conv(2, (20_000, 20_000))).op("relu").chain()
    assert affordable_shape(wide, (1, 20_000, 9, 9), 11, BUDGET, backward=True) == (1, 20_000, 8, 8)
