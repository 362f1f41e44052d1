"""CUDA C++ compiled by NVRTC for the cards we support: it compiles, fits, and does not spill. And its cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases import CHAIN_23
from kernels.cuda_host.build import options_of
from kernels.offline import CARDS
from machines import H200
from machines import card as machine_of
from plan.test_lower import problem
from postlude import hardware
from postlude.hardware import has_nvrtc
from postlude.plan.few_channels import STATIC, FewChannels, Geometry, shared_bytes
from postlude.plan.few_channels_gradient import few_channels_gradient_for
from postlude.plan.program import CudaCall
from postlude.run import nvrtc
from postlude.run.launch import cuda_source
from postlude.stages.few_channels import convolve_moments
from postlude.stages.few_channels_gradient import few_channels_gradient
from postlude.stages.few_channels_store import convolve_stored
from tracing import traced_calls

# What the kernel is for: operand, planes, input.
USES = {
    "fp32 in two planes": ("float16", 2, "float32"),
    "fp32 in one plane": ("float16", 1, "float32"),
    "bf16": ("bfloat16", 1, "bfloat16"),
}


def settings_for(card: int, operand: str, planes: int) -> FewChannels:
    """Smaller tiles where blocks have less shared memory."""
    small = CARDS[card] < 110_000
    rows, height = machine_of(card).card.abilities.few_channel_rows, (6 if small else 10)
    return FewChannels(operand, planes, 11, height, rows, blocks=1 if small and planes == 2 else 2)


@pytest.mark.compile
@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: install nvidia-cuda-nvrtc")
# What takes most on every card; the others once for each size of shared memory.
@pytest.mark.parametrize(
    ("card", "use"),
    [*((card, "fp32 in two planes") for card in sorted(CARDS)), *itertools.product((80, 90, 120), [*USES][1:])],
)
def test_compiles_within_each_cards_limits(card: int, use: str) -> None:
    operand, planes, dtype = USES[use]
    settings, shape = settings_for(card, operand, planes), Geometry(3, 24, (3, 3, 3), (0, 0, 0), False, dtype)
    given = [torch.empty(size, dtype=getattr(torch, dtype)) for size in ((2, 3, 24, 32, 32), (24, 3, 3, 3, 3), (24,))]
    (call,) = cuda_calls(lambda *tensors: convolve_moments(*tensors, (0, 0, 0), settings), *given)
    options = (f"--gpu-architecture=sm_{card}", "--ptxas-options=-v", *options_of(call.macros))
    cubin, log = nvrtc.compile_source(cuda_source(call.source), options)
    assert cubin.startswith(b"\x7fELF")
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None, log
    spilled = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)]
    assert spilled, log
    assert sum(spilled) == 0, f"{registers[0]}: {log}"
    assert int(registers[1]) * settings.warps * 32 * settings.blocks <= 65_536, registers[0]
    static = re.search(r"(\d+) bytes smem", log)
    assert static is not None, log
    assert call.shared_bytes == shared_bytes(settings, shape) <= CARDS[card] - int(static[1]), registers[0]
    assert int(static[1]) <= STATIC


@pytest.mark.compile
@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("keeps", [False, True], ids=["a norm follows", "infinities are kept"])
@pytest.mark.parametrize("outputs", [16, 24, 32])
def test_a_stored_convolution_compiles_within_hoppers_limits(outputs: int, keeps: bool) -> None:
    settings = settings_for(90, "float16", 2)
    given = [torch.empty(size) for size in ((2, 3, 24, 32, 32), (outputs, 3, 3, 3, 3), (outputs,))]
    (call,) = cuda_calls(lambda *tensors: (convolve_stored(*tensors, (0, 0, 0), settings, keeps),), *given)
    options = ("--gpu-architecture=sm_90", "--ptxas-options=-v", *options_of(call.macros))
    _, log = nvrtc.compile_source(cuda_source(call.source), options)
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    assert int(registers[1]) * settings.warps * 32 * settings.blocks <= 65_536, log
    assert int(spilled[1]) <= 8, log  # beside what mends outputs that read an infinity


def cuda_calls(stage: Callable[..., object], *tensors: torch.Tensor) -> list[CudaCall]:
    return [call for call in traced_calls(stage, *tensors) if isinstance(call, CudaCall)]


@pytest.mark.compile
@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("use", ["fp32 in two planes", "bf16"])
def test_the_planned_gradients_compile_within_hoppers_limits(use: str) -> None:
    operand, planes, dtype = USES[use]
    given = problem(CHAIN_23, (128, 3, 24, 32, 32), device="cuda")
    plan = few_channels_gradient_for(FewChannels(operand, planes, 11, 10), CHAIN_23, given, H200)
    assert plan is not None
    x, w = (torch.empty(size, dtype=getattr(torch, dtype), device="meta") for size in (given.x.shape, (24, 3, 3, 3, 3)))
    table = torch.empty((128, 24, 4), device="meta")
    # With the gradients of the input and of the weight: those that are wanted.
    for settings, wanted in ((plan.weight, (False, True)), (plan.both, (True, True)), (plan.both, (True, False))):
        how = functools.partial(few_channels_gradient, padding=(0, 0, 0), settings=settings, transposed=False)
        (call,) = cuda_calls(functools.partial(how, needs_input=wanted[0], needs_weight=wanted[1]), x, w, table)
        target = f"--gpu-architecture={H200.card.architecture}"
        options = (target, "--ptxas-options=-v", *options_of(call.macros))
        _, log = nvrtc.compile_source(cuda_source(call.source), options)
        spilled = re.search(r"(\d+) bytes spill stores", log)
        assert spilled is not None, log
        assert int(spilled[1]) <= 320, log  # sums that wait while others are made, once for every plane


@pytest.mark.compile
@pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: install nvidia-cuda-nvrtc")
def test_a_mistake_is_shown_with_the_compilers_words() -> None:
    with pytest.raises(nvrtc.CudaError, match=r"cannot compile wrong.cu(?s:.*)identifier \"missing\""):
        nvrtc.compile_source(nvrtc.Source("wrong.cu", "__global__ void f() { missing = 1; }"), ["-arch=sm_90"])


class Compiler:
    """Counts what it is asked to compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.0")
        monkeypatch.setattr(nvrtc, "compile_source", self.compile)

    def compile(self, code: nvrtc.Source, options: tuple[str, ...]) -> tuple[bytes, str]:
        self.calls += 1
        return f"{code.text} {options}".encode(), ""


