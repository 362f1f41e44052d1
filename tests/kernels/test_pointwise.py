"""Words whose digits depend on how they are computed, by Triton's interpreter, over their whole range."""

from __future__ import annotations

import inspect

import pytest
import torch

from postlude.run.programs import HEADER, compose

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
KERNEL = """
@triton.jit
def tanh_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, tanh(tl.load(p_x + o)))
"""


def units_off(right: str = "", wrong: str = "") -> float:
    """The largest error of tanh in fp32, in units in the last place."""
    from postlude.kernels.triton import pointwise

    source = inspect.getsource(getattr(pointwise.tanh, "fn", pointwise.tanh))
    assert right in source
    text = source if source.startswith("@") else f"@triton.jit\n{source}"
    kernel = compose(HEADER + text.replace(right, wrong) + KERNEL)["tanh_kernel"]
    x = torch.cat([torch.linspace(-10, 10, 1 << 15), torch.logspace(-8, 0.5, 1 << 15)])
    y = torch.empty_like(x)
    kernel[(1,)](x, y, len(x))
    truth = x.double().tanh()
    unit = torch.nextafter(truth.float().abs(), torch.tensor(torch.inf)).double() - truth.float().abs()
    return float(((y - truth).abs() / unit).max())


def test_tanh_keeps_its_digits() -> None:
    assert units_off() < 3.0


@pytest.mark.parametrize(
    ("right", "wrong"), [("< 0.75", "< 1.2"), ("< 0.75", "< 0.1"), ("2.0 * tl.abs", "2.001 * tl.abs")]
)
def test_other_bounds_and_powers_are_seen_to_fail(right: str, wrong: str) -> None:
    assert units_off(right, wrong) > 3.0
