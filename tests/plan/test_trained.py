"""What training covers, keeps and leaves to PyTorch, decided without a card."""

from __future__ import annotations

import pytest

from cases import Builder, conv
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Chain, Value
from postlude.plan import Plan, Refusal, lower
from postlude.plan.gemm import Gemm
from postlude.plan.passes import KeepMoments, Store
from postlude.plan.trained import trained_part

SHAPE = (64, 64, 128, 128)
WIDE = conv(2, (64, 128))


def planned(chain: Chain, shape: tuple[int, ...] = SHAPE, precision: str = "tf32", **changes: object) -> Plan | Refusal:
    given = {"precision": precision, "allows_tf32": precision == "tf32", "needs_grad": True, **changes}
    return lower(chain, problem(chain, shape, device="cuda", **given), card(90))


def plan_of(chain: Chain, shape: tuple[int, ...] = SHAPE, precision: str = "tf32", **changes: object) -> Plan:
    plan = planned(chain, shape, precision, **changes)
    assert isinstance(plan, Plan), plan
    return plan


def covered(chain: Chain) -> Chain:
    return trained_part(chain, problem(chain, SHAPE, device="cuda", needs_grad=True))


@pytest.mark.parametrize("size", [2, 3])
def test_a_pool_is_covered_whether_its_windows_overlap_or_not(size: int) -> None:
    chain = Builder(2, WIDE).norm(8).op("relu").pool("max", size, 2).chain()
    assert covered(chain) is chain


def test_a_norm_and_what_follows_it_is_covered_up_to_the_next_barrier() -> None:
    start = Builder(2, WIDE).op("silu").norm(8).op("relu")
    whole = start.chain()
    assert covered(whole) is whole
    assert covered(start.reduce("mean", "space").chain()) == whole
    twice = Builder(2, WIDE).norm(8).op("relu").norm(8).chain()
    assert len(covered(twice).steps) == 2


def test_moments_cover_a_norm_directly_after_the_convolution() -> None:
    chain = Builder(2, WIDE).norm(8).reduce("mean", "space").chain()
    assert covered(chain) is chain
    before = Builder(2, WIDE).op("relu").norm(8).reduce("mean", "space").chain()
    assert len(covered(before).steps) == 2


def test_what_reads_a_value_from_inside_is_not_cut_off() -> None:
    chain = Builder(2, WIDE).norm(8).op("relu").norm(8).op("add", Value(1)).chain()
    assert covered(chain) is chain
    assert isinstance(planned(chain), Refusal)


def test_moments_are_taken_of_a_value_that_is_kept_unless_memory_is_to_be_saved() -> None:
    chain = Builder(3, conv(3, (64, 128), 5)).norm(8).reduce("mean", "space").chain()
    kept, lean = (plan_of(chain, (16, 64, 16, 32, 32), memory=memory) for memory in ("default", "lean"))
    assert kept.passes[0].sink == KeepMoments(True, stores=True)
    assert lean.passes[0].sink == KeepMoments(True)
    assert (kept.slab, kept.slabs) == (16, 1)
    assert 0 < lean.gradients.samples_again < 16
    assert kept.slab_bytes > 0 == lean.slab_bytes
    inference = plan_of(chain, (16, 64, 16, 32, 32), needs_grad=False)
    assert inference.passes[0].sink == KeepMoments(True)
    assert kept.moved_bytes > inference.moved_bytes


@pytest.mark.parametrize("word", ["relu", "tanh", "sigmoid"])
def test_the_result_is_all_that_is_kept_where_it_tells_enough(word: str) -> None:
    plan = plan_of(Builder(2, WIDE).op("add", "full").op(word).chain())
    assert plan.gradients.from_result
    assert len(plan.passes) == 1
    last = plan_of(Builder(2, WIDE).op(word).op("mul", 2.0).chain())
    assert not last.gradients.from_result
    assert [item.sink for item in last.passes] == [Store(raw=True), Store()]


def test_where_pytorch_keeps_nothing_inside_nothing_is_kept_either() -> None:
    chain = Builder(2, WIDE).op("mul", "channel").op("relu").chain()
    assert "PyTorch saves only the chain's" in str(planned(chain))
    assert plan_of(chain, memory="lean").gradients.is_lean


def test_gradients_come_with_our_convolution() -> None:
    chain = Builder(2, conv(2, (64, 64))).op("leaky_relu", slope=0.1).op("mul", 2.0).chain()
    plan = plan_of(chain, (64, 64, 256, 256))
    assert isinstance(plan.own, Gemm)
    assert isinstance(plan.gradients.of_input, Gemm)
    assert plan.gradients.of_weight is not None
    assert plan.gradients.largest_found == plan.gradients.of_input.arithmetic
    assert plan.gradients.of_input.volume.width == 1  # an infinity stays in its place


@pytest.mark.parametrize(("precision", "is_ours"), [("tf32", False), ("fp32", True)])
def test_one_tap_without_a_norm_is_pytorchs_where_its_operands_are_one_plane(precision: str, is_ours: bool) -> None:
    chain = Builder(2, conv(2, (64, 64), 1)).op("silu").op("mul", 2.0).chain()
    plan = plan_of(chain, (64, 64, 256, 256), precision)
    assert (plan.own is not None) == is_ours
    three = Builder(2, conv(2, (64, 64), 3)).op("silu").op("mul", 2.0).chain()
    assert plan_of(three, (64, 64, 256, 256), precision).own is not None
