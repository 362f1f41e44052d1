"""Moments of a convolution from correlations of its input: right by the rule, and the convolution where they cancel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cases import Builder, conv
from cpp_kernels import Library, built, calls_of, compiled_plan, needs_compiler, serve
from postlude import reference
from postlude.chain import Chain, Convolution
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan.cpu_few_channels import CpuFewChannels
from postlude.run.execute import call, prepare


def ending(conv: Convolution) -> Chain:
    return Builder(conv.dims, conv).norm(2).reduce("mean", "sample").chain()


def chain_of(dims: int, channels: tuple[int, int], taps: int = 3, padding: int = 0, dilation: int = 1) -> Chain:
    return ending(conv(dims, channels, taps, padding=padding, dilation=dilation))


def with_taps(*taps: int, padding: tuple[int, ...]) -> Chain:
    """Of two channels."""
    return ending(dataclasses.replace(conv(len(taps), (2, 4)), kernel=taps, padding=padding))


PLAIN = chain_of(3, (3, 6))
CASES: dict[str, tuple[Chain, tuple[int, ...]]] = {
    "odd sizes": (PLAIN, (2, 3, 7, 9, 13)),
    "smallest": (PLAIN, (2, 3, 5, 5, 5)),
    "padded": (chain_of(3, (3, 4), padding=1), (2, 3, 6, 7, 16)),
    "2-D, one channel": (chain_of(2, (1, 34)), (20, 1, 21, 18)),
    "2-D, blocks of rows": (chain_of(2, (3, 4)), (2, 3, 70, 1040)),
    "several parts": (chain_of(3, (3, 4)), (2, 3, 30, 40, 33)),
    "without bias": (ending(conv(2, (2, 6), bias=False)), (3, 2, 11, 40)),
    "four channels": (chain_of(2, (4, 6)), (2, 4, 17, 9)),
    "taps of other sizes": (with_taps(2, 1, 3, padding=(1, 0, 2)), (2, 2, 6, 5, 9)),
    "one tap along x": (with_taps(3, 1, padding=(2, 0)), (2, 2, 9, 8)),
    "two taps along x": (chain_of(2, (3, 4), 2), (2, 3, 9, 8)),
    "transposed": (ending(conv(2, (3, 4), transposed=True)), (2, 3, 9, 12)),
}
# Only staging reads the input, by its strides: one case with each of its parts is enough for the other layout.
LAID_OUT = [(name, "contiguous") for name in CASES] + [(name, "channels_last") for name in ("padded", "several parts")]


@pytest.fixture(scope="module")
def forced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("postlude.plan.cpu_few_channels.CLEARLY", float("inf"))
        yield


@pytest.fixture(scope="module")
def library(forced: None) -> Library:
    calls = [one for name, layout in LAID_OUT for one in calls_of(*CASES[name], layout)]
    return built(calls + calls_of(PLAIN, (2, 3, 7, 9, 13), "contiguous", torch.bfloat16))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    serve(monkeypatch, library)


def fused(chain: Chain, tensors: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        plan = compiled_plan(chain, tensors)
        assert isinstance(plan.own, CpuFewChannels)
        assert plan.own.is_correlated
        return call(prepare(chain, plan), tensors)


def error(chain: Chain, tensors: Sequence[Tensor]) -> float:
    truth = reference.evaluate(chain, tensors, dtype=torch.float64)
    return float(((fused(chain, tensors) - truth) / truth).abs().max())


def rows_and_differences() -> list[Tensor]:
    """The third sample has large numbers that are the same along a row, and some filters are differences along it."""
    x, weight, bias, *more = tensors_for(PLAIN, (3, 3, 7, 9, 13), torch.float32, "cpu", 0, "normal", "contiguous")
    x[2] = 3000 * x[2, :, :, :, :1] + torch.sin(torch.arange(13.0))
    weight[3:] = 0
    weight[3:, :, 1, 1, 0], weight[3:, :, 1, 1, 2] = -1, 1
    bias[3:] = torch.tensor([-1.0, 0.0, 1.0])  # as large as the results, so that these and their variance matter
    return [x, weight, bias, *more]


@needs_compiler
@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
@pytest.mark.usefixtures("served", "poisoned_memory")
def test_is_right_by_the_rule(name: str, layout: str) -> None:
    chain, shape = CASES[name]
    verdict = verify_chain(fused, chain, chain_points(chain, shape, torch.float32, "cpu", layout=layout))
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.usefixtures("served")
def test_is_right_in_bfloat16() -> None:
    verdict = verify_chain(fused, PLAIN, chain_points(PLAIN, (2, 3, 7, 9, 13), torch.bfloat16, "cpu"))
    assert verdict.right, verdict


@needs_compiler
@pytest.mark.parametrize("scale", [1e-24, 1e-16, 1.0, 1e16])
@pytest.mark.usefixtures("served")
def test_products_that_leave_the_range_are_not_used(scale: float) -> None:
    """The sums of products of 1e-24 are zero, those of 1e16 finite."""
    x, *more = tensors_for(PLAIN, (2, 3, 7, 9, 13), torch.float32, "cpu", 0, "normal", "contiguous")
    assert error(PLAIN, [x * scale, *more]) < 1e-4


@needs_compiler
@pytest.mark.usefixtures("served")
def test_where_correlations_cancel_the_convolution_is_computed(monkeypatch: pytest.MonkeyPatch, forced: None) -> None:
    tensors = rows_and_differences()
    assert error(PLAIN, tensors) < 2e-5
    calls = calls_of(PLAIN, (3, 3, 7, 9, 13), "contiguous")
    serve(monkeypatch, built(calls, lambda text: "#define LEAST_SHARE -1.0  // mutant: no guard\n" + text))
    assert error(PLAIN, tensors) > 1e-4


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.usefixtures("served")
def test_a_sample_that_is_not_finite_affects_no_other(value: float) -> None:
    tensors = tensors_for(PLAIN, (3, 3, 7, 9, 13), torch.float32, "cpu", 0, "normal", "contiguous")
    right = fused(PLAIN, tensors)
    tensors[0][1, 2, 3, 4, 5] = value
    result = fused(PLAIN, tensors)
    assert result[1].isnan()
    assert torch.equal(result[[0, 2]], right[[0, 2]])


@needs_compiler
@pytest.mark.parametrize("name", ["odd sizes", "several parts", "2-D, blocks of rows"])
@pytest.mark.usefixtures("served")
def test_bits_do_not_depend_on_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, shape = CASES[name]
    tensors = tensors_for(chain, shape, torch.float32, "cpu", 0, "normal", "contiguous")
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr("postlude.run.cpp.threads", lambda threads=threads: threads)
        found.append(fused(chain, tensors))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
