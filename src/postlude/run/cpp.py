"""Kernels for the CPU: compiled once, kept on disk, called through ctypes.

A cached file begins with a hash of the library in it, as for cubins, and a library is loaded from a temporary copy that
is deleted at once, so that no process loads an incomplete one. The compiler works in a temporary folder. Two processes
that compile the same kernel write the same file, one after the other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.errors import PostludeError
from postlude.files import kept_or_made
from postlude.hardware import cache_folder, cpp_compiler, cpu_capability, threads, versions
from postlude.plan.program import CppCall

# Compiler flags for the vector instructions that PyTorch itself uses on this machine.
_VECTORS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"),
}
_LONGEST = 120.0  # seconds before a compiler is stopped


class CompilerError(PostludeError):
    """The C++ compiler failed or took too long."""


class CppLaunch:
    """A kernel of a program, loaded at its first call."""

    def __init__(self, call: CppCall) -> None:
        self.call = call
        self.numbers = (ctypes.c_double * len(call.numbers))(*call.numbers)
        self.pointers = ctypes.c_void_p * len(call.arguments)
        self.function: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        if self.function is None:
            self.function = kernel_of(self.call)
        self.function(self.pointers(*[tensor.data_ptr() for tensor in tensors]), self.numbers, threads())


def kernel_of(call: CppCall) -> Callable[..., None]:
    return _loaded(call.text, call.kernel)


@functools.lru_cache(maxsize=1024)
def _loaded(text: str, kernel: str) -> Callable[..., None]:
    library = library_for(text)
    with tempfile.TemporaryDirectory(prefix="postlude-") as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(library)
        try:
            function: Any = getattr(ctypes.CDLL(str(path)), kernel)  # stays mapped after its file is deleted
        except (OSError, AttributeError) as error:
            raise CompilerError(f"a compiled kernel cannot be loaded: {error}.") from error
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return function  # type: ignore[no-any-return]


def library_for(text: str) -> bytes:
    """The shared library for this text, compiled now or by an earlier process."""
    command = cpp_command()
    what = (text, _headers(), command[1:], versions()["torch"])
    key = hashlib.sha256(repr(what).encode()).hexdigest()
    return kept_or_made(cache_folder(), f"cpu-{key}.so", lambda: _compiled(text, command))


def cpp_command() -> tuple[str, ...]:
    """The compiler and its flags.

    Kernels use PyTorch's threads: they link no OpenMP library but libtorch_cpu's. With two libraries, the idle threads
    of one would spin on the cores that the other needs.
    """
    capability, folder = cpu_capability(), Path(torch.__file__).parent
    flags = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-w")
    macros = (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}")
    linked = ("-L", str(folder / "lib"), "-ltorch_cpu", "-lc10")  # c10: headers' checks that a compiler leaves in
    return (cpp_compiler() or "", *flags, *_VECTORS[capability], *macros, "-I", str(folder / "include"), *linked)


def _compiled(text: str, command: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="postlude-") as name:
        folder = Path(name)
        (folder / "kernel.cpp").write_text(text, "utf-8")
        compiler, *flags = command
        files = ["-shared", "-I", str(_folder()), str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")]
        try:
            done = subprocess.run([compiler, *files, *flags], capture_output=True, text=True, timeout=_LONGEST)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError(f"{compiler} cannot compile a kernel: {error}.") from error
        if done.returncode != 0:
            raise CompilerError(f"{compiler} cannot compile a kernel (exit status {done.returncode}).\n{done.stderr}")
        return (folder / "kernel.so").read_bytes()


@functools.cache
def _folder() -> Path:
    return Path(str(resources.files("postlude.kernels") / "cpp"))


@functools.cache
def _headers() -> tuple[tuple[str, str], ...]:
    return tuple((path.name, path.read_text("utf-8")) for path in sorted(_folder().glob("*.h")))
