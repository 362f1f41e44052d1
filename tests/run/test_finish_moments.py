"""The one launch from partial moments to a reduction's result, by Triton's interpreter, against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import CASES, Builder, Case, conv
from postlude import emit, reference, steps
from postlude.chain import Cast, Chain
from postlude.check import tensors_for
from postlude.plan.barriers import MomentsOnly, moments_only
from postlude.plan.problem import Spec
from postlude.run import launch
from postlude.run.compose import HEADER, compose
from postlude.stages.cuts import Partials
from postlude.stages.moments import finish_moments
from postlude.words import POINTWISE, REDUCTIONS
from tracing import kernel_calls, run_stage, traced_calls

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
TOLERANCES = {torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-12}


def extra(name: str, builder: Builder, shape: tuple[int, ...]) -> Case:
    return Case(name, builder.chain(), shape)


EXTRA = [
    extra("8 groups of 3", Builder(3, conv(3, (3, 24))).norm(8).reduce("mean", "sample"), (2, 3, 5, 6, 7)),
    extra("instance_norm sum over space", Builder(2).norm(None).reduce("sum", "space"), (3, 5, 9, 8)),
    extra(
        "norm mul add mean",
        Builder(2).norm(3).op("mul", "channel").op("add", -0.3).reduce("mean", "sample"),
        (2, 12, 9, 8),
    ),
    extra("groups are channels", Builder(2).norm(7).reduce("sum", "sample", True), (2, 7, 9, 8)),
    extra("one group", Builder(2).norm(1, affine=False).op("add", "channel").reduce("sum", "sample"), (2, 20, 9, 8)),
    extra("one channel", Builder(3).norm(1).reduce("mean", "space", True), (3, 1, 4, 5, 6)),
    extra(
        "two norms of other groups",
        Builder(2).norm(2).op("mul", 0.1).op("mul", "channel").norm(6, affine=False).reduce("mean", "space"),
        (2, 18, 9, 8),
    ),
    extra(
        "steps after the reduction",
        Builder(2).reduce("mean", "space", True).op("silu").op("mul", 3.0).reduce("sum", "sample", True),
        (2, 6, 9, 8),
    ),
    extra("255 channels in groups of 5", Builder(2).norm(51).reduce("mean", "space"), (1, 255, 4, 8)),
    extra("sum over sample", Builder(2).op("relu").reduce("sum", "sample"), (2, 6, 9, 8)),
]
MOMENTS_ONLY = [case for case in CASES + EXTRA if moments_only(case.chain)]


def value_before(chain: Chain, tensors: tuple[Tensor, ...]) -> tuple[Tensor, MomentsOnly]:
    """[N, C, S] in float64: what the chain's moments are taken of."""
    need = moments_only(chain)
    assert need is not None
    before = dataclasses.replace(chain, steps=chain.steps[: need.before])
    return reference.evaluate(before, tensors, dtype=torch.float64).flatten(2), need


