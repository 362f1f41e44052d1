"""Kernels compiled ahead of time for cards that are not here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.plan.program import Call
from tracing import compiled, kernel_calls

# Architecture → shared memory that one block may have, in bytes.
CARDS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


class OfflineDriver:
    """Lets a kernel be warmed up for a card that is not here."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by device: one number for all would give every card the first one's code.
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(params=sorted(CARDS))
def card(request: pytest.FixtureRequest) -> Iterator[int]:
    """Test modules take it as `card = offline.card`."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(OfflineDriver(request.param))
    yield request.param
    driver._active = before


def use_card(monkeypatch: pytest.MonkeyPatch, architecture: int) -> None:
    """One card for the rest of a test."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", OfflineDriver(architecture))


@dataclass(frozen=True)
class Compiled:
    name: str
    shared: int
    warps: int
    ptx: str
    ttgir: str


def compiled_calls(calls: Iterable[Call], architecture: int) -> list[Compiled]:
    """Every Triton kernel of a program or a stage, compiled for the card that is active: this one."""
    found = []
    for call in kernel_calls(calls):
        launch, made = compiled(call)
        assert made.metadata.target.arch == architecture
        found.append(Compiled(call.kernel, made.metadata.shared, launch.warps, made.asm["ptx"], made.asm["ttgir"]))
        assert not packed_constants(found[-1].ptx), f"ptxas would compute something else for {call.kernel}"
    return found


def packed_constants(ptx: str) -> list[str]:
    """Additions to pairs of 16-bit integers of constants that differ: where only one of the pair is used, ptxas adds
    the other's. So do 12.8 to 13.1; 13.3, whose PTX is 9.3, does not."""
    version = re.search(r"\.version (\d+)\.(\d+)", ptx)
    if version is not None and (int(version[1]), int(version[2])) >= (9, 3):
        return []
    found = {name: int(number) for name, number in re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", ptx)}
    differing = {name for name, number in found.items() if (number & 0xFFFF) != (number >> 16 & 0xFFFF)}
    added = re.findall(r"(add\.[su]16x2\s+%r\d+, (%r\d+), (%r\d+);)", ptx)
    return [text for text, *operands in added if not differing.isdisjoint(operands)]


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled: int  # bytes


def _keep_reports() -> None:
    """Keeps what ptxas says when Triton calls it, beside what Triton keeps: another call would take as long."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    make = CUDABackend.make_cubin

    def make_cubin(self: Any, ptx: str, metadata: Any, options: Any, card: int) -> bytes:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            cubin: bytes = make(self, ptx, metadata, options, card)
        _kept(ptx, card).put(log.getvalue(), _REPORT, binary=False)
        return cubin

    knobs.nvidia.dump_ptxas_log = True
    CUDABackend.make_cubin = make_cubin


def _kept(ptx: str, card: int) -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256(f"{card} {ptx}".encode()).hexdigest())


_REPORT = "ptxas.txt"
pytest.importorskip("triton")
_keep_reports()


# The tests' limits are for the code of this Triton, which the recorded times are from. Other versions use registers
# differently; what they compile is not compared.
HAS_LIMITS = importlib.metadata.version("triton").startswith("3.6.")


def resources(ptx: str, card: int) -> Resources:
    """What a kernel needs; nothing where the tests have no limits for it."""
    if not HAS_LIMITS:
        return Resources(0, 0)
    path = _kept(ptx, card).get_file(_REPORT)
    report = Path(path).read_text("utf-8") if path else _report(ptx, card)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return Resources(max(map(int, re.findall(r"Used (\d+) registers", report))), spilled)


def _report(ptx: str, card: int) -> str:
    """Of a kernel that another program left in Triton's cache."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas, name = get_ptxas(card).path, sm_arch_from_capability(card)
        command = [ptxas, "-v", "--gpu-name", name, file.name, "-o", "/dev/null"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stderr + run.stdout
