"""Fused chains under autograd: gradients, what is kept for them, and PyTorch's contracts, by Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cases import BY_NAME, Builder, conv
from postlude import reference
from postlude.chain import Chain, Value
from postlude.check import tensors_for
from postlude.plan import Plan, lower, problem_of
from postlude.plan.gemm import Gemm
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.program import Buffer, KernelCall, Program
from postlude.run.chain_run import Training
from postlude.run.execute import prepare
from postlude.run.runner import runner_of
from run.test_gpu import CARD, SMALL
from tracing import kernel_calls

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
BLOCK = Builder(2, conv(2, (3, 4), padding=1)).norm(None).op("leaky_relu", slope=0.1).chain()
RESIDUAL = Builder(2, conv(2, (3, 4), padding=1, bias=False)).op("relu").norm(2).op("add", "full").op("silu").chain()
ADDED = Builder(2, conv(2, (3, 4), padding=1)).norm(2).op("add", "full").chain()
TURNED = Builder(2, conv(2, (3, 4), transposed=True)).op("relu").norm(2).chain()
GATED = Builder(2, conv(2, (3, 4), padding=1)).op("mul", "row").norm(2).op("mul", "row").op("silu").chain()
NORM = Builder(2).op("mul", "channel").norm(2).op("gelu", approximate="tanh").chain()
PLAIN = Builder(2, conv(2, (3, 4), padding=1)).op("gelu", approximate="none").op("mul", "channel").op("relu").chain()
FROM_RESULT = Builder(2, conv(2, (3, 4), padding=1)).op("add", "channel").op("add", "full").op("relu").chain()
PLAIN_TURNED = Builder(2, conv(2, (3, 4), transposed=True)).op("mish").op("add", "full").op("mul", Value(0)).chain()
CHAINS = {"block": BLOCK, "residual": RESIDUAL, "added": ADDED, "transposed": TURNED, "no convolution": NORM} | {
    "gated": GATED,
    "no norm": PLAIN,
    "from its result": FROM_RESULT,
    "rows of two": Builder(2, conv(2, (72, 32), padding=1)).norm(4).chain(),
    "no norm, transposed": PLAIN_TURNED,
}


@pytest.fixture
def library_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.gpu.own_convolution", lambda *_: "not in this test")


def inputs(chain: Chain, dtype: torch.dtype = torch.float64, layout: str = "contiguous") -> list[Tensor]:
    channels = chain.producer.in_channels if chain.producer else 4
    made = tensors_for(chain, (2, channels, 5, 4), dtype, layout=layout)  # type: ignore[arg-type]
    return [t.requires_grad_() for t in made]


def training(
    chain: Chain, tensors: Sequence[Tensor], memory: str = "default", precision: str | None = None
) -> Training:
    problem = dataclasses.replace(problem_of(tensors, memory=memory), needs_grad=True)
    if precision is not None:
        problem = dataclasses.replace(problem, precision=precision, allows_tf32=precision == "tf32")
    plan = lower_for_gpu(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.tile is not None
    tile = SMALL["channels_last" if plan.tile.block_c else "contiguous"]
    if isinstance(plan.own, Gemm) and plan.gradients.of_input is not None and plan.gradients.of_weight is not None:
        plan = dataclasses.replace(
            plan,
            own=dataclasses.replace(plan.own, rows=32),
            gradients=dataclasses.replace(
                plan.gradients,
                of_input=dataclasses.replace(plan.gradients.of_input, rows=32),
                of_weight=dataclasses.replace(plan.gradients.of_weight, splits=2),
            ),
        )
    return Training(dataclasses.replace(plan, by=tile), plan.chain)


def gradients(run: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    y = run(tensors)
    wanted = [t for t in tensors if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    return y, *torch.autograd.grad(y, wanted, torch.randn(y.shape, generator=generator).to(y.dtype))


def assert_gradients(chain: Chain, tensors: Sequence[Tensor], memory: str = "default", tolerance: float = 1e-8) -> None:
    truth = gradients(lambda ts: reference.evaluate(chain, ts, dtype=torch.float64), tensors)
    for ours, true in zip(gradients(training(chain, tensors, memory), tensors), truth, strict=True):
        assert ours.shape == true.shape
        torch.testing.assert_close(
            ours.double(), true.double(), rtol=tolerance, atol=tolerance * float(true.abs().max() + 1)
        )


@pytest.mark.parametrize(
    ("layout", "memory"), [("contiguous", "default"), ("channels_last", "default"), ("contiguous", "lean")]
)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.usefixtures("poisoned_memory", "library_convolution")
def test_gradients_are_autograds(name: str, layout: str, memory: str) -> None:
    assert_gradients(CHAINS[name], inputs(CHAINS[name], layout=layout), memory)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, *mode) for name in ("block", "transposed") for mode in ((torch.float64, 1e-8), (torch.float32, 1e-5))),
        ("gated", torch.float64, 1e-8),
        ("no norm", torch.float32, 1e-5),
        ("from its result", torch.float32, 1e-5),
        ("rows of two", torch.float32, 1e-5),
        ("from its result", torch.float64, 1e-8),
        ("no norm, transposed", torch.float64, 1e-8),
    ],
    ids=str,
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_by_convolutions_of_our_own(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Forward, input's and weight's: in float64, and in two half-precision planes."""
    tensors = inputs(CHAINS[name], dtype)
    assert training(CHAINS[name], tensors).plan.gradients.of_weight is not None
    assert_gradients(CHAINS[name], tensors, tolerance=tolerance)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["block", "no norm"])
