"""Which pools the last pass takes in, what is planned where it does not, and in which tiles."""

from __future__ import annotations

import pytest

from cases import Builder, conv
from level2 import POOLED
from plan.test_channels import planned
from plan.test_lower import problem
from postlude.chain import Chain, Value
from postlude.hardware import Machine
from postlude.plan import Plan, Refusal, lower
from postlude.plan.barriers import fused_pool, last_fused_step
from postlude.plan.passes import Store
from postlude.plan.pools import pool_tile
from postlude.plan.problem import result_shape
from postlude.plan.program import KernelCall
from postlude.windows import Windows

SHAPE = (32, 16, 64, 64)


def block(outputs: int = 64) -> Builder:
    return Builder(2, conv(2, (16, outputs), padding=1)).norm(16).op("relu")


def test_the_value_is_read_once_and_the_pooled_one_written() -> None:
    chain = block().pool("max", 2).op("clamp", low=0.0, high=1.0).chain()
    plan, longer = planned(chain, SHAPE), planned(block().chain(), SHAPE)
    assert isinstance(plan, Plan)
    assert isinstance(longer, Plan)
    assert plan.describe()[-1] == "pass 2: value in memory → group_norm(16) → relu → max_pool(2) → clamp(0, 1) → store"
    assert plan.launches == longer.launches
    assert longer.moved_bytes - plan.moved_bytes == plan.value.bytes * 3 // 4
    assert not any("last pass" in line for line in plan.tiles)


@pytest.mark.parametrize("name", POOLED)
def test_nothing_of_the_values_size_is_written_after_the_convolution(name: str) -> None:
    chain, shape = POOLED[name]
    plan = planned(
        chain, shape, **({"convolution": "pytorch"} if name in ("50", "65") else {})
    )  # else part of a weight
    assert isinstance(plan, Plan)
    assert plan.pool is not None
    (call,) = (one for one in plan.program.forward if isinstance(one, KernelCall) and one.kernel == "pools_kernel")
    given = dict(zip(call.parameters, call.arguments))
    assert given["p_y"].bytes * plan.pool.pool.windows.taps <= plan.value.bytes  # type: ignore[union-attr]


def test_result_shapes_are_pytorchs() -> None:
    for op, sizes, ceil, expected in (
        ("max", (2,), False, (4, 5, 3, 3)),
        ("avg", (3, 2, 1), False, (4, 5, 3, 3)),
        ("max", (3, 2), True, (4, 5, 3, 3)),
        ("max", (2, 3), True, (4, 5, 2, 2)),
    ):
        chain = Builder(2, conv(2, (3, 5))).pool(op, *sizes, ceil=ceil).chain()
        assert result_shape(chain, problem(chain, (4, 3, 8, 8))) == expected


def test_a_convolution_without_a_norm_is_stored_as_it_is() -> None:
    chain = Builder(2, conv(2, (64, 64))).op("relu").pool("max", 2).op("tanh").chain()
    plan = planned(chain, (64, 64, 64, 64))
    assert isinstance(plan, Plan)
    assert [(item.source, item.first, item.last, item.sink) for item in plan.passes] == [
        ("own convolution", 1, 0, Store(raw=True)),
        ("load", 1, 3, Store()),
    ]


def test_pools_that_are_one_are_one() -> None:
    chain = block().pool("max", 2).pool("max", 3).op("tanh").chain()
    pool = fused_pool(chain)
    assert pool is not None
    assert (pool.first, pool.last, str(pool.pool)) == (3, 4, "max_pool(6)")
    assert last_fused_step(chain) == 5
    for other in (block().pool("max", 2).pool("avg", 2), block().pool("max", 2).pool("max", 2, 2, 1)):
        pool = fused_pool(other.chain())
        assert pool is not None
        assert (pool.first, pool.last) == (3, 3)
        assert last_fused_step(other.chain()) == 3


LEFT = {
    "it follows another pool": (lambda: block().pool("max", 2).op("tanh"), lambda b: b.pool("avg", 2)),
    "the tiles of a layer_norm": (lambda: Builder(2, conv(2, (16, 32))).layer_norm(), lambda b: b.pool("max", 2)),
    "it follows a second norm": (lambda: block().norm(4), lambda b: b.pool("max", 2)),
}  # fmt: skip