CODE = nvrtc.Source("some.cu", "text", (("some.cuh", "header"),))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "cache"))
    return Compiler(monkeypatch)


def test_a_kernel_is_compiled_once_per_source_options_and_version(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = nvrtc.cubin_for(CODE, ("-DA=1",))
    assert nvrtc.cubin_for(CODE, ("-DA=1",)) == first
    assert compiler.calls == 1
    nvrtc.cubin_for(CODE, ("-DA=2",))
    nvrtc.cubin_for(nvrtc.Source("some.cu", "text", (("some.cuh", "another"),)), ("-DA=1",))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.1")
    nvrtc.cubin_for(CODE, ("-DA=1",))
    assert compiler.calls == 4
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".cubin"}  # nothing half-written is left


@pytest.mark.parametrize("damage", [b"", b"short", hashlib.sha256(b"").digest(), b"\0" * 100])
def test_a_damaged_file_is_built_again(compiler: Compiler, tmp_path: Path, damage: bytes) -> None:
    good = nvrtc.cubin_for(CODE, ())
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(damage)
    assert nvrtc.cubin_for(CODE, ()) == good
    assert nvrtc.cubin_for(CODE, ()) == good
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_only_costs_time(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert nvrtc.cubin_for(CODE, ()) == nvrtc.cubin_for(CODE, ())
    assert compiler.calls == 2


def test_a_write_that_fails_leaves_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    nvrtc.cubin_for(CODE, ())
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTLUDE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert hardware.cache_folder() == Path("/some/cache/postlude")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/some/home")
    assert hardware.cache_folder() == Path("/some/home/.cache/postlude")


def test_importing_loads_no_library() -> None:
    program = (
        "import ctypes, torch\n"
        "def refuse(*_): raise AssertionError('a library was loaded')\n"
        "ctypes.CDLL.__init__ = refuse\n"
        "import postlude.run.launch, postlude.stages.few_channels\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class Driver:
    """Answers every call with 0, but for launches, which it takes down."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.codes = [0]
        self.launched: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name != "cuLaunchKernel":
                return 0
            *sizes, stream, pointers, _ = arguments
            values = [ctypes.c_int64.from_address(pointers[i]).value for i in range(3)]  # type: ignore[index]
            self.launched.append((*sizes[1:], stream, *values))  # type: ignore[arg-type]
            return self.codes.pop(0)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    stream = type("Stream", (), {"cuda_stream": 77})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    return fake


def test_a_launch_hands_over_its_arguments(driver: Driver) -> None:
    kernel = nvrtc.Kernel(b"cubin", "some", device=1, shared=60_000, arguments=3)
    assert driver.calls.count("cuFuncSetAttribute") == 2
    kernel.launch((5, 2), 64, (1 << 47, -3, 7))
    assert driver.launched == [(5, 2, 1, 64, 1, 1, 60_000, 77, 1 << 47, -3, 7)]


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    kernel = nvrtc.Kernel(b"cubin", "some", device=1, shared=0, arguments=3)
    driver.codes = [201, 0]
    kernel.launch((1, 1), 32, (1, 2, 3))
    assert len(driver.launched) == 2


def test_a_refused_launch_says_why(driver: Driver) -> None:
    kernel = nvrtc.Kernel(b"cubin", "some", device=1, shared=0, arguments=3)
    driver.codes = [701]
    with pytest.raises(nvrtc.CudaError, match=r"refused a launch: .*\(701\)"):
        kernel.launch((1, 1), 32, (1, 2, 3))
