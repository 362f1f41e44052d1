"""Kernels of CUDA C++ compiled for the host by the C++ compiler, called as their compiled selves would be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import postlude.kernels.cuda

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
    library = folder / "kernel.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-DPOSTLUDE_HOST", *defines]
    command += [f"-DPOSTLUDE_ENTRY={entry}", f'-DPOSTLUDE_KERNEL="{kernel}"']
    command += [str(HERE / "driver.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return HostKernel(library)