def test_the_pass_that_makes_a_gradient_finds_its_largest(name: str, layout: str) -> None:
    tensors = inputs(CHAINS[name], torch.float32, layout)
    run = training(CHAINS[name], tensors, precision="fp32")
    program = run.program(tensors, [True] * len(tensors))
    calls = kernel_calls(program.backward)
    (pack,) = [call for call in calls if call.kernel == "pack_input_kernel" and not_given(call, program)]
    dv, *_, largest = pack.arguments
    assert isinstance(dv, Buffer)
    assert isinstance(largest, Buffer)
    assert program.gradient is not None
    ends = [dv, largest]
    passes = runner_of(program.given, program.forward, [program.result, *program.kept], "cpu")
    y, *kept = passes(*(tensor.detach() for tensor in tensors))
    assert y is not None
    stopped = program.backward[: program.backward.index(pack)]
    found = runner_of([*program.kept, program.gradient], stopped, ends, "cpu")(*kept, torch.randn_like(y))
    value, most = (tensor for tensor in found if tensor is not None)
    assert torch.equal(most[: value.shape[1]].view(torch.float32), value.abs().amax((0, 2, 3)))


def not_given(call: KernelCall, program: Program) -> bool:
    return call.arguments[0] not in program.given


def test_gradcheck_over_convolutions_of_our_own() -> None:
    chain = Builder(2, conv(2, (2, 2), 2)).op("silu").norm(1).chain()
    tensors = [t.requires_grad_() for t in tensors_for(chain, (1, 2, 3, 3), torch.float64)]
    run = training(chain, tensors)
    assert torch.autograd.gradcheck(lambda *ts: run(ts), tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["block", "no convolution"])
@pytest.mark.usefixtures("library_convolution")
def test_gradcheck_over_the_real_kernels(name: str) -> None:
    chain = CHAINS[name]
    tensors = inputs(chain)
    run = training(chain, tensors)
    assert torch.autograd.gradcheck(lambda *ts: run(ts), tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["block", "added"])
@pytest.mark.usefixtures("library_convolution")
def test_second_derivatives_are_those_of_the_first(name: str) -> None:
    chain = CHAINS[name]
    tensors = inputs(chain)
    run = training(chain, tensors)
    assert torch.autograd.gradgradcheck(lambda *ts: run(ts), tensors, fast_mode=True)


@pytest.mark.parametrize(
    "chain",
    [
        BLOCK,
        ADDED,
        PLAIN_TURNED,
        FROM_RESULT,
        Builder(2, conv(2, (3, 4))).op("add", "full").op("tanh").chain(),
        Builder(2, conv(2, (3, 4))).op("mul", 0.3).op("rsub", "full").op("sigmoid").chain(),
        Builder(2, conv(2, (3, 4))).op("add", "full").op("reciprocal").chain(),
        Builder(2, conv(2, (3, 4))).op("add", 90.0).op("add", "full").op("sqrt").chain(),
        Builder(2, conv(2, (3, 4))).op("mul", 2.0).op("sub", "full").chain(),
    ],
    ids=str,
)
@pytest.mark.usefixtures("library_convolution")
def test_gradients_can_be_differentiated_again(chain: Chain) -> None:
    """The first and the second ones are PyTorch's, from whatever was kept."""
    tensors = inputs(chain)
    run = training(chain, tensors)
    found = []
    for way in (run, lambda ts: reference.evaluate(chain, ts)):
        y = way(tensors)
        dy = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
        first = torch.autograd.grad(y, tensors, dy, create_graph=True)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), tensors, allow_unused=True, materialize_grads=True
        )
        found.append((*first, *second))
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-8, atol=1e-8 * float(true.abs().max() + 1))


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (2, 3), (3, 4)], ids=str)
@pytest.mark.usefixtures("library_convolution")
def test_frozen_tensors_get_nothing(frozen: tuple[int, ...]) -> None:
    tensors = inputs(BLOCK)
    for slot in frozen:
        tensors[slot].requires_grad_(False)
    assert_gradients(BLOCK, tensors)