@pytest.mark.parametrize("reason", LEFT)
def test_what_it_does_not_take_in_is_pytorchs_after_the_same_passes(reason: str) -> None:
    start, more = LEFT[reason]
    plan, shorter = planned(more(start()).chain(), SHAPE), planned(start().chain(), SHAPE)
    assert isinstance(plan, Plan)
    assert isinstance(shorter, Plan)
    assert plan.passes == shorter.passes
    assert any(reason in line for line in plan.reasons), plan.reasons


def test_tensors_after_a_pool_that_no_pass_takes_are_pytorchs() -> None:
    chain = block().op("mul", "channel").op("add", "channel").pool("max", 2).op("mul", "channel").op("add", "channel")
    assert last_fused_step(chain.chain()) == 6
    plan = planned(chain.chain(), SHAPE)
    assert isinstance(plan, Plan)


def test_in_training_the_plan_ends_with_the_pool() -> None:
    chain = block().pool("max", 2).op("tanh").chain()
    plan = planned(chain, SHAPE, needs_grad=True)
    assert isinstance(plan, Plan)
    assert plan.trains
    assert plan.chain.steps == chain.steps[:3]
    assert plan.reasons[-1] == "tanh: PyTorch's, with its gradients"
    # Two tensors of a pool's gradient are too many beside five of the steps': then the pool is PyTorch's as well.
    many = block().op("mul", "row").op("add", "full").pool("max", 2).chain()
    plan = planned(many, SHAPE, needs_grad=True)
    assert isinstance(plan, Plan)
    assert plan.chain.steps == many.steps[:4]


def test_a_training_step_keeps_a_byte_for_each_window() -> None:
    plan = planned(block().pool("max", 2).chain(), SHAPE, needs_grad=True)
    assert isinstance(plan, Plan)
    (taps,) = (buffer for buffer in plan.program.kept if buffer.dtype == "uint8")
    assert taps.shape == (32, 64, 32, 32)
    calls = [call for call in plan.program.backward if isinstance(call, KernelCall) and "p_g" in call.parameters]
    assert calls
    assert all(call.parameters.index("p_g") in call.unread for call in calls)  # nothing of the value's size but it


def test_on_a_cpu_they_are_pytorchs() -> None:
    chain = block().pool("max", 2).chain()
    cpu = Machine("cpu", 2, 32 << 20, has_triton=True, has_onednn=True)
    outcome = lower(chain, problem(chain, SHAPE), cpu, even_if_slower=True)
    assert outcome == Refusal(("PyTorch runs pools, softmax and norms over channels on a CPU",))


def test_a_window_larger_than_the_value_is_pytorchs_error() -> None:
    chain = block().pool("max", 8).chain()
    outcome = planned(chain, (2, 16, 6, 6))
    assert isinstance(outcome, Refusal)
    assert "larger than what it goes over" in str(outcome)


@pytest.mark.parametrize("channels", [1, 3, 64, 100])
@pytest.mark.parametrize("windows", [1, 17, 63 * 63])
def test_tiles_are_bounded(channels: int, windows: int) -> None:
    for is_last in (False, True):
        tile = pool_tile(channels, windows, is_last)
        assert tile.block * max(1, tile.block_c) <= 512
        assert tile.block & (tile.block - 1) == tile.block_c & (tile.block_c - 1) == 0


def test_what_is_no_chain() -> None:
    for builder, mistake in (
        (block().pool("max", 2).op("add", Value(2)), "from before"),
        (block().pool("max", 2).op("add", "full"), "more than one number per channel"),
    ):
        with pytest.raises(ValueError, match=mistake):
            builder.chain()
    with pytest.raises(ValueError, match="unknown pool"):
        Builder(3).norm(2).pool("max", (2, 2)).chain()
    chain = block().pool("max", 2).op("mul", 2.0).chain()
    assert Chain.loads(chain.dumps()) == chain


def test_borders() -> None:
    whole, padded = Windows((2, 2), (2, 2), (0, 0)), Windows((2, 2), (2, 2), (1, 1))
    assert not whole.has_border((5, 4))
    assert padded.has_border((5, 4))
    assert Windows((2, 2), (2, 2), (0, 0), is_ceil=True).has_border((5, 4))
    assert not Windows((2, 2), (2, 2), (0, 0), is_ceil=True).has_border((6, 4))
