"""CUDA C++ at run time: compiled by NVRTC, cached on disk, launched by the CUDA driver. Importing this loads
nothing."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from postlude.errors import PostludeError
from postlude.files import kept_or_made
from postlude.hardware import cache_folder, nvrtc_libraries

_WITHOUT_ASKING = 48 << 10  # bytes of shared memory, static included, that a block may have without opting in
_OWN_SHARED, _MAX_DYNAMIC_SHARED, _CARVEOUT = 1, 8, 9  # CUfunction_attribute
_ALWAYS = ("--std=c++17",)


class CudaError(PostludeError):
    """The CUDA driver or NVRTC returned an error."""


@dataclass(frozen=True)
class Source:
    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()  # name and text of each included file


def read_source(folder: Path, name: str) -> Source:
    """A .cu file with all .cuh files of its folder as headers."""
    headers = tuple((path.name, path.read_text("utf-8")) for path in sorted(folder.glob("*.cuh")))
    return Source(name, (folder / name).read_text("utf-8"), headers)


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for name in nvrtc_libraries():
        with suppress(OSError):
            library = ctypes.CDLL(name)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise CudaError("NVRTC was not found: install nvidia-cuda-nvrtc, or a CUDA build of torch, which carries it.")


def _ask_nvrtc(name: str, *arguments: Any) -> None:
    code = getattr(_nvrtc(), name)(*arguments)
    if code != 0:
        raise CudaError(f"NVRTC's {name} failed: {_nvrtc().nvrtcGetErrorString(code).decode()}.")


@functools.cache
def nvrtc_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _ask_nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_source(source: Source, options: Sequence[str]) -> tuple[bytes, str]:
    """The cubin and the compiler's log."""
    program = ctypes.c_void_p()
    count = len(source.headers)
    texts = (ctypes.c_char_p * count)(*(text.encode() for _, text in source.headers))
    names = (ctypes.c_char_p * count)(*(name.encode() for name, _ in source.headers))
    text, name = source.text.encode(), source.name.encode()
    _ask_nvrtc("nvrtcCreateProgram", ctypes.byref(program), text, name, count, texts, names)
    try:
        flags = [option.encode() for option in (*_ALWAYS, *options)]
        code = _nvrtc().nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        log = _text_of(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if code != 0:
            why = _nvrtc().nvrtcGetErrorString(code).decode()
            raise CudaError(f"NVRTC {nvrtc_version()} cannot compile {source.name}: {why}.\n{log}")
        return _text_of(program, "nvrtcGetCUBIN"), log
    finally:
        _nvrtc().nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(program: ctypes.c_void_p, getter: str) -> bytes:
    size = ctypes.c_size_t()
    _ask_nvrtc(f"{getter}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _ask_nvrtc(getter, program, text)
    return text.raw


def cubin_for(source: Source, options: Sequence[str]) -> bytes:
    """The cubin, compiled now or by an earlier process. A cached file is a hash of the cubin, then the cubin."""
    key = hashlib.sha256(repr((source, tuple(options), _ALWAYS, nvrtc_version())).encode()).hexdigest()
    name = f"{Path(source.name).stem}-{key}.cubin"
    return kept_or_made(cache_folder(), name, lambda: compile_source(source, options)[0])


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"The CUDA driver cannot be loaded: {error}.") from error
    uint, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[uint] * 7, pointer, pointer, pointer]
    return library


def _ask_driver(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise CudaError(f"The CUDA driver's {name} failed: {_driver_text(code)}.")


def _driver_text(code: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} ({code})"


def _bind_context(device: int) -> None:
    """Binds torch's CUDA context: a thread that has not used the CUDA runtime yet has none."""
    handle, wanted, current = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _ask_driver("cuDeviceGet", ctypes.byref(handle), device)
    _ask_driver("cuDevicePrimaryCtxRetain", ctypes.byref(wanted), handle)
    _ask_driver("cuCtxGetCurrent", ctypes.byref(current))
    if current.value != wanted.value:
        _ask_driver("cuCtxSetCurrent", wanted)


class _Slots(threading.local):
    """The arguments of a launch, 8 bytes each, and their addresses: allocated once per thread, filled at every
    launch."""

    def __init__(self, count: int) -> None:
        self.values = (ctypes.c_int64 * count)()
        first = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))


class Kernel:
    """A function on one device. Its arguments are pointers and integers of at most 64 bits."""

    def __init__(self, cubin: bytes, name: str, device: int, shared: int, arguments: int) -> None:
        torch.cuda.init()
        self.device, self.shared, self.slots, self.count = device, shared, _Slots(arguments), arguments
        with torch.cuda.device(device):
            _bind_context(device)
            self.module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _ask_driver("cuModuleLoadData", ctypes.byref(self.module), cubin)
            _ask_driver("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
            own = ctypes.c_int()
            _ask_driver("cuFuncGetAttribute", ctypes.byref(own), _OWN_SHARED, function)
            if shared + own.value > _WITHOUT_ASKING:
                _ask_driver("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
                _ask_driver("cuFuncSetAttribute", function, _CARVEOUT, 100)  # so that several blocks fit
        self.function = function.value
        self.call: Callable[..., int] = _driver().cuLaunchKernel

    def launch(self, grid: tuple[int, int], threads: int, values: Sequence[int]) -> None:
        """Launches on torch's current stream of the kernel's device."""
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(grid, threads, values)
        slots = self.slots
        slots.values[:] = values  # type: ignore[call-overload]  # any sequence of the right length will do
        stream = torch.cuda.current_stream(self.device).cuda_stream
        arguments = (self.function, *grid, 1, threads, 1, 1, self.shared, stream, slots.pointers, None)
        code = self.call(*arguments)
        if code == 201:  # no context in this thread yet
            _bind_context(self.device)
            code = self.call(*arguments)
        if code != 0:
            raise CudaError(f"The CUDA driver refused a launch: {_driver_text(code)}.")
        return None


@functools.cache
def load(source: Source, name: str, options: tuple[str, ...], device: int, shared: int, arguments: int) -> Kernel:
    return Kernel(cubin_for(source, options), name, device, shared, arguments)
