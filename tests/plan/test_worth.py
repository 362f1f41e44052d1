"""Whether our convolution is expected to win, and where moments are cheaper in a pass of their own."""

from __future__ import annotations

import pytest

from cases import CHAIN_61, Builder, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude import cards
from postlude.chain import Chain
from postlude.plan import Plan, worth
from postlude.plan.convolve import gemm_for
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.passes import KeepMoments, Store
from tracing import storing_raw

FEW = Builder(2, conv(2, (3, 16))).op("relu").norm(4).chain()
MANY = Builder(2, conv(2, (16, 16), 1)).op("relu").norm(4).chain()
FLAT = Builder(2, conv(2, (64, 128))).norm(None).op("div", 2.0).chain()
MISH = Builder(2, conv(2, (64, 128))).op("mish").norm(8).chain()


def found(chain: Chain, shape: tuple[int, ...], precision: str = "tf32", architecture: int = 90) -> Gemm | str:
    own = gemm_for(chain, problem(chain, shape, device="cuda", precision=precision), card(architecture))
    assert isinstance(own, (Gemm, str))
    return own


def test_few_channels_are_judged_by_bytes() -> None:
    """7 GFLOP are too few in TF32; a result of 0.5 GB is worth it, one of 32 MiB just so, and less is not."""
    assert isinstance(found(FEW, (128, 3, 256, 256)), Gemm)
    assert isinstance(found(FEW, (8, 3, 258, 258)), Gemm)
    assert found(FEW, (8, 3, 257, 257)) == "the convolution is too small for packing its operands to pay"


def test_more_channels_by_operations() -> None:
    assert found(MANY, (128, 16, 256, 256)) == "the convolution is too small for packing its operands to pay"


def test_cudnns_products_with_zeros_are_charged_to_it() -> None:
    """In TF32, where its tensor cores take 16 channels at a time."""
    chain = Builder(2, conv(2, (8, 64))).op("relu").chain()
    given = problem(chain, (128, 8, 128, 128), device="cuda", precision="tf32")
    own = gemm_for(chain, given, card(90))
    assert isinstance(own, Gemm)
    _, theirs = worth._seconds(chain, given, cards.H200, own)
    wide = Builder(2, conv(2, (16, 64))).op("relu").chain()
    more = problem(wide, (128, 16, 128, 128), device="cuda", precision="tf32")
    assert theirs == pytest.approx(worth._seconds(wide, more, cards.H200, own)[1], rel=0.05)


@pytest.mark.parametrize(
    ("words", "precision", "architecture", "is_halved"),
    [
        (("gelu", "norm"), "tf32", 90, True),
        (("mish", "norm"), "tf32", 90, True),
        (("relu", "norm"), "tf32", 90, False),
        (("norm", "gelu"), "tf32", 90, False),  # in the last pass
        (("gelu",), "tf32", 90, False),  # no moments beside it
        (("gelu", "norm"), "fp32", 90, False),
        (("gelu", "norm"), "tf32", 80, False),
    ],
)
def test_long_words_before_a_norm_get_room(
    words: tuple[str, ...], precision: str, architecture: int, is_halved: bool
) -> None:
    built, shape = Builder(3, conv(3, (64, 128))), (16, 64, 32, 32, 32)
    for word in words:
        built = built.norm(8) if word == "norm" else built.op(word, **{"approximate": "none"} if word == "gelu" else {})
    own = found(built.chain(), shape, precision, architecture)
    plain = found(Builder(3, conv(3, (64, 128))).op("relu").chain(), shape, precision, architecture)
    assert isinstance(own, Gemm)
    assert isinstance(plain, Gemm)
    assert own.rows == (plain.rows // 2 if is_halved else plain.rows)


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
    assert middle.sink == KeepMoments(True)
    assert middle.first == last.first == plan.resumes_at
    assert plan.launches == 7  # largest, pack, pack, convolve, moments, combine, normalise
    raw = storing_raw(plan)
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
    assert isinstance(first.sink, KeepMoments)
    assert last.sink == Store()