@pytest.mark.usefixtures("library_convolution")
def test_two_backward_calls_and_accumulation() -> None:
    tensors = inputs(BLOCK)
    y = training(BLOCK, tensors)(tensors).square().sum()
    y.backward(retain_graph=True)
    once = [t.grad.clone() for t in tensors if t.grad is not None]
    y.backward()
    for one, t in zip(once, tensors, strict=True):
        torch.testing.assert_close(t.grad, 2 * one)


@pytest.mark.usefixtures("library_convolution")
def test_checkpointing() -> None:
    tensors = inputs(BLOCK)
    run = training(BLOCK, tensors)
    plain = gradients(run, tensors)
    again = gradients(lambda ts: checkpoint(lambda *t: run(t), *ts, use_reentrant=False), tensors)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def saved_bytes(run: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> int:
    """Saved bytes, each memory once, without leaves: parameters and inputs exist anyway."""
    seen: dict[int, int] = {}
    leaves = {t.untyped_storage().data_ptr() for t in tensors}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in leaves:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(tensors)
    del result
    return sum(seen.values())


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.usefixtures("library_convolution")
def test_never_more_is_kept_than_eager_keeps(name: str) -> None:
    chain = CHAINS[name]
    tensors = tensors_for(chain, (2, chain.producer.in_channels if chain.producer else 4, 9, 8), torch.float32)
    tensors = tuple(t.requires_grad_() for t in tensors)
    theirs = saved_bytes(lambda ts: reference.evaluate(chain, ts), tensors)
    ours = saved_bytes(training(chain, tensors), tensors)
    assert ours <= theirs, (ours, theirs)
    lean = training(chain, tensors, "lean")
    from_result = lean.plan.gradients.from_result
    assert from_result == (name == "from its result") == any("only the result" in r for r in lean.plan.reasons)
    if chain.producer is not None and not from_result:
        assert saved_bytes(lean, tensors) <= 256  # the norm's moments


@pytest.mark.usefixtures("library_convolution")
def test_a_sum_may_be_changed_in_place_and_what_relu_keeps_may_not() -> None:
    """The same as with PyTorch's own operators, of which an addition saves nothing."""
    for word in ("mul", "relu"):
        start = Builder(2, conv(2, (3, 4))).op("add", "full")
        chain = (start.op("mul", 2.0) if word == "mul" else start.op("relu")).chain()
        tensors = inputs(chain)
        run = training(chain, tensors)
        assert run.plan.gradients.from_result
        for way in (run, lambda ts, chain=chain: reference.evaluate(chain, ts)):
            loss = way(tensors).mul_(3).square().sum()
            if word == "relu":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
        if word == "mul":
            assert_gradients(chain, inputs(chain))


def test_a_result_that_does_not_tell_enough_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.trained.needs_no_more_than_its_result", lambda *_: True)
    chain = Builder(2, conv(2, (3, 4))).op("gelu", approximate="none").chain()
    tensors = inputs(chain)
    assert training(chain, tensors).plan.gradients.from_result
    with pytest.raises(AssertionError):
        assert_gradients(chain, tensors)


@pytest.mark.parametrize(("chain", "is_kept"), [(ADDED, False), (RESIDUAL, True)])
def test_a_tensor_that_is_only_added_is_not_kept(chain: Chain, is_kept: bool) -> None:
    program = training(chain, inputs(chain)).plan.program
    assert (program.given[-1] in program.kept) == is_kept


@pytest.mark.usefixtures("library_convolution")
def test_autocasts_dtype_is_what_is_kept_and_gradients_come_back_in_each_tensors_own() -> None:
    half = dataclasses.replace(BLOCK, producer=dataclasses.replace(BLOCK.producer, dtype="float16"))  # type: ignore[type-var]
    tensors = inputs(half, torch.float32)
    y, *grads = gradients(training(half, tensors), tensors)
    assert y.dtype == reference.evaluate(half, tensors).dtype
    assert [g.dtype for g in grads] == [t.dtype for t in tensors]
    truth = gradients(lambda ts: reference.evaluate(half, ts, dtype=torch.float64), tensors)
    for ours, true in zip(grads, truth[1:], strict=True):
        torch.testing.assert_close(ours, true, rtol=2e-2, atol=2e-2 * float(true.abs().max()) + 1e-5)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.usefixtures("library_convolution")
def test_gradients_from_the_tensors_alone_are_the_same(dtype: str | None) -> None:
    chain = dataclasses.replace(BLOCK, producer=dataclasses.replace(BLOCK.producer, dtype=dtype))  # type: ignore[type-var]
    tensors = inputs(chain, torch.float32)
    run = training(chain, tensors)
    y = run(tensors)
    dy = torch.randn_like(y)
    with torch.no_grad():
        again = run.gradients_again(tensors, dy, [True] * len(tensors))
    for kept, found in zip(torch.autograd.grad(y, tensors, dy), again, strict=True):
        assert found is not None
        torch.testing.assert_close(found.to(kept.dtype), kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    "chain",
    [
        Builder(2, conv(2, (3, 4))).op("hardswish").norm(2).reduce("mean", "space").op("mul", 2.0).chain(),
        Builder(2, conv(2, (3, 4))).op("silu").reduce("sum", "sample").chain(),
        Builder(2, conv(2, (3, 4))).norm(2).op("silu").norm(2).chain(),
    ],
    ids=str,
)
def test_what_follows_the_backward_passes_is_pytorchs(chain: Chain) -> None:
    tensors = inputs(chain)
    problem = dataclasses.replace(problem_of(tensors), device="cuda", needs_grad=True)
    plan = lower(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert plan.reasons[-1].endswith(": PyTorch's, with its gradients")
    run = prepare(chain, plan)
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    for ours, true in zip(gradients(run, tensors), truth, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-8, atol=1e-8 * float(true.abs().max() + 1))


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (Builder(2, conv(2, (3, 4))).op("mul", "channel").op("relu").chain(), "PyTorch saves only the chain's"),
        (BY_NAME["conv relu norm mean relu"].chain, "a reduction or a second norm"),
        (BY_NAME["two norms"].chain, "a reduction or a second norm"),
    ],
)
def test_what_the_backward_passes_do_not_cover_is_declined(chain: Chain, reason: str) -> None:
    channels = chain.producer.in_channels if chain.producer else 4
    tensors = tensors_for(chain, (2, channels, *[8] * chain.dims), torch.float32)
    problem = dataclasses.replace(problem_of(tensors), needs_grad=True)
    assert reason in str(lower_for_gpu(chain, problem, CARD, even_if_slower=True))


