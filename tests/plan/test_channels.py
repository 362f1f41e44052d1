"""Which reductions over channels the last pass takes in, and what is planned where it does not."""

from __future__ import annotations

import pytest

from cases import Builder, conv
from level2 import OVER_CHANNELS, SOFTMAXED
from plan.test_convolve import card
from plan.test_lower import problem
from postlude.chain import Chain
from postlude.plan import KeepMoments, Plan, Refusal, lower
from postlude.plan.channels import MOST_CHANNELS, channels_tile
from postlude.plan.passes import Store
from postlude.plan.problem import result_shape


def planned(chain: Chain, shape: tuple[int, ...], **changes: object) -> Plan | Refusal:
    given = problem(chain, shape, device="cuda", **{"precision": "fp32", **changes})
    return lower(chain, given, card(90), even_if_slower=True)


SHAPE = (32, 8, 64, 64)


def soft(outputs: int = 64, inputs: int = 8) -> Builder:
    return Builder(2, conv(2, (inputs, outputs))).norm(16).op("tanh").reduce("logsumexp", "channels", True)


def test_the_last_pass_reads_the_value_once_and_writes_a_part_of_it() -> None:
    chain, shape = soft().chain(), (128, 8, 128, 128)
    plan = planned(chain, shape)
    assert isinstance(plan, Plan)
    assert plan.describe()[-1] == "pass 2: value in memory → group_norm(16) → tanh → logsumexp over channels → store"
    assert (plan.launches, plan.channels_end) == (6, chain.steps[-1])
    assert plan.result_layout == "contiguous"
    assert not any("last pass" in line for line in plan.tiles)
    longer = planned(Builder(2, conv(2, (8, 64))).norm(16).op("tanh").chain(), shape)
    assert isinstance(longer, Plan)
    assert longer.moved_bytes - plan.moved_bytes == plan.value.bytes * 63 // 64


def test_result_shapes() -> None:
    for keepdim, shape in ((False, (4, 6, 6)), (True, (4, 1, 6, 6))):
        chain = Builder(2, conv(2, (3, 5))).reduce("amax", "channels", keepdim).chain()
        assert result_shape(chain, problem(chain, (4, 3, 8, 8))) == shape


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_convolution_without_a_norm_is_stored_as_it_is(layout: str) -> None:
    chain = Builder(2, conv(2, (64, 64))).op("relu").reduce("max", "channels").chain()
    plan = planned(chain, (64, 64, 64, 64), layout=layout)
    assert isinstance(plan, Plan)
    assert plan.own is not None
    assert [(item.source, item.first, item.last, item.sink) for item in plan.passes] == [
        ("own convolution", 1, 0, Store(raw=True)),
        ("load", 1, 2, Store()),
    ]
    assert (plan.resumes_at, plan.value.layout, plan.result_layout) == (0, layout, "contiguous")
    alone = planned(Builder(2).reduce("amin", "channels").chain(), (64, 64, 64, 64))
    assert isinstance(alone, Plan)
    assert (len(alone.passes), alone.launches) == (1, 1)


def test_before_the_same_pass_our_convolution_must_win_alone() -> None:
    """A step after it is free in ours and a pass after PyTorch's; the reduction is a pass after either."""
    conv2d, shape = conv(2, (8, 64)), (128, 8, 128, 128)
    for chain, is_ours in (
        (Builder(2, conv2d).op("relu").chain(), True),
        (Builder(2, conv2d).op("relu").reduce("amax", "channels").chain(), False),
    ):
        plan = lower(chain, problem(chain, shape, device="cuda", precision="tf32", allows_tf32=True), card(90))
        assert isinstance(plan, Plan)
        assert (plan.own is not None) == is_ours, plan.reasons


