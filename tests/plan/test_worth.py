"""Whether our convolution pays, and where moments are cheaper in a pass of their own."""

from __future__ import annotations

import pytest

from cases import CHAIN_61, Builder, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Chain
from postlude.plan import Plan
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.types import Moments, Store

FLAT = Builder(2, conv(2, (64, 128))).norm(None).op("div", 2.0).chain()
MISH = Builder(2, conv(2, (64, 128))).op("mish").norm(8).chain()


def planned(chain: Chain, shape: tuple[int, ...], precision: str, trains: bool = False) -> Plan:
    asked = problem(chain, shape, device="cuda", precision=precision, needs_grad=trains, allows_tf32=True)
    plan = lower_for_gpu(chain, asked, card(90), even_if_slower=True)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("chain", [FLAT, MISH], ids=str)
def test_short_wide_products_leave_the_moments_to_a_pass(chain: Chain) -> None:
    plan = planned(chain, (128, 64, 128, 128), "tf32")
    first, middle, last = plan.passes
    assert first.sink == last.sink == Store()
    assert middle.sink == Moments(True)
    assert middle.first == last.first == plan.resumes_at
    assert plan.launches == 7  # largest, pack, pack, convolve, moments, combine, normalise
    raw = plan.storing_raw()
    assert [item.first for item in raw.passes] == [1, 1]
    assert raw.launches == 6


@pytest.mark.parametrize(
    ("chain", "shape", "precision", "trains"),
    [
        (CHAIN_61, (16, 64, 32, 32, 32), "tf32", False),  # 27 steps hide what the moments take
        (FLAT, (128, 64, 128, 128), "fp32", False),  # three products for each
        (FLAT, (128, 64, 128, 128), "tf32", True),  # a backward pass reads the convolution's result as it was
    ],
)
def test_others_make_them_in_the_product(chain: Chain, shape: tuple[int, ...], precision: str, trains: bool) -> None:
    first, last = planned(chain, shape, precision, trains).passes
    assert isinstance(first.sink, Moments)
    assert last.sink == Store()
