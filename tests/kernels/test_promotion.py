"""How often a sum on tensor cores must be promoted to ordinary fp32 to stay exact: an emulation of truncating sums.

Triton's interpreter adds exactly, so it cannot see this; on an H200 the emulation was seen to give the errors measured
there (one long sum 2.0e-6, promoted every 64 products 1.6e-7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cases import CHAIN_61
from plan.test_lower import CARD, problem
from postlude.plan.convolve import gemm_for
from postlude.plan.gemm import Gemm

STEP = 16  # products that the hardware adds at once
BITS = 24  # of the aligned sum


def truncated(total: Tensor) -> Tensor:
    """Cut to fp32's significant bits towards zero."""
    mantissa, exponent = torch.frexp(total)
    return torch.ldexp(torch.trunc(mantissa * 2**BITS) / 2**BITS, exponent)


def planes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Planes as packing writes them: scaled to 2¹⁴…2¹⁵, then fp16 of the number, and fp16 of the remainder."""
    scaled = x * 2.0 ** (14 - torch.floor(torch.log2(x.abs().max())))
    high = scaled.half().double()
    return high, (scaled - high).half().double()


def product(a: Tensor, b: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """The two-plane product [M, K] · [K, N], its sum promoted `every` so many products; and the exact one."""
    (a_high, a_low), (b_high, b_low) = planes(a), planes(b)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    for start in range(0, a.shape[1], every):
        part = torch.zeros_like(total, dtype=torch.float64)
        stop = min(start + every, a.shape[1])
        for left, right in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
            for at in range(start, stop, STEP):
                part = truncated(part + left[:, at : at + STEP] @ right[at : at + STEP])
        total += part.float()
    exact = (a_high + a_low) @ (b_high + b_low)
    return total.double(), exact


def error(every: int) -> float:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(64, 64 * 27, generator=generator, dtype=torch.float64) + 0.3  # an offset: sums that grow
    b = torch.randn(64 * 27, 32, generator=generator, dtype=torch.float64)
    ours, exact = product(a.float().double(), b.float().double(), every)
    return float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_the_planned_interval_is_as_exact_as_fp32() -> None:
    planned = gemm_for(CHAIN_61, problem(CHAIN_61, (16, 64, 32, 32, 32), device="cuda", precision="fp32"), CARD)
    assert isinstance(planned, Gemm)
    assert planned.arithmetic.planes == 2
    assert error(planned.block_k) < 3e-7


def test_one_long_sum_is_not() -> None:
    """The mutant: the kernel without its `acc += part`."""
    assert error(64 * 27) > 1e-6