def assert_infinities(name: str, planes: str) -> None:
    """What PyTorch has as an infinite gradient of the input is one, and what has no part in it is finite. The weight's
    has at least PyTorch's, and none in other channels: taps that meet the infinity beyond the border multiply it by 0.
    """
    chain = CHAINS[name]
    tensors = inputs(chain, torch.float32)
    run = training(chain, tensors, precision=planes)
    assert run.plan.gradients.of_input is not None
    y = run(tensors)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    dy[0, 1, 2, 1] = torch.inf
    dx, dw, *_ = torch.autograd.grad(y, tensors, dy)
    true_x, true_w, *_ = torch.autograd.grad(reference.evaluate(chain, tensors), tensors, dy)
    ours, true = (each.nan_to_num(0, 1, -1).where(~each.isfinite(), 2) for each in (dx, true_x))
    assert torch.equal(ours, true)
    assert not (dw.isfinite() & ~true_w.isfinite()).any()
    others = [axis for axis in range(dw.dim()) if axis != (1 if "transposed" in name else 0)]
    assert torch.equal(dw.isfinite().all(others), true_w.isfinite().all(others))


@pytest.mark.parametrize("name", ["no norm", "no norm, transposed"])
@pytest.mark.parametrize("planes", ["fp32", "tf32"])
def test_an_infinite_gradient_stays_where_it_belongs_without_a_norm(name: str, planes: str) -> None:
    assert_infinities(name, planes)


def test_infinities_that_are_not_kept_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.plan.convolve.has_norm", lambda _: True)
    with pytest.raises(AssertionError):
        assert_infinities("no norm", "fp32")
