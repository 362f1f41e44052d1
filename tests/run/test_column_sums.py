"""Sums by column and products with them, in Triton's interpreter: against float64, at NaN and infinities, mutants."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from postlude.stages import column_sums
from postlude.stages.column_sums import means_of_windows, product_with_sums, sum_of_multiples
from tracing import run_stage
from wrong_kernels import replace_text

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, at infinities
]
SHAPES = [(5, 6, 7), (9, 130, 70), (3, 512, 33)]  # N, features, inputs


def operands(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    batch, features, inputs = shape
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, inputs, generator=generator) + 0.5 for rows in (batch, features))
    return x.to(dtype), weight.to(dtype)


def by_features(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of the features, each of which is computed."""
    return (x.double() @ weight.double().t()).sum(1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    found, _ = run_stage(product_with_sums, x, weight)
    assert found is not None
    return found


@pytest.fixture(params=[512, 1], ids=["many chunks", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_sums, "_PROGRAMS", request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("chunks")
def test_a_product_with_sums_is_the_sum_of_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = operands(shape, dtype)
    truth, rtol = by_features(x, weight), 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(product(x, weight), truth, rtol=rtol, atol=rtol * float(truth.abs().max()))


@pytest.mark.parametrize("sign", ["both signs", "positive", "negative"])
@pytest.mark.usefixtures("chunks")
def test_infinities_and_nan_are_pytorchs(sign: str) -> None:
    x, weight = operands((9, 40, 7))
    if sign != "both signs":
        weight = weight.abs() * (1 if sign == "positive" else -1)
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, -torch.inf, torch.nan
    x[3, 0], x[3, 1] = torch.inf, -torch.inf
    x[4, 5], weight[:, 5] = torch.inf, 0.0
    x[5, 6] = torch.inf
    weight[3, 6] = 0.0  # NaN in one feature
    torch.testing.assert_close(product(x, weight), by_features(x, weight), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entry", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.usefixtures("chunks")
def test_infinities_and_nan_of_a_weight_are_pytorchs(entry: float) -> None:
    x, weight = operands((6, 40, 7))
    x[1, 2] = 0.0
    weight[33, 2] = entry
    torch.testing.assert_close(product(x, weight), by_features(x, weight), equal_nan=True)
    weight[2, 2] = -entry
    torch.testing.assert_close(product(x, weight), by_features(x, weight), equal_nan=True)


@pytest.mark.usefixtures("chunks")
def test_rows_times_factors_are_added_up() -> None:
    x, _ = operands((130, 1, 70))
    factors = torch.randn(130, dtype=torch.float64)
    (found,) = run_stage(sum_of_multiples, x, factors)
    torch.testing.assert_close(found, factors @ x.double())


@pytest.mark.parametrize(("window", "count"), [(4, 10), (16, 2), (17, 2)])
def test_means_of_windows(window: int, count: int) -> None:
    _, weight = operands((1, 41, 70))
    (found,) = run_stage(lambda weight: means_of_windows(weight, window, count), weight)
    truth = weight[: window * count].double().reshape(count, window, -1).mean(1)
    torch.testing.assert_close(found, truth.float(), rtol=1e-6, atol=1e-6)


MUTANTS = {
    "a row of the next chunk": ("(first + ROWS_PER_PROGRAM, ROWS)", "(first + ROWS_PER_PROGRAM + 1, ROWS)"),
    "only the last tile": ("b_sum += tl.sum(b_x", "b_sum = tl.sum(b_x"),
    "extremes of the first chunk": ("for i_chunk in range(CHUNKS)", "for i_chunk in range(1)"),
    "a mean over a whole tile": ("b_sum /= end - first", "b_sum /= BLOCK_ROWS"),
    "sums in place of extremes": ('total = tl.where(tl.abs(total) < float("inf"), total, extremes)', "total += 0.0"),
    "a column with NaN forgotten": ("tl.where(b_sum == b_sum, b_min, b_sum)", "b_min"),
    "factors forgotten": ("b_x *= tl.load(p_factor + o_r, mask=o_r < end, other=0.0)[:, None]", "b_x *= 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(monkeypatch, "column_sums", *MUTANTS[name])
    monkeypatch.setattr(column_sums, "_PROGRAMS", 1 if name == "only the last tile" else 512)
    with pytest.raises(AssertionError):  # noqa: PT012 (one of these sees it)
        test_a_product_with_sums_is_the_sum_of_products(SHAPES[1], torch.float32)
        test_means_of_windows(4, 10)
        test_rows_times_factors_are_added_up()
        test_infinities_and_nan_are_pytorchs("both signs")
        test_infinities_and_nan_of_a_weight_are_pytorchs(torch.nan)
        test_infinities_and_nan_of_a_weight_are_pytorchs(torch.inf)