LEFT = {
    f"more than {MOST_CHANNELS} channels": lambda: Builder(2, conv(2, (8, 528))).norm(16).op("relu"),
    "the tiles of a layer_norm": lambda: Builder(2, conv(2, (8, 32))).layer_norm().op("relu"),
    "a second norm": lambda: Builder(2, conv(2, (8, 32))).norm(4).op("relu").norm(2),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_it_does_not_take_in_is_pytorchs_after_the_same_passes(reason: str) -> None:
    chain, shape = LEFT[reason]().reduce("amax", "channels").chain(), (32, 8, 64, 64)
    plan, shorter = planned(chain, shape), planned(LEFT[reason]().chain(), shape)
    assert isinstance(plan, Plan)
    assert isinstance(shorter, Plan)
    assert plan.channels_end is None
    assert plan.passes == shorter.passes
    assert any(reason in line for line in plan.reasons), plan.reasons


@pytest.mark.parametrize("name", [*OVER_CHANNELS, *SOFTMAXED])
def test_in_training_the_plan_has_all_of_it(name: str) -> None:
    chain, shape = (OVER_CHANNELS | SOFTMAXED)[name]
    plan = planned(chain, shape, needs_grad=True)
    assert isinstance(plan, Plan)
    assert plan.trains
    assert plan.chain == chain
    assert not plan.gradients.are_packed
    assert plan.passes[-1].last == len(chain.steps)


def test_what_the_gradient_passes_cannot_take_in_is_pytorchs_in_training() -> None:
    """More tensors than the gradient of a reduction and what is kept for it leave room for."""
    start = Builder(2, conv(2, (8, 64))).norm(16).op("mul", "channel").op("add", "full").op("tanh")
    chain = start.reduce("max", "channels").op("tanh").chain()
    plan = planned(chain, SHAPE, needs_grad=True)
    assert isinstance(plan, Plan)
    assert plan.chain.steps == chain.steps[:-2]
    assert plan.reasons[-1] == "max over channels → tanh: PyTorch's, with its gradients"
    wide = Builder(2, conv(2, (8, 528))).norm(16).op("relu").softmax().chain()
    plan = planned(wide, SHAPE, needs_grad=True)
    assert isinstance(plan, Plan)
    assert plan.chain.steps == wide.steps[:-1]


def test_training_keeps_no_more_than_pytorch() -> None:
    """A largest channel's place and not the value; a softmax's result where it is the chain's, else the value."""
    conv2d, shape = conv(2, (8, 64)), (64, 8, 64, 64)
    soft = planned(Builder(2, conv2d).op("add", "channel").softmax().chain(), shape, needs_grad=True)
    assert isinstance(soft, Plan)
    assert soft.gradients.from_result
    gated = planned(Builder(2, conv2d).softmax().op("sigmoid").chain(), shape, needs_grad=True)
    assert isinstance(gated, Plan)
    assert not gated.gradients.from_result
    hard = Builder(2, conv2d).op("mul", 2.0).reduce("min", "channels").op("tanh").chain()
    plan = planned(hard, shape, needs_grad=True)
    assert isinstance(plan, Plan)
    result, size = plan.value.bytes // 64, plan.value.shape[0] * plan.value.shape[2] * plan.value.shape[3]
    scales = 4 * (8 + 1)  # of the input's channels, and a flag for an infinity
    given = {buffer.number for buffer in plan.program.given}
    assert sum(buffer.bytes for buffer in plan.program.kept if buffer.number not in given) == result + 2 * size + scales


@pytest.mark.parametrize("name", SOFTMAXED)
def test_softmax_and_steps_after_a_reduction_are_in_the_last_pass(name: str) -> None:
    chain, shape = SOFTMAXED[name]
    plan = planned(chain, shape)
    assert isinstance(plan, Plan)
    assert plan.passes[-1].last == len(chain.steps)
    assert plan.over_channels is not None
    assert (plan.channels_end is None) == (name in ("49", "91"))
    assert result_shape(chain, problem(chain, shape))[1] == (1 if plan.channels_end else plan.value.shape[1])


def test_a_softmax_of_too_many_channels_is_pytorchs() -> None:
    def start() -> Builder:
        return Builder(2, conv(2, (8, 528))).norm(16).op("relu")

    plan, shorter = planned(start().softmax().op("tanh").chain(), SHAPE), planned(start().chain(), SHAPE)
    assert isinstance(plan, Plan)
    assert isinstance(shorter, Plan)
    assert plan.passes == shorter.passes
    assert plan.over_channels is None
    assert any("softmax over channels is PyTorch's" in line for line in plan.reasons)


def test_moments_are_not_all_that_is_needed() -> None:
    """The norm's own mean over channels would do for a mean; nothing of the kind holds for logsumexp."""
    plan = planned(Builder(3, conv(3, (3, 24))).norm(8).reduce("logsumexp", "channels").chain(), (16, 3, 24, 32, 32))
    assert isinstance(plan, Plan)
    assert isinstance(plan.passes[-1].sink, Store)
    assert isinstance(plan.passes[-2].sink, KeepMoments)


@pytest.mark.parametrize("channels", [1, 3, 16, 64, 100, 512])
def test_tiles_have_all_channels_and_are_bounded(channels: int) -> None:
    for positions in (1, 17, 126 * 126):
        block, block_c = channels_tile(channels, positions)
        assert channels <= block_c < 2 * channels
        assert 16 <= block <= 1024
        assert block * block_c <= 8192


@pytest.mark.parametrize("name", OVER_CHANNELS)
def test_nothing_of_the_values_size_is_written_after_the_convolution(name: str) -> None:
    chain, shape = OVER_CHANNELS[name]
    plan = planned(chain, shape)
    assert isinstance(plan, Plan)
    assert plan.channels_end == chain.steps[-1]
    assert plan.passes[0].source == "own convolution"
    assert plan.passes[-1].last == len(chain.steps)
