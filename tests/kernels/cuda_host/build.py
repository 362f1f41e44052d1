"""Kernels of CUDA C++ compiled for the host by the C++ compiler, called as their compiled selves would be."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import postlude.kernels.cuda
from postlude.plan.program import CudaCall

HERE = Path(__file__).parent
KERNELS = Path(postlude.kernels.cuda.__file__).parent


class HostKernel:
    """Stands in for run.nvrtc.Kernel."""

    def __init__(self, library: Path) -> None:
        self.run = ctypes.CDLL(str(library)).launch

    def launch(self, grid: tuple[int, int], threads: int, values: Sequence[int]) -> None:
        slots = (ctypes.c_int64 * len(values))(*values)
        code = self.run(*grid, threads, slots, len(values))
        assert code == 0, {1: "threads wait for one another for ever", 2: "not the kernel's arguments"}[code]


def build(
    folder: Path, defines: Sequence[str], mutant: tuple[str, str] = ("", ""), entry: str = "few_channels_moments"
) -> HostKernel:
    """A mutant is the kernel with the first text, which must be there once, replaced by the second."""
    folder.mkdir()
    for path in [*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]:
        shutil.copy(path, folder)
    kernel = folder / f"{entry.removesuffix('_moments')}.cu"
    if mutant[0]:
        included = [kernel, *folder.glob("*.cuh")]
        holders = [path for path in included if mutant[0] in path.read_text("utf-8")]
        assert len(holders) == 1, mutant[0]
        text = holders[0].read_text("utf-8")
        assert text.count(mutant[0]) == 1, mutant[0]
        holders[0].write_text(text.replace(*mutant), "utf-8")
    kernel.write_text(kernel.read_text("utf-8").replace("    __shared__ ", "    static "), "utf-8")
    return HostKernel(_compiled(kernel, entry, ["-DPOSTLUDE_HOST", *defines]))


class HostKernels:
    """Kernels of calls, each built once for its macros and mutant."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self.new_folder = new_folder
        self.built: dict[object, HostKernel] = {}

    def __call__(self, call: CudaCall, mutant: tuple[str, str] = ("", "")) -> HostKernel:
        key = (call.kernel, call.macros, mutant)
        if key not in self.built:
            self.built[key] = build(self.new_folder() / "kernel", options_of(call.macros), mutant, call.kernel)
        return self.built[key]


def options_of(macros: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The compiler's."""
    return tuple(f"-D{name}={value}" for name, value in macros)


def build_text(folder: Path, source: str, entry: str) -> Path:
    """A kernel of a file's own text; what only a card has is the emulation's."""
    for name in ("void mma", " pack(_pair)?", "float unpack"):
        source, count = re.subn(rf"(DEVICE|__device__) [\w ]*?{name}\(.*?\n\}}\n", "", source, flags=re.DOTALL)
        assert count == 1, name
    for name in ("load_matrices", "load_transposed"):
        source = re.sub(rf"(DEVICE|__device__) [\w ]*?{name}\(.*?\n\}}\n", "", source, count=1, flags=re.DOTALL)
    source = re.sub(r"extern __shared__ uint4 (\w+)\[\];", r"uint4* \1 = ::shared;", source)
    kernel = folder / f"{entry}.cu"
    kernel.write_text(source.replace("__shared__", "static"), encoding="utf-8")
    return _compiled(kernel, entry, ["-w", "-DIS_BFLOAT=0", "-DSHARED_BYTES=232448"])


def _compiled(kernel: Path, entry: str, options: Sequence[str]) -> Path:
    library = kernel.with_suffix(".so")
    command = ["g++", "-std=c++17", "-Og", "-shared", "-fPIC", *options]
    command += [f"-DPOSTLUDE_ENTRY={entry}", f'-DPOSTLUDE_KERNEL="{kernel}"']
    command += [str(HERE / "driver.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library
