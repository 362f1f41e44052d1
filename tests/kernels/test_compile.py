"""Every GPU kernel compiled ahead of time for the cards we support: it compiles, fits, and does not spill."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cases import BY_NAME
from postlude.emit import pass_slots
from postlude.plan.gpu import last_fused_step
from postlude.plan.program import first_barrier
from postlude.run.programs import program

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]

# Shared memory that one block may have, in bytes.
CARDS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
KERNELS = ("row_moments_kernel", "last_moments_kernel", "row_finish_kernel", "last_finish_kernel")
CHAINS = ("conv norm residual relu", "conv gelu residual", "61 small")


class OfflineDriver:
    """Lets a kernel be warmed up for a card that is not here."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(params=sorted(CARDS))
def card(request: pytest.FixtureRequest) -> Iterator[int]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(OfflineDriver(request.param))
    yield request.param
    driver._active = before


def compiled(kernel: str, chain_name: str, dtype: torch.dtype) -> Any:
    from triton import language as tl

    from postlude.kernels.triton import normalize

    chain = BY_NAME[chain_name].chain
    last = last_fused_step(chain)
    before = (first_barrier(chain) or 1) - 1
    pointers, early = pass_slots(chain, last), pass_slots(chain, before)
    acc = torch.float32
    operands = [dtype] * 6
    options: dict[str, Any] = {"BLOCK": 4096, "ACC": tl.float32, "num_warps": 8, "grid": (1,)}
    if kernel.startswith("last"):
        options.update(BLOCK=128, BLOCK_C=32, WIDE=False)
    if kernel == "last_finish_kernel":
        options.update(CONTIGUOUS_OUT=True)
    if "moments" in kernel:
        fn = program(chain, "before", before, early)
        return getattr(normalize, kernel).warmup(
            dtype, acc, acc, *operands, 32, 4096, 8, 4, BEFORE=fn, SQUARES=True, **options
        )
    fn = program(chain, "whole", last, pointers)
    has_norm = first_barrier(chain) is not None
    return getattr(normalize, kernel).warmup(
        dtype, dtype, acc, acc, *operands, 32, 4096, 8, 4, WHOLE=fn, HAS_NORM=has_norm, **options
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_within_each_cards_limits(card: int, kernel: str) -> None:
    for chain_name in CHAINS[: 1 if card != 90 else None]:
        for dtype in (torch.float16,) if card != 90 else (torch.float16, torch.bfloat16, torch.float32):
            found = compiled(kernel, chain_name, dtype)
            assert found.metadata.shared <= CARDS[card]
            if card == 90:
                assert spilled_bytes(found.asm["ptx"]) == 0, (kernel, chain_name, dtype)


def test_combining_compiles(card: int) -> None:
    from triton import language as tl

    from postlude.kernels.triton.normalize import combine_moments_kernel

    f = torch.float32
    found = combine_moments_kernel.warmup(
        f, f, f, f, 64, 8, 4096, 32768, 1e6, 1e-5, BLOCK=1024, ACC=tl.float32, grid=(1,)
    )
    assert found.metadata.shared <= CARDS[card]


def test_relu_keeps_nan(card: int) -> None:
    if card == 90:
        found = compiled("row_finish_kernel", "61 small", torch.float32)
        assert "max.NaN.f32" in found.asm["ptx"]


def spilled_bytes(ptx: str) -> int:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", report.stderr + report.stdout)))
