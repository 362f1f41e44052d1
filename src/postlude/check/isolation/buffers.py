"""Memory that the verifier shares with a candidate's process, one buffer per message that carries tensors.

The verifier makes every buffer, chooses its size, and never maps it: it reads and writes by system calls, so a
candidate that truncates the file or writes during a read can only spoil its own answer. The buffers have no name, so
none is left behind, however either process ends.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from postlude.check.isolation.wire import Layout, Spec, WireError, flat_values

NO_SEAL = "shared memory is an unnamed file that the candidate may shorten; its answer is then refused"


def can_be_sealed() -> bool:
    return hasattr(os, "memfd_create")


class Buffer:
    """Shared memory of a fixed size."""

    def __init__(self, size: int) -> None:
        self.descriptor = _new_file(size)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.descriptor)

    def write(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        for spec, tensor in zip(layout.specs, tensors, strict=True):
            values = flat_values(tensor, "cpu")
            view, written = _memory_of(values), 0
            while written < len(view):
                written += os.pwrite(self.descriptor, view[written:], spec.offset + written)

    def read(self, spec: Spec) -> Tensor:
        """The tensor, copied to our own memory."""
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
        view, done = _memory_of(flat), 0
        while done < len(view):
            count = os.preadv(self.descriptor, [view[done:]], spec.offset + done)
            if not count:
                raise WireError("lacks bytes that it announced")
            done += count
        if spec.dtype == torch.bool and bool((flat > 1).any()):
            raise WireError("has a bool that is neither 0 nor 1")
        return flat.view(spec.dtype).as_strided(spec.shape, spec.strides)

    def changed(self, layout: Layout, tensors: Sequence[Tensor]) -> list[int]:
        """Which tensors no longer have the bytes that were written."""
        found = []
        for place, (spec, tensor) in enumerate(zip(layout.specs, tensors, strict=True)):
            now = self.read(Spec((spec.nbytes,), (1,), torch.uint8, spec.offset))
            if not torch.equal(now, flat_values(tensor, "cpu").view(torch.uint8)):
                found.append(place)
        return found

    @contextmanager
    def signalled(self, after_s: float | None) -> Iterator[None]:
        """Sets the first byte after a while, unless what happens inside ends before."""
        if after_s is None:
            yield
            return
        timer = threading.Timer(after_s, os.pwrite, (self.descriptor, b"\x01", 0))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # before the descriptor is closed, whose number may then mean another file


def _memory_of(tensor: Tensor) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    # Without NumPy this is the only way to a tensor's memory. The caller keeps the tensor alive.
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b"")


def _new_file(size: int) -> int:
    if can_be_sealed():
        import fcntl

        descriptor = os.memfd_create("postlude-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        # From here on neither end can change the size, so no read goes past the end.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())