def partial_moments(value: Tensor, sizes: list[int], squares: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Means (or sums) and squares [N, C, CHUNKS] of chunks of `sizes`, NaN for none, and their counts [N, CHUNKS]."""
    parts = value.split(sizes, 2)
    counts = torch.tensor(sizes, dtype=value.dtype)
    means = torch.stack([part.mean(2) for part in parts], 2)
    m2 = torch.stack([(part - part.mean(2, keepdim=True)).square().sum(2) for part in parts], 2) / (counts > 0)
    return (means if squares else means * counts), m2, counts.expand(len(value), -1).contiguous()


def some_sizes(positions: int) -> list[int]:
    """Unequal chunks, one of them of no positions."""
    first = positions // 3
    return [first, 0, 1, positions - first - 1]


def finished(chain: Chain, tensors: tuple[Tensor, ...], acc: torch.dtype = torch.float64) -> Tensor:
    value, need = value_before(chain, tensors)
    parts = Partials(*(p.to(acc) for p in partial_moments(value, some_sizes(value.shape[2]), need.squares)))
    return finish(chain, value, parts, tensors[0].dtype, tensors)


def stage_of(chain: Chain, value: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
    need = moments_only(chain)
    assert need is not None
    spec = Spec((*value.shape, *[1] * (chain.dims - 1)), "float64", "contiguous")  # all positions along one axis
    steps = (chain, need.before + 1, need.squares, spec, dtype)
    return lambda *given: finish_moments(*steps, Partials(*given[:3]), given[3:])


def finish(chain: Chain, value: Tensor, parts: Partials, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    (result,) = run_stage(stage_of(chain, value, dtype), *parts, *tensors)
    assert result is not None
    return result


def is_launched(chain: Chain, value: Tensor, parts: Partials, dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    return bool(kernel_calls(traced_calls(stage_of(chain, value, dtype), *parts, *tensors)))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("case", MOMENTS_ONLY, ids=lambda c: c.name)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_the_chains_result(case: Case, dtype: torch.dtype) -> None:
    tensors = tensors_for(case.chain, case.shape, dtype, family="hierarchical")
    ours, theirs = finished(case.chain, tensors), reference.evaluate(case.chain, tensors)
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    truth = reference.evaluate(case.chain, tensors, dtype=torch.float64)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


def test_every_word_that_moments_go_through_has_its_text() -> None:
    assert set(steps.VARIANCE) == {word for word, row in POINTWISE.items() if row.affine}
    spans = {(op, over) for op, overs in REDUCTIONS.items() for over in overs}
    assert set(steps.REDUCTIONS) == {(op, over) for op, over in spans if over != "channels"}


def test_reads_as_one_would_write_it() -> None:
    builder = Builder(2).norm(3)
    builder.steps.append(Cast(builder.value, "float32"))
    chain = builder.op("mul", 0.5).norm(None, affine=False).reduce("sum", "sample").chain()
    assert emit.emit(steps.moments(chain, 1, 5)) == (
        "@triton.jit\n"
        "def moments(mean, var, count, o_c, m_c, C, a0, a1, a2, a3, a4, a5):\n"
        "    t1 = tl.load(a0 + o_c, mask=m_c, other=0.0).to(mean.dtype)\n"
        "    t2 = tl.load(a1 + o_c, mask=m_c, other=0.0).to(mean.dtype)\n"
        "    mean, var = normalize_moments(mean, var, o_c, C // 3, 1e-05)\n"
        "    mean = mul(mean, t1)\n"
        "    var = mul(var, t1 * t1)\n"
        "    mean = add(mean, t2)\n"
        "    mean = mul(mean, 0.5)\n"
        "    var = mul(var, 0.5 * 0.5)\n"
        "    mean, var = normalize_moments(mean, var, o_c, 1, 1e-05)\n"
        "    return tl.sum(tl.where(m_c, mean, 0.0)) * count\n"
    )


def test_more_chunks_than_a_tile_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.stages.moments._TILE", 32)  # tiles of two chunks
    case = Case("", Builder(2).norm(2).op("mul", "channel").reduce("mean", "sample").chain(), (3, 6, 9, 8))
    tensors = tensors_for(case.chain, case.shape, torch.float64, family="large offset")
    value, _ = value_before(case.chain, tensors)
    parts = Partials(*partial_moments(value, [0, 0, 5, 1, 0, 30, 7, 29, 0], True))
    ours = finish(case.chain, value, parts, torch.float64, tensors)
    truth = reference.evaluate(case.chain, tensors)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("over", ["space", "sample"])
@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm", [0, 3])
def test_what_is_not_finite_stays_where_pytorch_keeps_it(norm: int, what: float, over: str) -> None:
    builder = Builder(2).norm(norm) if norm else Builder(2).op("mul", "channel").op("add", 0.5)
    chain = builder.reduce("mean", over).chain()
    tensors = tensors_for(chain, (3, 12, 5, 4), torch.float32)
    tensors[0][1, 5, 2, 2] = what
    ours, truth = finished(chain, tensors), reference.evaluate(chain, tensors, dtype=torch.float64)
    assert 0 < int((~truth.isfinite()).sum()) < truth.numel()
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_single_precision_moments_are_combined_in_double() -> None:
    """Means of 300 spreads: added up in float32 they would lose three digits of the norm's mean."""
    chain = Builder(2).norm(4).reduce("mean", "space").chain()
    tensors = tensors_for(chain, (2, 24, 16, 16), torch.float32, family="large offset")
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    torch.testing.assert_close(finished(chain, tensors, torch.float32).double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [256, 257])
def test_what_the_launch_has_no_room_for_pytorch_does(channels: int) -> None:
    chain = Builder(2).norm(1).op("mul", "channel").norm(1).reduce("mean", "sample").chain()
    tensors = tensors_for(chain, (2, channels, 3, 3), torch.float32)
    value, _ = value_before(chain, tensors)
    parts = Partials(*partial_moments(value, [4, 5], True))
    assert is_launched(chain, value, parts, torch.float32, tensors) == (channels <= 256)
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    ours = finish(chain, value, parts, torch.float32, tensors)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)


def test_more_tensors_than_the_launch_takes_are_left_to_pytorch() -> None:
    builder = Builder(2).norm(1).op("mul", "channel").op("add", "channel").norm(1).op("mul", "channel")
    chain = builder.reduce("mean", "sample").chain()
    tensors = tensors_for(chain, (2, 8, 3, 3), torch.float32)
    value, _ = value_before(chain, tensors)
    parts = Partials(*partial_moments(value, [4, 5], True))
    assert not is_launched(chain, value, parts, torch.float32, tensors)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("b_m2 + b_n[None, :] * b_diff * b_diff", "b_m2"),  # forgets that the chunks' means differ
        (" + delta * delta * count * weight", ""),  # the same between tiles
        ("o_g[:, None] == o_g[None, :]", "o_c[:, None] >= 0"),  # one group for all
        ("mean = mean - group_mean", "mean = mean + 0 * group_mean"),
    ],
)
def test_a_wrong_kernel_is_seen_to_fail(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from postlude.kernels.triton import moments

    source = Path(moments.__file__).read_text()
    assert source.count(right) == 1
    mutant = compose(HEADER + source.replace(right, wrong))
    monkeypatch.setattr("postlude.stages.moments._TILE", 32)
    chain = Builder(2).norm(4).reduce("mean", "space").chain()
    tensors = tensors_for(chain, (2, 12, 9, 8), torch.float64, family="hierarchical")
    truth = reference.evaluate(chain, tensors)
    torch.testing.assert_close(finished(chain, tensors), truth)
    for name in ("finish_moments_kernel", "normalize_moments"):
        monkeypatch.setattr(moments, name, mutant[name])
    # The composed function found what it calls when it was made: make it anew.
    monkeypatch.setattr(launch, "compose", compose.__wrapped__)
    assert not torch.allclose(finished(chain, tensors), truth, rtol=1e-3)
